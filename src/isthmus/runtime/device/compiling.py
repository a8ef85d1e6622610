"""A stage is compiled before its first micro-batch, where the job asks for it and a measurement says that it pays."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from isthmus.accelerators.copies import to_device
from isthmus.graph import Ref
from isthmus.protocol import Item
from isthmus.runtime.device.batches import Batches
from isthmus.runtime.messages.assignment import Assignment
from isthmus.training.compile_choice import compile_where_it_pays
from isthmus.training.engine import Engine, TorchEngine


def compile_stage(engine: Engine, assignment: Assignment, batches: Batches) -> tuple[str, ...]:
    """Lines for people, if the job asks for it at all."""
    if not assignment.engine.kernels.compile:
        return ()
    if not isinstance(engine, TorchEngine):
        return ("not compiled: the ranks of an island compute operator by operator",)
    return (compile_where_it_pays(engine, _columns(engine, assignment, batches)).note,)


def _columns(engine: TorchEngine, assignment: Assignment, batches: Batches) -> Mapping[Ref, Tensor]:
    """Of the first micro-batch that this stage works on."""
    item = Item(index=0, kind="train", step=0, micro_batches=assignment.engine.micro_batches)
    found = batches.columns(assignment.train, item, next(iter(assignment.view.own(item)), 0))
    return {ref: to_device(engine.accelerator, column) for ref, column in found.items()}
