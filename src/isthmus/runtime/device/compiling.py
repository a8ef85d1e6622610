"""A stage is compiled before its first micro-batch, where the job asks for it and a measurement says that it pays."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping

from torch import Tensor

from isthmus.accelerators.copies import to_device
from isthmus.errors import PeerError
from isthmus.graph import Ref
from isthmus.protocol import Item
from isthmus.runtime.device.batches import Batches
from isthmus.runtime.messages.assignment import Assignment
from isthmus.training.compiled import compile_where_it_pays
from isthmus.training.engine import Engine, TorchEngine

LOOK_S = 0.1


def compile_stage(
    engine: Engine, assignment: Assignment, batches: Batches, outdated: Callable[[], bool]
) -> tuple[str, ...]:
    """Lines for people, if the job asks for it at all. PeerError as soon as the stage is `outdated`."""
    if not assignment.engine.kernels.compile:
        return ()
    if not isinstance(engine, TorchEngine):
        return ("not compiled: the ranks of an island compute operator by operator",)
    columns = _columns(engine, assignment, batches)
    return (unless_outdated(lambda: compile_where_it_pays(engine, columns).note, outdated),)


def unless_outdated(act: Callable[[], str], outdated: Callable[[], bool]) -> str:
    """What `act` gives. PeerError where that is of no use any more: to compile may take longer than the coordinator
    waits for a device to stop, and cannot be ended, so that it goes on in a thread that nobody listens to."""
    given: queue.SimpleQueue[str | Exception] = queue.SimpleQueue()

    def do() -> None:
        try:
            given.put(act())
        except Exception as e:
            given.put(e)

    threading.Thread(target=do, name="compile", daemon=True).start()
    while True:
        try:
            found = given.get(timeout=LOOK_S)
        except queue.Empty:
            if outdated():
                raise PeerError("another plan was made while the stage was compiled") from None
            continue
        if isinstance(found, Exception):
            raise found
        return found


def _columns(engine: TorchEngine, assignment: Assignment, batches: Batches) -> Mapping[Ref, Tensor]:
    """Of the first micro-batch that this stage works on."""
    item = Item(index=0, kind="train", step=0, micro_batches=assignment.engine.micro_batches)
    found = batches.columns(assignment.train, item, next(iter(assignment.view.own(item)), 0))
    return {ref: to_device(engine.accelerator, column) for ref, column in found.items()}
