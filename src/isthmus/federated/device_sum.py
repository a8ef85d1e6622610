"""The exact sums of `fixed_point` where the clients train, on an accelerator: the same integers, the same bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from isthmus.errors import DivergedUpdate, PeerError
from isthmus.federated.fixed_point import LIMIT, MAGIC, MAGIC_BITS, SUM_LIMIT, FixedSum, largest_of, worst_of

Down = Callable[[Tensor], Tensor]
"""A tensor of the accelerator -> its copy on the host."""
_BLOCK = 1 << 24
"""Numbers that are rounded at once: what that takes besides the sum is 16 bytes each."""


def sums_on(device: torch.device) -> bool:
    """Whether it has double precision and 64-bit integers (Apple's GPUs have not)."""
    return device.type != "mps"


class DeviceSum(FixedSum):
    """What an executor adds up on its accelerator. One look of the host per term: whether all its numbers are good."""

    def __init__(
        self, size: int, exponent: int, device: torch.device, down: Down, accumulator: Tensor | None = None
    ) -> None:
        """As a `FixedSum`, in which `total` comes to lie when it is asked for."""
        super().__init__(size, exponent, accumulator)
        self._sum = torch.zeros(size, dtype=torch.int64, device=device)
        self._down = down

    def begin(self, exponent: int) -> None:
        super().begin(exponent)
        self._ahead = False
        """Something was added since `total` was asked for."""

    def add(self, term: Tensor, weight: float = 1.0) -> None:
        self._add(term.detach().reshape(1, -1), weight)

    def add_rows(self, summands: Tensor, weight: float = 1.0) -> None:
        self._add(summands.detach().reshape(len(summands), -1), weight)

    def _add(self, rows: Tensor, weight: float) -> None:
        factor = weight * self._factor
        ends = torch.stack(torch.aminmax(rows)) if rows.numel() else rows.new_zeros(2)
        largest = largest_of(self._down(ends)) * abs(factor)  # a number that is none is both ends
        if not largest < LIMIT:
            within = f"{LIMIT / factor:.3g}" if factor else "any bound"
            raise DivergedUpdate(f"got {worst_of(rows)}, expected numbers within {within}")
        bound = self._bound + largest * len(rows)
        if bound >= SUM_LIMIT:
            raise PeerError(f"a sum of {bound * self._unit:.3g} has no room in 64 bits")
        if self._empty and not self._ahead:
            self._sum.zero_()
        width = max(1, _BLOCK // len(rows))
        for part, total in zip(rows.split(width, dim=1), self._sum.split(width), strict=True):
            lifted = torch.add(MAGIC, part.to(torch.float64), alpha=factor)
            total.add_(lifted.view(torch.int64).sub_(MAGIC_BITS).sum(dim=0))
        self._bound, self._ahead = bound, True

    def _own(self) -> Tensor:
        if self._ahead:
            self._total.copy_(self._down(self._sum))
            self._ahead = self._empty = False
        return super()._own()
