"""How a run is asked to end."""

from isthmus.runtime.processes.signals import Stop, terminable

__all__ = ["Stop", "terminable"]
