"""Where on this stage an item's numbers stopped being finite: what a report says of it. On the CPU each value is looked
at when it is there; on an accelerator they are read once for an item (`FlagWatch`).

The host waits for no micro-batch. What was not finite before the item began is looked at when it begins: once the
answer is here the update is over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from isthmus.accelerators.copies import PendingRead
from isthmus.graph import Ref
from isthmus.protocol.finite import NonFinite, Where
from isthmus.runtime.messages.assignment import Assignment
from isthmus.training.checkpoint import OPTIMIZER
from isthmus.training.engine import Engine
from isthmus.training.finite import finite_flag, is_finite
from isthmus.training.scaling import LOSS_SCALE


class FiniteWatch:
    """Looks at what a stage computes. Used by the compute lane alone."""

    def __init__(self, assignment: Assignment, engine: Engine) -> None:
        self._stage = assignment.view.stage - assignment.view.first
        self._train = assignment.train
        self._engine = engine
        self._looks = assignment.engine.non_finite != "ignore"
        self._modules = {op.name: op.module for op in assignment.train.ops}
        self._columns = {op: column for column, op in assignment.placeholders.items()}
        self._found: NonFinite | None = None

    def take(self) -> NonFinite | None:
        """The first place of the item that ends here."""
        found, self._found = self._found, None
        return found

    def forward(self, micro_batch: int, inputs: Mapping[Ref, Tensor], sent: Mapping[Ref, Tensor]) -> None:
        """A training forward was run on `inputs`, received or read, and gave the values that are sent."""
        if not self._looks:
            return
        name = next((self._called(ref) for ref, value in sent.items() if not is_finite(value)), None)
        if name is not None:
            self._note("output", micro_batch, name, inputs)
        elif self._train.loss is not None and not is_finite(self._engine.last_loss):
            self._note("loss", micro_batch, "", inputs)

    def backward(self, micro_batch: int, gradients: Mapping[Ref, Tensor]) -> None:
        """Gradients of received values. Those that are too large for float16 are the loss scale's concern."""
        if not self._looks or self._overflows:
            return
        name = next((self._called(ref) for ref, value in gradients.items() if not is_finite(value)), None)
        if name is not None:
            self._note("gradient", micro_batch, name)

    def collected(self, norms: Tensor) -> bool:
        """Whether the loss and the norms of all parameters' gradients are finite here."""
        scaled = self._engine.loss_scale is not None
        if not self._looks and not scaled:
            return True
        if not bool(torch.isfinite(norms).all()):
            if self._looks and not self._overflows:
                bad = (n for n, g in self._engine.gradients().items() if not torch.linalg.vector_norm(g).isfinite())
                self._note("parameter gradient", -1, repr(next(bad, "")))
            return False
        return not self._looks or self._train.loss is None or math.isfinite(self._engine.loss)

    @property
    def _overflows(self) -> bool:
        scale = self._engine.loss_scale
        return scale is not None and scale.overflows

    def saved(self, state: Mapping[str, Tensor]) -> None:
        """What goes into a checkpoint: parameters must be finite, and what forwards write no NaN. A running minimum
        may begin at infinity."""
        parameters = {op.target for op in self._train.variables() if op.kind == "parameter"}
        for name, value in state.items():
            if name.startswith(OPTIMIZER) or is_finite(value):
                continue
            if name in parameters or bool(value.isnan().any()):
                self._note("parameter" if name in parameters else "buffer", -1, repr(name))
                return

    def _note(self, where: Where, micro_batch: int, name: str, inputs: Mapping[Ref, Tensor] = {}) -> None:
        found = NonFinite(where=where, stage=self._stage, micro_batch=micro_batch, name=name)
        if self._found is not None and self._found.order <= found.order:
            return
        self._found = NonFinite(
            where=where, stage=self._stage, micro_batch=micro_batch, name=name, cause=self._cause(inputs)
        )

    def _cause(self, inputs: Mapping[Ref, Tensor]) -> str:
        """What the stage was given that is not finite already: what it reads, or its own parameters."""
        received = {crossing.value for crossing in self._train.receives}
        for ref, value in inputs.items():
            if ref not in received and not is_finite(value):
                return f"column {self._columns.get(ref.op, ref.op)!r}"
        for name, value in self._engine.state().items():
            if not name.startswith(OPTIMIZER) and not is_finite(value):
                return repr(name)
        return ""

    def _called(self, ref: Ref) -> str:
        module = self._modules.get(ref.op, "")
        return f"{ref.op!r} (module {module!r})" if module else repr(ref.op)


class _Flag(NamedTuple):
    """One bool on the accelerator for each name."""

    where: Where | Literal["column", "before"]
    micro_batch: int
    names: Sequence[str]
    finite: Tensor


