"""A wide-area network on one machine."""
