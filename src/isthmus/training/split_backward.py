"""The backward of a stage in two parts: input gradients (B), which the stage before waits for, and weight gradients
(W), which nobody waits for ("Zero bubble pipeline parallelism", Qi et al. 2023).

Every operator that takes a trained parameter, or what is computed from parameters alone, is a small autograd graph of
its own. That graph lives until the weight gradients are computed; all else is one outer graph, which B frees:

    F   outer graph: received value ─ operator ─ [operator with parameters] ─ operator ─ ...
    B   the outer graph backwards; in each [ ] the gradients of its inputs alone, and the output's gradient is kept
    W   each [ ] in reverse order: the gradients of its parameters, from the output's gradient

Where all parameters of an operator are vectors, as a norm's, B computes their gradients too: they are small, and what
they would be computed from is not.

The kernels are those of a whole backward, and the gradients of a parameter that is used several times are summed in
the order of a whole backward: the reverse of the forward. So the bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from isthmus.graph.opgraph import Ref
from isthmus.training.engine import AtStep, TorchEngine
from isthmus.training.faults import raise_if_jobs
from isthmus.training.program import Program, Slot, Step, fill

Values = dict[Ref, Tensor]


@dataclass
class _Call:
    """An operator that took parameters, in one micro-batch: its own graph."""

    step: Step
    taken: Mapping[Ref, Tensor]
    parameters: Values  # leaves that stand for parameters, and for what is computed from parameters alone
    outputs: Values = field(default_factory=dict[Ref, Tensor])  # those with a gradient
    seeds: Values = field(default_factory=dict[Ref, Tensor])  # gradients of outputs, where B brings them
    found: Sequence[Tensor | None] | None = None  # gradients of the parameters, where B computes them

    def run(self, leaves: Mapping[Ref, Tensor]) -> Sequence[Tensor]:
        """All outputs, in the operator's own graph. `leaves` stand for inputs whose gradients go on."""
        values = {**self.taken, **self.parameters, **leaves}
        self.taken = {}
        kwargs = {name: fill(value, values) for name, value in self.step.kwargs.items()}
        made = self.step.call(*(fill(value, values) for value in self.step.args), **kwargs)
        found = [made] if isinstance(made, Tensor) else list(cast("Sequence[Tensor]", made))
        self.outputs = {Ref(self.step.name, n): t for n, t in enumerate(found) if t.requires_grad}
        return found


