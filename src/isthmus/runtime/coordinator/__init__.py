"""The coordinator of a run, and what it gives its devices."""
