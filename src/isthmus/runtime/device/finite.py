"""Where on this stage an item's numbers stopped being finite: what a report says of it. On the CPU each value is looked
at when it is there; on an accelerator see finite_flags.py."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from isthmus.graph import Ref
from isthmus.protocol.finite import NonFinite, Where
from isthmus.runtime.messages.assignment import Assignment
from isthmus.training.checkpoint import OPTIMIZER
from isthmus.training.engine import Engine
from isthmus.training.finite import is_finite


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
        elif self._train.loss is not None and not math.isfinite(self._engine.loss):
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
