"""Small classifiers for runs whose values leave under noise, built as jobs name them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self, clip: float, *, normalises: bool, competes: bool, skips: bool, overflows: bool) -> None:
        super().__init__()
        self.enter = nn.Linear(64, 32)
        self.norm = nn.BatchNorm1d(32, track_running_stats=False) if normalises else None
        self.more = nn.Linear(32, 32) if skips else None
        self.leave = nn.Linear(32, 10)
        self._clip, self._competes, self._overflows = clip, competes, overflows

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.enter(pixel_values.flatten(1))
        hidden = hidden if self.norm is None else self.norm(hidden)
        hidden = hidden * 1e30 * 1e30 if self._overflows else hidden
        hidden = hidden.softmax(0) if self._competes else hidden.relu()
        if self._clip:  # as the runtime clips what leaves
            hidden = hidden * (self._clip / hidden.double().norm(dim=1, keepdim=True)).clamp_max(1.0).float()
        if self.more is not None:
            hidden = hidden + self.more(hidden).relu()
        return {"loss": F.cross_entropy(self.leave(hidden), labels)}


def net(
    *,
    clip: float = 0.0,
    normalises: bool = False,
    competes: bool = False,
    skips: bool = False,
    overflows: bool = False,
) -> nn.Module:
    torch.manual_seed(3)
    return Net(clip, normalises=normalises, competes=competes, skips=skips, overflows=overflows)
