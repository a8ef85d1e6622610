"""`python -m isthmus` is `isthmus`."""

from isthmus.cli.app import main

main()
