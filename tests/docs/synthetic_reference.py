def build(path, *, width: int = 8, **rest):
    """What a user's own callable may look like."""
