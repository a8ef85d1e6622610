"""A stage's operators, resolved once and run once per micro-batch."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from isthmus.accelerators import HOST, Accelerator
from isthmus.graph.operators import bind, no_gradient, operator_of
from isthmus.graph.opgraph import Op, Ref
from isthmus.graph.partition import StageGraph
from isthmus.training.faults import raise_if_jobs


class Slot(NamedTuple):
    """Where a tensor argument is found while a micro-batch runs."""

    ref: Ref


class Step(NamedTuple):
    name: str
    target: str  # the operator; empty where something else runs in its place
    described: str  # the operator, the module of the user's that calls it, and the line
    call: Callable[..., object]
    args: list[object]
    kwargs: dict[str, object]
    dtypes: tuple[torch.dtype, ...]  # types of its results
    writes: tuple[Ref, ...]  # buffers that it changes in place
    quiet: bool
    random: bool
    last_use: tuple[Ref, ...]  # values that no later step takes


class RunsOperators(Protocol):
    """A stage's operators, however they are run."""

    def run(self, values: dict[Ref, Tensor], step: int, micro_batch: int) -> dict[Ref, Tensor]:
        """`values` holds variables and inputs and gains the results that outlive the run."""
        ...


class Program:
    """The operators of one stage graph, bound to a micro-batch size and a device."""

    def __init__(
        self,
        stage: StageGraph,
        mode: Literal["train", "eval"],
        *,
        batch: int,
        accelerator: Accelerator = HOST,
        seed: int = 0,
        replaced: Mapping[str, Callable[..., object]] = {},
    ) -> None:
        """`seed` is the job's: random operators draw from (seed, step, micro-batch, op), whatever the cut. `replaced`
        says by target what runs in place of an operator."""
        self.batch = batch
        self._seed = seed
        self._accelerator = accelerator
        self._replaced = replaced
        device = accelerator.device
        kept = {c.value for c in stage.sends} | set(stage.outputs.values())
        kept |= {r for r in (stage.loss, stage.count) if r is not None}
        operators = [op for op in stage.ops if op.kind == "operator"]
        last = {Ref(op.name, i): op.name for op in operators for i in range(len(op.outputs))}  # unless taken later
        last |= {ref: op.name for op in operators for ref in op.refs()}
        variables = {op.name for op in stage.ops if op.kind != "operator"}
        flags = {op.name: op.requires_grad for op in stage.ops}
        flags_in = {c.value: c.gradient for c in stage.receives}
        ending: dict[str, list[Ref]] = {}
        for ref, user in last.items():
            if ref not in kept and ref.op not in variables:
                ending.setdefault(user, []).append(ref)
        self.steps = [self._step(op, mode, device, ending.get(op.name, []), (flags, flags_in)) for op in operators]

    def _step(
        self,
        op: Op,
        mode: Literal["train", "eval"],
        device: torch.device,
        ending: Sequence[Ref],
        flags: tuple[dict[str, tuple[bool, ...]], dict[Ref, bool]],
    ) -> Step:
        args, kwargs = bind(op, lambda ref: cast(Tensor, Slot(ref)), self.batch, device)
        own, received = flags
        needs = [received[r] if r in received else bool(own.get(r.op) and own[r.op][r.index]) for r in op.refs()]
        return Step(
            op.name,
            "" if op.target in self._replaced else op.target,
            _described(op),
            self._replaced.get(op.target) or operator_of(op.target),
            cast("list[object]", args),
            cast("dict[str, object]", kwargs),
            tuple(cast(torch.dtype, getattr(torch, o.dtype)) for o in op.outputs),
            tuple(Ref(name) for name in op.mutates),
            no_gradient(op, needs, mode),
            op.random,
            tuple(ending),
        )

    def run(self, values: dict[Ref, Tensor], step: int, micro_batch: int) -> dict[Ref, Tensor]:
        """Run every operator; `values` holds variables and inputs and gains the results that outlive the run.
        StepError names the operator that raised."""
        for s in self.steps:
            self.call(s, values, step, micro_batch)
        return values

    def call(self, s: Step, values: dict[Ref, Tensor], step: int, micro_batch: int) -> None:
        """Run one operator."""
        args = [fill(a, values) for a in s.args]
        kwargs = {k: fill(v, values) for k, v in s.kwargs.items()}
        try:
            with torch.no_grad() if s.quiet else contextlib.nullcontext():
                if s.random:
                    result = self._draw(s, args, kwargs, draw_seed(self._seed, step, micro_batch, s.name))
                else:
                    result = s.call(*args, **kwargs)
        except Exception as e:
            raise_if_jobs(s.described, e)
            raise
        if isinstance(result, Tensor):
            values[Ref(s.name)] = result
        else:
            for index, tensor in enumerate(cast("Sequence[Tensor]", result)):
                values[Ref(s.name, index)] = tensor
        for ref in s.last_use:
            values.pop(ref, None)

    def _draw(self, step: Step, args: list[object], kwargs: dict[str, object], seed: int) -> object:
        with self._accelerator.seeded(seed):
            return step.call(*args, **kwargs)


def _described(op: Op) -> str:
    places = [f"module {op.module!r}"] * bool(op.module) + [op.source] * bool(op.source)
    return f"{op.target} ({', '.join(places)})" if places else op.target


def fill(value: object, values: Mapping[Ref, Tensor]) -> object:
    """An argument with the values in its slots."""
    if type(value) is Slot:
        return values[value.ref]
    if type(value) is list:
        return [fill(v, values) for v in cast("list[object]", value)]
    return value


def draw_seed(seed: int, step: int, micro_batch: int, op: str) -> int:
    """The seed of one random operator in one micro-batch: 63 bits of a hash, so that no two draws are related."""
    text = f"{seed}/{step}/{micro_batch}/{op}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
