"""The protocol of callbacks."""

from __future__ import annotations

from typing import Protocol

from isthmus.callbacks.events import Evaluated, RunEnded, RunFault, RunStarted, StepDone


class Callback(Protocol):
    """Your own code in a run, in the coordinator's process. Every method does nothing: a class derived from this one
    overrides those that it needs.

    An exception of a method ends the run, as an error of the job. The run waits for a method to return.

    >>> class Losses(Callback):
    ...     def __init__(self) -> None:
    ...         self.seen: list[float | None] = []
    ...
    ...     def step(self, done: StepDone) -> None:
    ...         self.seen.append(done.loss)
    >>> losses = Losses()
    >>> losses.step(StepDone(step=1, steps=2, loss=0.5))
    >>> losses.seen
    [0.5]
    """

    def start(self, started: RunStarted) -> None:
        """The run begins, or goes on: once per session. The executors of a federated run are forked after it, so it
        starts no threads there."""

    def step(self, done: StepDone) -> None:
        """An optimizer step, or a federated round, is done."""

    def evaluation(self, evaluated: Evaluated) -> None:
        """The model was evaluated."""

    def fault(self, fault: RunFault) -> None:
        """A device was lost, joined or left, or another plan is in force."""

    def end(self, ended: RunEnded) -> None:
        """The session is over: the last call, whatever the outcome, where there was a `start`."""
