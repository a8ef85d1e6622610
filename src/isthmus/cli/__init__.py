"""The command line."""

from isthmus.cli.app import app, main

__all__ = ["app", "main"]
