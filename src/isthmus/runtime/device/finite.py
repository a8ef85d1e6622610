"""Where on this stage an item's numbers stopped being finite: what a report says of it. On the CPU each value is looked
at when it is there; on an accelerator they are read once for an item (`FlagWatch`).

Values that cross a cut, and their gradients, say where it began. What they hold in a step whose loss and gradients are
finite, as a mask of -inf, belongs to the model: it is no place from then on.

The host waits for no micro-batch. What was not finite before the item began is looked at when it begins: once the
answer is here the update is over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
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

Seen = Where | Literal["clipped"]  # the last: a value before it was clipped and noised
DECIDES: frozenset[str] = frozenset({"loss", "parameter gradient", "parameter", "buffer"})


class FiniteWatch:
    """Looks at what a stage computes. Used by the compute lane alone."""

    def __init__(self, assignment: Assignment, engine: Engine) -> None:
        self._stage = assignment.view.stage - assignment.view.first
        self._train = assignment.train
        self._engine = engine
        self._looks = assignment.engine.non_finite != "ignore"
        self._modules = {op.name: op.module for op in assignment.train.ops}
        self._columns = {op: column for column, op in assignment.placeholders.items()}
        self._parameters = {op.target for op in self._train.variables() if op.kind == "parameter"}
        self._found: NonFinite | None = None
        self._decides = False
        self._overflowed = False  # whether a step is left out for its loss scale
        self._seen: set[tuple[str, str]] = set()  # values of this item that are not finite, and gradients of values
        self._usual: set[tuple[str, str]] = set()  # those of steps that were finite

    def take(self) -> NonFinite | None:
        """The first place of the item that ends here."""
        found, decides, overflowed, seen = self._found, self._decides, self._overflowed, self._seen
        self._found, self._decides, self._overflowed, self._seen = None, False, False, set()
        if not decides and not overflowed:
            self._usual |= seen
        return None if found is None else msgspec.structs.replace(found, decides=decides)

    def forward(
        self,
        micro_batch: int,
        inputs: Mapping[Ref, Tensor],
        sent: Mapping[Ref, Tensor],
        *,
        clipped: Mapping[Ref, Tensor] = {},
    ) -> None:
        """A training forward was run on `inputs`, received or read, and gave the values that are sent. `clipped`: what
        values were before they were clipped and noised, which hides from others what is not finite."""
        if not self._looks:
            return
        self._begin(micro_batch, inputs)
        for ref, value in clipped.items():
            self._look("clipped", micro_batch, self._called(ref), value)
        for ref, value in sent.items():
            self._look("output", micro_batch, self._called(ref), value, inputs)
        if self._train.loss is not None:
            self._look("loss", micro_batch, "", self._engine.last_loss, inputs)

    def backward(self, micro_batch: int, gradients: Mapping[Ref, Tensor]) -> None:
        """Gradients of received values. Those that are too large for float16 are the loss scale's concern."""
        if self._looks and not self._overflows:
            for ref, value in gradients.items():
                self._look("gradient", micro_batch, self._called(ref), value)

    def _begin(self, micro_batch: int, inputs: Mapping[Ref, Tensor]) -> None:
        """A forward is looked at. `_cause` looks at its inputs where that is needed."""

    def _look(self, where: Seen, micro_batch: int, name: str, value: Tensor, inputs: Mapping[Ref, Tensor] = {}) -> None:
        if (where, name) in self._usual or is_finite(value):
            return
        if where == "clipped":
            self._hidden(micro_batch, name)
        else:
            self._note(where, micro_batch, name, inputs)

    def _hidden(self, micro_batch: int, name: str) -> None:
        self._decides = True
        self._note("output", micro_batch, name)

    def collected(self, norms: Tensor) -> bool:
        """Return whether the loss and the norms of all parameters' gradients are finite here."""
        scaled = self._engine.loss_scale is not None
        if not self._looks and not scaled:
            return True
        if not bool(torch.isfinite(norms).all()):
            self._overflowed = True
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
        """Check the state that goes into a checkpoint: parameters must be finite, and buffers that forwards write must
        have no NaN. A running minimum may begin at infinity."""
        name = self._spoilt(state)
        if name:
            self._note("parameter" if name in self._parameters else "buffer", -1, repr(name))

    def _spoilt(self, state: Mapping[str, Tensor]) -> str:
        """The first parameter that is not finite, or buffer with a NaN; empty if there is none."""
        for name, value in state.items():
            if name.startswith(OPTIMIZER) or is_finite(value):
                continue
            if name in self._parameters or bool(value.isnan().any()):
                return name
        return ""

    def _note(self, where: Where, micro_batch: int, name: str, inputs: Mapping[Ref, Tensor] = {}) -> None:
        if where in DECIDES:
            self._decides = True
        else:
            self._seen.add((where, name))
        found = NonFinite(where=where, stage=self._stage, micro_batch=micro_batch, name=name)
        if self._found is not None and self._found.order <= found.order:
            return
        self._found = NonFinite(
            where=where, stage=self._stage, micro_batch=micro_batch, name=name, cause=self._cause(inputs)
        )

    def _cause(self, inputs: Mapping[Ref, Tensor]) -> str:
        """The first input of the stage that is not finite: a column that it reads, or one of its own parameters."""
        received = {crossing.value for crossing in self._train.receives}
        for ref, value in inputs.items():
            if ref not in received and not is_finite(value):
                return f"column {self._columns.get(ref.op, ref.op)!r}"
        name = self._spoilt(self._engine.state())
        return repr(name) if name else ""

    def _called(self, ref: Ref) -> str:
        module = self._modules.get(ref.op, "")
        return f"{ref.op!r} (module {module!r})" if module else repr(ref.op)


