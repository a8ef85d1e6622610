"""Replicas that never wait for each other, each a device or a pipeline, and the merger of what they learn."""
