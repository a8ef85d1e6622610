"""Before a stage's first micro-batch: it is compiled, where the job asks for it and a measurement says that it pays;
and one that reads raw samples is tried on its own data, whether it computes each by itself.

Shapes tell where samples are put together (`graph.mixing`); they do not tell where values keep their shape and depend
on other samples all the same, as a softmax over them does, or lie at another sample's place. So one sample is exchanged
for another: nothing but its own values may change.
"""

from __future__ import annotations

import gc
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from isthmus.accelerators import Accelerator
from isthmus.accelerators.copies import to_device
from isthmus.combinations import refused
from isthmus.engines import EngineName
from isthmus.errors import PeerError, UserError
from isthmus.graph import Ref, StageGraph
from isthmus.graph.mixing import sample_axis
from isthmus.protocol import Item
from isthmus.protocol.worker import StageView
from isthmus.runtime.device.stage_data import Batches
from isthmus.runtime.messages.assignment import Assignment, GroupShare
from isthmus.training.compiled import compile_where_it_pays
from isthmus.training.engine import Engine, TorchEngine
from isthmus.training.engine_operators import engine_operators
from isthmus.training.jax import compute_by_jax
from isthmus.training.program import Program
from isthmus.training.split_backward import SplitEngine
from isthmus.training.stored import Sent, viewed
from isthmus.training.sums import GroupBuffer, Parameters, summed

LOOK_S = 0.1


def compile_stage(
    engine: Engine, name: EngineName, assignment: Assignment, batches: Batches, outdated: Callable[[], bool]
) -> tuple[str, ...]:
    """Lines for people, if the job asks for it at all, or the device's engine `name` is JAX. PeerError as soon as the
    stage is `outdated`."""
    if name == "jax":
        return (unless_outdated(lambda: _by_jax(engine, assignment, batches), outdated),)
    if not assignment.engine.kernels.compile:
        return ()
    if isinstance(engine, SplitEngine):
        return ("not compiled: the schedule computes weight gradients apart",)
    if not isinstance(engine, TorchEngine):
        return ("not compiled: the ranks of an island compute operator by operator",)
    columns = _columns(engine, assignment, batches)
    return (unless_outdated(lambda: compile_where_it_pays(engine, columns), outdated),)


def _by_jax(engine: Engine, assignment: Assignment, batches: Batches) -> str:
    if not isinstance(engine, TorchEngine):
        raise refused("JAX", "several ranks", "'jax'")
    if isinstance(engine, SplitEngine):
        return "computed by torch, not JAX: the schedule computes weight gradients apart"
    return compute_by_jax(engine, _columns(engine, assignment, batches))


def check_room(accelerator: Accelerator, planned_bytes: int) -> int:
    """Bytes in use before the stage. torch.OutOfMemoryError where an accelerator has less memory than planned."""
    gc.collect()  # the stage before is a cycle, of executor and links, that holds much memory and few objects
    accelerator.release_cached()
    found = accelerator.memory()
    accelerator.reset_peak()
    room = found.free + found.reserved - found.allocated
    if accelerator.asynchronous and planned_bytes > room:
        raise torch.OutOfMemoryError(f"tried to allocate {planned_bytes} bytes, {room} are there")
    return found.allocated


def check_operators(assignment: Assignment, name: EngineName) -> None:
    """UserError for operators of the stage that this device's engine lacks, or has at another schema."""
    here = engine_operators(name)
    if lacked := here.lacks(assignment.evaluation.schemas | assignment.train.schemas):
        raise UserError(
            f"operators: device {assignment.device!r} (engine {name}, torch {here.torch}) lacks {', '.join(lacked)} at "
            "the schema of the coordinator's torch: expected a plan in which its stage has none of them"
        )


def unless_outdated(act: Callable[[], str], outdated: Callable[[], bool]) -> str:
    """Return the result of `act`. PeerError where that is of no use any more: to compile may take longer than the
    coordinator waits for a device to stop, and cannot be ended, so that it goes on in a thread whose result is
    ignored."""
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
    """Return the columns of the first micro-batch that this stage works on."""
    item = Item(index=0, kind="train", step=0, micro_batches=assignment.engine.micro_batches)
    found = batches.columns(assignment.train, item, next(iter(assignment.view.own(item)), 0))
    return {ref: to_device(engine.accelerator, column) for ref, column in found.items()}


