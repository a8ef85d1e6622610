"""The application: what `import isthmus` gives, and what the command line calls. Nothing here prints."""
