"""Replicas that never wait for each other, each in a process of its own, and the merger of what they learn."""