CLOSE = 1e-4
"""The tolerated difference as a share of the largest value: kernels may sum in another order, samples that mix differ
by far more."""


def check_samples_apart(assignment: Assignment, weights: Mapping[str, Sent], batches: Batches) -> None:
    """On the host, once. `weights` as for the engine, `batches` on the host too. UserError for values of a sample that
    depend on another."""
    size = assignment.engine.micro_batch_size
    if size == 1:
        return
    graphs: tuple[tuple[Literal["train", "eval"], StageGraph], ...] = (
        ("train", assignment.train),
        ("eval", assignment.evaluation),
    )
    for mode, stage in graphs:
        program = Program(stage, mode, batch=size, seed=assignment.engine.seed)
        first, others = (_inputs(stage, batches, number, size) for number in _own(assignment.view))
        before = _run(program, stage, weights, first)
        for exchanged in (0, size - 1):
            after = _run(program, stage, weights, _with(stage, first, others, exchanged))
            for ref in _changed(stage, before, after, exchanged):
                raise UserError(
                    f"privacy.activations: value {ref.op!r} of device {assignment.device!r} changes for a sample when "
                    "another one is exchanged, expected each sample's values to be its own"
                )


def _own(view: StageView) -> tuple[int, int]:
    """The first two micro-batches that the stage works on, by their numbers in the run."""
    for count in (2**k for k in itertools.count(1)):
        own = view.own(Item(index=0, kind="train", step=0, micro_batches=count))
        if len(own) > 1:
            return own[0], own[1]
    raise AssertionError("powers do not end")


def _inputs(stage: StageGraph, batches: Batches, number: int, size: int) -> dict[Ref, Tensor]:
    """The columns of a micro-batch, and random numbers for what comes from other stages."""
    item = Item(index=0, kind="train", step=0)
    found = batches.columns(stage, item, number)
    draws = torch.Generator().manual_seed(number)
    for c in stage.receives:
        found[c.value] = torch.randn(c.spec.shape_at(size), generator=draws).to(getattr(torch, c.spec.dtype))
    return found


def _with(
    stage: StageGraph, first: Mapping[Ref, Tensor], others: Mapping[Ref, Tensor], sample: int
) -> dict[Ref, Tensor]:
    axes = {c.value: sample_axis(c.spec) for c in stage.receives}
    found: dict[Ref, Tensor] = {}
    for ref, value in first.items():
        axis = axes.get(ref, 0)  # columns have their samples first
        found[ref] = value.clone()
        if axis is not None:
            found[ref].select(axis, sample).copy_(others[ref].select(axis, sample))
    return found


def _run(
    program: Program, stage: StageGraph, weights: Mapping[str, Sent], inputs: Mapping[Ref, Tensor]
) -> dict[Ref, Tensor]:
    written = {name for op in stage.ops for name in op.mutates}
    held: dict[Ref, Tensor] = {}
    for op in stage.variables():
        value, dtype = viewed(weights[op.target]).detach(), getattr(torch, op.outputs[0].dtype)
        held[Ref(op.name)] = value.to("cpu", dtype, copy=op.name in written)
    with torch.no_grad():
        return program.run({**held, **inputs}, 0, 0)


def _changed(
    stage: StageGraph, before: Mapping[Ref, Tensor], after: Mapping[Ref, Tensor], exchanged: int
) -> Iterator[Ref]:
    """Values that leave and are others for a sample that was not exchanged."""
    for c in stage.sends:
        axis = sample_axis(c.spec)
        if axis is None or not before[c.value].is_floating_point():
            continue
        moved = (after[c.value].double() - before[c.value].double()).abs().movedim(axis, 0)
        moved[exchanged] = 0
        if float(moved.max()) > CLOSE * float(before[c.value].double().abs().max()):
            yield c.value


def group_buffer(assignment: Assignment, group: GroupShare, engine: Engine, saved: Mapping[str, Tensor]) -> GroupBuffer:
    """Return the buffer of the parameters that a stage sums with a group."""
    own = {op.name: op.target for op in assignment.train.variables()}
    parameters = Parameters(engine, {name: own[name] for name in group.parameters})
    averages, share = assignment.view.averages, assignment.share.count / assignment.share.of
    return summed(parameters, None if averages == "gradients" else share, assignment.outer, saved)