class _InputGradients(Function):
    """An operator with parameters in the outer graph: its backward gives the gradients of its inputs alone."""

    @staticmethod
    def forward(ctx: Any, call: _Call, refs: Sequence[Ref], *inputs: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in inputs]
            made = call.run(dict(zip(refs, leaves, strict=True)))
        given = tuple(t.detach() for t in made)
        ctx.call, ctx.leaves = call, leaves
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(g for g, t in zip(given, made, strict=True) if not t.requires_grad))
        return given

    @staticmethod
    def backward(ctx: Any, *seeds: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        call, leaves = cast(_Call, ctx.call), cast("list[Tensor]", ctx.leaves)
        given: Values = {}
        for number, seed in enumerate(seeds):
            if seed is not None and (ref := Ref(call.step.name, number)) in call.outputs:
                given[ref] = seed
        if any(t.dim() > 1 for t in call.parameters.values()):
            call.seeds = given
            return None, None, *_gradients(call.outputs, given, leaves, retain_graph=True)
        found = _gradients(call.outputs, given, [*leaves, *call.parameters.values()])
        call.outputs, call.found = {}, found[len(leaves) :]
        return None, None, *found[: len(leaves)]


def _gradients(
    outputs: Values, seeds: Values, leaves: Sequence[Tensor], *, retain_graph: bool = False
) -> Sequence[Tensor | None]:
    roots = [outputs[ref] for ref in seeds]
    if not roots:
        return [None] * len(leaves)
    return torch.autograd.grad(roots, leaves, list(seeds.values()), retain_graph=retain_graph, allow_unused=True)


class SplitProgram:
    """A `Program` for the same values: it keeps the calls of each micro-batch for its weight gradients."""

    def __init__(self, program: Program, trainable: Iterable[str], received: Iterable[Ref]) -> None:
        """`trainable` names the variables with a gradient, `received` the values whose gradients go back."""
        self._program = program
        self._trainable = {Ref(name) for name in trainable}
        self._derived = set(self._trainable)  # parameters and all that is computed from them without what was received
        self._flowing = set(received)
        self._values: Values = {}
        self._calls: list[_Call] = []  # calls of the micro-batch that runs, as `_values`
        self.calls: dict[int, list[_Call]] = {}
        self.ends: dict[int, Values] = {}
        """Values computed from parameters alone that outlive the run, as where they are sent, by micro-batch; after B
        their gradients."""
        self._steps = [self._followed(step) for step in program.steps]

    def _followed(self, step: Step) -> Step:
        """Return the step that runs in a step's place. Steps come in order, so the sources of its values are known."""
        refs = tuple(dict.fromkeys(_refs([step.args, list(step.kwargs.values())])))
        if step.quiet:
            return step
        outputs = {Ref(step.name, number) for number in range(len(step.dtypes))}
        takes_parameters = not self._derived.isdisjoint(refs)
        if not self._flowing.isdisjoint(refs):
            self._flowing |= outputs
        elif takes_parameters:
            self._derived |= outputs
        return step._replace(call=partial(self._called, step, refs)) if takes_parameters else step

    def run(self, values: Values, step: int, micro_batch: int) -> Values:
        self._values, self._calls = values, self.calls.setdefault(micro_batch, [])
        for s in self._steps:
            self._program.call(s, values, step, micro_batch)
        self.ends[micro_batch] = {
            ref: t
            for ref, t in values.items()
            if ref in self._derived and ref not in self._trainable and t.requires_grad
        }
        return values

    def _called(self, step: Step, refs: Sequence[Ref], *args: object, **kwargs: object) -> Tensor | Sequence[Tensor]:
        """In place of `step.call`, which took these arguments: the values of `refs` in their places."""
        taken = {ref: self._values[ref] for ref in refs}
        learning = {ref: t for ref, t in taken.items() if t.requires_grad}
        parameters = {ref: t.detach().requires_grad_() for ref, t in learning.items() if ref in self._derived}
        inputs = {ref: t for ref, t in learning.items() if ref not in parameters}
        call = _Call(step, taken, parameters)
        self._calls.append(call)
        if inputs:
            made = cast("Sequence[Tensor]", _InputGradients.apply(call, tuple(inputs), *inputs.values()))
        else:
            made = [t.detach().requires_grad_(t.requires_grad) for t in call.run({})]
        return made[0] if len(step.dtypes) == 1 else made

    def weight_gradients(self, micro_batch: int) -> Values:
        """Return the gradients by variable, and free what the micro-batch kept."""
        known = self.ends.pop(micro_batch, {})
        for call in reversed(self.calls.pop(micro_batch, [])):
            found = call.found
            if found is None:
                seeds = call.seeds | {ref: known.pop(ref) for ref in call.outputs if ref in known}
                found = _gradients(call.outputs, seeds, list(call.parameters.values()))
            for ref, gradient in zip(call.parameters, found, strict=True):
                if gradient is not None:
                    known[ref] = known[ref] + gradient if ref in known else gradient
        return known


def _refs(value: object) -> Iterator[Ref]:
    if type(value) is Slot:
        yield value.ref
    elif type(value) is list:
        for item in cast("list[object]", value):
            yield from _refs(item)


class SplitEngine(TorchEngine):
    """A `TorchEngine` whose backward leaves the weight gradients to `weight_gradients`, which is called once for each
    micro-batch whose backward is done, in the same order."""

    def _prepare(self, state: Mapping[str, Tensor]) -> None:
        returned = (c.value for c in self.train.receives if c.gradient)
        self._split = SplitProgram(self.eager, self.trainable, returned)
        self.program = self._split
        self._at = -1  # the micro-batch of the backward that runs
        self._adds_to: dict[int, AtStep] = {}  # sums to add to, by micro-batch whose weight gradients are left

    def backward(self, micro_batch: int, gradients: Sequence[Mapping[Ref, Tensor]]) -> dict[Ref, Tensor]:
        self._at = micro_batch
        return super().backward(micro_batch, gradients)

    def _differentiate(
        self, at: AtStep, roots: Sequence[Tensor], seeds: Sequence[Tensor], leaves: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        self._adds_to[self._at] = at
        ends = self._split.ends.pop(self._at)
        wanted = [*leaves, *ends.values()]
        found = cast("tuple[Tensor | None, ...]", torch.autograd.grad(roots, wanted, seeds, allow_unused=True))
        self._split.ends[self._at] = {
            ref: g for ref, g in zip(ends, found[len(leaves) :], strict=True) if g is not None
        }
        return found[: len(leaves)]

    def weight_gradients(self, micro_batch: int) -> None:
        """Compute those of a micro-batch and add them up."""
        try:
            found = self._split.weight_gradients(micro_batch)
        except Exception as e:
            raise_if_jobs(f"the weight gradients of stage {self.train.index}", e)
            raise
        at = self._adds_to.pop(micro_batch, None)
        if at is not None:
            for name in self.trainable:
                self._accumulate(at, name, found.get(Ref(name)))