def watch_of(assignment: Assignment, engine: Engine) -> FiniteWatch:
    return (FlagWatch if engine.accelerator.asynchronous else FiniteWatch)(assignment, engine)


class FlagWatch(FiniteWatch):
    def __init__(self, assignment: Assignment, engine: Engine) -> None:
        super().__init__(assignment, engine)
        self._flags: list[_Flag] = []
        self._reading: PendingRead | None = None
        self._skips = assignment.engine.non_finite == "skip"

    def take(self) -> NonFinite | None:
        bad = self._bad()
        self._flags, self._reading = [], None
        for flag, name in bad:
            if flag.where not in ("column", "before"):
                self._note(flag.where, flag.micro_batch, name)
        found = super().take()
        if found is None:
            return None
        columns = [n for f, n in bad if f.where == "column" and f.micro_batch == found.micro_batch]
        before = [n for f, n in bad if f.where == "before"]
        cause = next(iter([*columns, *before]), "") if found.where in ("output", "loss") else next(iter(before), "")
        return NonFinite(
            where=found.where, stage=found.stage, micro_batch=found.micro_batch, name=found.name, cause=cause
        )

    def forward(self, micro_batch: int, inputs: Mapping[Ref, Tensor], sent: Mapping[Ref, Tensor]) -> None:
        if not self._looks:
            return
        if not self._flags:
            self._look_before()
        received = {crossing.value for crossing in self._train.receives}
        for ref, value in inputs.items():
            if ref not in received and value.is_floating_point():
                self._look("column", micro_batch, f"column {self._columns.get(ref.op, ref.op)!r}", value)
        for ref, value in sent.items():
            self._look("output", micro_batch, self._called(ref), value)
        if self._train.loss is not None:
            self._look("loss", micro_batch, "", self._engine.last_loss)

    def backward(self, micro_batch: int, gradients: Mapping[Ref, Tensor]) -> None:
        if self._looks and not self._overflows:
            for ref, value in gradients.items():
                self._look("gradient", micro_batch, self._called(ref), value)

    def collected(self, norms: Tensor) -> bool:
        """Only where a step may be left out the host must know before the update, and waits."""
        accelerator, scaled = self._engine.accelerator, self._engine.loss_scale is not None
        finite = PendingRead(accelerator, norms.isfinite().all()) if scaled else None
        if self._looks:
            self._look_at(norms)
        if finite is not None and not bool(finite.values()):
            return False
        leaves_out = self._looks and (self._skips or scaled)
        return not leaves_out or not any(flag.where in ("loss", "parameter gradient") for flag, _ in self._bad())

    def _look_at(self, norms: Tensor) -> None:
        if norms.numel() and not self._overflows:
            names = [repr(name) for name in self._engine.owned]
            self._flags.append(_Flag("parameter gradient", -1, names, norms.isfinite()))
        self._reading = self._read()

    def saved(self, state: Mapping[str, Tensor]) -> None:
        parameters = {op.target for op in self._train.variables() if op.kind == "parameter"}
        for name, value in state.items():
            if name in parameters:
                self._look("parameter", -1, repr(name), value)
            elif _is_variable(name):
                self._flags.append(_Flag("buffer", -1, [repr(name)], ~value.isnan().any()))

    def _cause(self, inputs: Mapping[Ref, Tensor]) -> str:
        return ""  # `take` knows

    def _look(self, where: Where | Literal["column"], micro_batch: int, name: str, value: Tensor) -> None:
        self._flags.append(_Flag(where, micro_batch, [name], finite_flag(value)))

    def _look_before(self) -> None:
        state = self._engine.state()
        floats = {n: t for n, t in state.items() if _is_variable(n) and t.is_floating_point() and t.numel()}
        if floats:
            # All at once: a kernel for each would take the host longer than the accelerator.
            norms = torch._foreach_norm(list(floats.values()), math.inf)  # pyright: ignore[reportPrivateUsage]
            finite = torch.stack([norm.float() for norm in norms]).isfinite()
            self._flags.append(_Flag("before", -1, [repr(name) for name in floats], finite))

    def _read(self) -> PendingRead | None:
        device = self._engine.accelerator.device
        flags = [flag.finite.to(device).reshape(-1) for flag in self._flags]
        return PendingRead(self._engine.accelerator, torch.cat(flags)) if flags else None

    def _bad(self) -> list[tuple[_Flag, str]]:
        """What was not finite, with its name."""
        reading = self._reading or self._read()
        if reading is None:
            return []
        names = ((flag, name) for flag in self._flags for name in flag.names)
        return [one for one, finite in zip(names, reading.values().tolist(), strict=True) if not finite]


def _is_variable(name: str) -> bool:
    """Of a state, whether it is on the accelerator and no optimizer's."""
    return not name.startswith(OPTIMIZER) and name != LOSS_SCALE
