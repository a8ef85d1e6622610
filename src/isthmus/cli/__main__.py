"""`python -m isthmus.cli` is `isthmus`."""

from isthmus.cli.app import main

main()