class _Flag(NamedTuple):
    """One bool on the accelerator for each name."""

    where: Seen | Literal["column", "before"]
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
        bad = [one for one in self._bad() if (one[0].where, one[1]) not in self._usual]
        self._flags, self._reading = [], None
        for flag, name in bad:
            if flag.where == "clipped":
                self._hidden(flag.micro_batch, name)
            elif flag.where not in ("column", "before"):
                self._note(flag.where, flag.micro_batch, name)
        found = super().take()
        if found is None:
            return None
        columns = [n for f, n in bad if f.where == "column" and f.micro_batch == found.micro_batch]
        before = [n for f, n in bad if f.where == "before"]
        cause = next(iter([*columns, *before]), "") if found.where in ("output", "loss") else next(iter(before), "")
        return msgspec.structs.replace(found, cause=cause)

    def _begin(self, micro_batch: int, inputs: Mapping[Ref, Tensor]) -> None:
        if not self._flags:
            self._look_before()
        received = {crossing.value for crossing in self._train.receives}
        for ref, value in inputs.items():
            if ref not in received and value.is_floating_point():
                self._flag("column", micro_batch, f"column {self._columns.get(ref.op, ref.op)!r}", value)

    def collected(self, norms: Tensor) -> bool:
        """Only where a step may be left out the host must know before the update, and waits."""
        accelerator, scaled = self._engine.accelerator, self._engine.loss_scale is not None
        finite = PendingRead(accelerator, norms.isfinite().all()) if scaled else None
        if self._looks:
            self._look_at(norms)
        if finite is not None and not bool(finite.values()):
            self._overflowed = True
            return False
        leaves_out = self._looks and (self._skips or scaled)
        return not leaves_out or not any(flag.where in ("loss", "parameter gradient") for flag, _ in self._bad())

    def _look_at(self, norms: Tensor) -> None:
        if norms.numel() and not self._overflows:
            names = [repr(name) for name in self._engine.owned]
            self._flags.append(_Flag("parameter gradient", -1, names, norms.isfinite()))
        self._reading = self._read()

    def saved(self, state: Mapping[str, Tensor]) -> None:
        for name, value in state.items():
            if name in self._parameters:
                self._flag("parameter", -1, repr(name), value)
            elif _is_variable(name):
                self._flags.append(_Flag("buffer", -1, [repr(name)], ~value.isnan().any()))

    def _cause(self, inputs: Mapping[Ref, Tensor]) -> str:
        return ""  # `take` knows

    def _look(self, where: Seen, micro_batch: int, name: str, value: Tensor, inputs: Mapping[Ref, Tensor] = {}) -> None:
        self._flag(where, micro_batch, name, value)

    def _flag(self, where: Seen | Literal["column"], micro_batch: int, name: str, value: Tensor) -> None:
        self._flags.append(_Flag(where, micro_batch, [name], finite_flag(value)))

    def _look_before(self) -> None:
        state = self._engine.state()
        floats = {n: t for n, t in state.items() if _is_variable(n) and t.is_floating_point() and t.numel()}
        buffers = {name: value for name, value in floats.items() if name not in self._parameters}
        floats = {name: value for name, value in floats.items() if name in self._parameters} | buffers
        if floats:
            # All at once: a kernel for each would take the host longer than the accelerator.
            norms = torch._foreach_norm(list(floats.values()), math.inf)  # pyright: ignore[reportPrivateUsage]
            found, parameters = torch.stack([norm.float() for norm in norms]), len(floats) - len(buffers)
            names = [repr(name) for name in floats]
            self._flags.append(_Flag("before", -1, names[:parameters], found[:parameters].isfinite()))
            self._flags.append(_Flag("before", -1, names[parameters:], ~found[parameters:].isnan()))  # -inf masks

    def _read(self) -> PendingRead | None:
        device = self._engine.accelerator.device
        flags = [flag.finite.to(device).reshape(-1) for flag in self._flags]
        return PendingRead(self._engine.accelerator, torch.cat(flags)) if flags else None

    def _bad(self) -> list[tuple[_Flag, str]]:
        """Return the flags that are not finite, each with its name."""
        reading = self._reading or self._read()
        if reading is None:
            return []
        names = ((flag, name) for flag in self._flags for name in flag.names)
        return [one for one, finite in zip(names, reading.values().tolist(), strict=True) if not finite]


def _is_variable(name: str) -> bool:
    """Return whether a part of a state is on the accelerator and no optimizer's."""
    return not name.startswith(OPTIMIZER) and name != LOSS_SCALE
