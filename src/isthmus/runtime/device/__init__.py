"""A device at work for a run."""
