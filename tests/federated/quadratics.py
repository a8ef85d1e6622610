"""Clients whose losses are quadratic, and every algorithm on them once more: NumPy and the papers' formulas alone.

A sample is (h, a) and its loss h (w - a)^2 / 2, number by number: gradients and optima are known in closed form. The
batches of each client are shared with the real algorithms (`isthmus.rng.orders`), and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from isthmus.rng import orders
from tests.federated.populations import ListedData
from tests.federated.twins import SEED

Vector = NDArray[np.float64]
Values = dict[str, Vector]
ETA, BATCH, EPOCHS = 0.1, 4, 2


class Quadratic(nn.Module):
    """One parameter w [3]."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))

    def forward(self, h: Tensor, a: Tensor, labels: Tensor) -> Tensor:
        return (h * (self.w - a).square()).sum(1).mean() / 2


def clients(sizes: Sequence[int] = (3, 9, 12, 5, 17, 8)) -> ListedData:
    """Each with an optimum of its own, up to ten away from the others'."""
    draws = np.random.default_rng(5)
    found: list[dict[str, Tensor]] = []
    for n in sizes:
        h = 0.2 + draws.random((n, 3))
        a = 5 * draws.standard_normal(3) + draws.standard_normal((n, 3))
        found.append({"h": torch.from_numpy(h), "a": torch.from_numpy(a), "labels": torch.zeros(n)})
    return ListedData(found)


class Setting(NamedTuple):
    """What is around an algorithm."""

    clip: float | None = None
    divided_by: int | None = None
    """With differential privacy: sums are divided by so many clients, whoever comes."""
    rule: Callable[[Vector], Vector] | None = None
    """[clients, numbers] -> [numbers]."""
    drop_last: bool = False


class Twin:
    """Loops over clients and lists of updates."""

    def __init__(self, data: ListedData, drawn: Callable[[int], Sequence[int]], setting: Setting, **options: float):
        self.h = [c["h"].numpy() for c in data.clients]
        self.a = [c["a"].numpy() for c in data.clients]
        self.drawn, self.setting = drawn, setting
        self.x = np.array([1.0, -2.0, 0.5])
        self.kept: dict[int, Vector] = {}
        zero = np.zeros(3)
        self.m, self.v, self.c = zero, np.full(3, 1e-6), zero
        self.__dict__ |= options

    # What clients compute

    def gradient(self, y: Vector, i: int, rows: NDArray[np.int64] | None = None) -> Vector:
        rows = np.arange(len(self.h[i])) if rows is None else rows
        return (self.h[i][rows] * (y - self.a[i][rows])).mean(0)

    def batches(self, i: int, r: int) -> list[NDArray[np.int64]]:
        n = len(self.h[i])
        used = n // BATCH * BATCH if self.setting.drop_last and n > BATCH else n
        return [o[k : min(k + BATCH, used)] for o in orders(SEED, r, [i], n, EPOCHS)[0] for k in range(0, used, BATCH)]

    # What becomes of what they return

    def counted(self, values: Values, change: Vector | None = None) -> Values:
        """Clipped where the setting says so; `change` is what the norm is of, if not all of it."""
        if self.setting.clip is None:
            return values
        norm = np.linalg.norm(np.concatenate([*values.values()]) if change is None else change)
        scale = min(1.0, self.setting.clip / norm) if norm else 1.0
        return {name: v if name == "steps" else scale * v for name, v in values.items()}

    def mean(self, rows: Sequence[Vector], weights: Sequence[float] | None = None) -> Vector:
        if self.setting.rule is not None:
            return self.setting.rule(np.stack(rows))
        if self.setting.divided_by is not None:
            return np.sum(rows, axis=0) / self.setting.divided_by
        return np.average(rows, axis=0, weights=weights)

    def share(self, came: int) -> float:
        """Of the population: the clients that took part, or that are counted with."""
        return (self.setting.divided_by or came) / len(self.h)

    def run(self, rounds: int) -> Vector:
        for r in range(rounds):
            self.round(r, [int(i) for i in self.drawn(r)])
        return self.x

    def round(self, r: int, s: list[int]) -> None:
        raise NotImplementedError


class FedAvg(Twin):
    """McMahan et al. 2017, Algorithm 1."""

    mu = 0.0

    def delta(self, i: int, r: int) -> Vector:
        y = self.x
        for rows in self.batches(i, r):
            y = y - ETA * (self.gradient(y, i, rows) + self.mu * (y - self.x))
        return y - self.x

    def mean_delta(self, r: int, s: list[int]) -> Vector:
        return self.mean([self.counted({"d": self.delta(i, r)})["d"] for i in s], [len(self.h[i]) for i in s])

    def round(self, r: int, s: list[int]) -> None:
        self.x = self.x + self.mean_delta(r, s)


class FedProx(FedAvg):
    """Li et al. 2020, equation 2."""

    mu = 0.3


class FedAvgM(FedAvg):
    """Hsu et al. 2019, section 4.3."""

    def round(self, r: int, s: list[int]) -> None:
        self.m = 0.9 * self.m + self.mean_delta(r, s)
        self.x = self.x + self.m


class FedAdam(FedAvg):
    """Reddi et al. 2021, Algorithm 2."""

    def round(self, r: int, s: list[int]) -> None:
        d = self.mean_delta(r, s)
        self.m = 0.9 * self.m + 0.1 * d
        self.v = self.second(d * d)
        self.x = self.x + 0.01 * self.m / (np.sqrt(self.v) + 1e-3)

    def second(self, squares: Vector) -> Vector:
        return 0.99 * self.v + 0.01 * squares


class FedYogi(FedAdam):
    """The same."""

    def second(self, squares: Vector) -> Vector:
        return self.v - 0.01 * squares * np.sign(self.v - squares)


class FedNova(Twin):
    """Wang et al. 2020, equations 5 to 9: a_i is how often each gradient is in the client's change."""

    rho = 0.0

    def round(self, r: int, s: list[int]) -> None:
        found: list[Values] = []
        for i in s:
            y, v, steps = self.x, np.zeros(3), self.batches(i, r)
            for rows in steps:
                v = self.rho * v + self.gradient(y, i, rows)
                y = y - ETA * v
            a = sum(sum(self.rho**k for k in range(len(steps) - j)) for j in range(len(steps)))
            values = {"direction": (y - self.x) / a, "steps": np.array([a])}
            found.append(self.counted(values, y - self.x))
        n = [len(self.h[i]) for i in s]
        direction, steps = (self.mean([f[name] for f in found], n) for name in ("direction", "steps"))
        self.x = self.x + steps * direction


class FedNovaMomentum(FedNova):
    """The same, with local momentum."""

    rho = 0.7


class Mime(Twin):
    """Karimireddy et al. 2021, Algorithm 1."""

    def round(self, r: int, s: list[int]) -> None:
        self.c = self.mean([self.counted({"g": self.gradient(self.x, i)})["g"] for i in s])
        self.x = self.x + self.mean([self.counted({"d": self.delta(i, r)})["d"] for i in s])
        self.m = 0.1 * self.c + 0.9 * self.m

    def delta(self, i: int, r: int) -> Vector:
        y = self.x
        for rows in self.batches(i, r):
            g = self.gradient(y, i, rows) - self.gradient(self.x, i, rows) + self.c
            y = y - ETA * (0.1 * g + 0.9 * self.m)
        return y - self.x


class MimeLite(Twin):
    """The same, without the correction."""

    def round(self, r: int, s: list[int]) -> None:
        found: list[Values] = []
        for i in s:
            y = self.x
            for rows in self.batches(i, r):
                y = y - ETA * (0.1 * self.gradient(y, i, rows) + 0.9 * self.m)
            found.append(self.counted({"d": y - self.x, "g": self.gradient(self.x, i)}))
        self.x = self.x + self.mean([f["d"] for f in found])
        self.m = 0.1 * self.mean([f["g"] for f in found]) + 0.9 * self.m


class Scaffold(Twin):
    """Karimireddy et al. 2020, Algorithm 1, option II. The state follows what is added, so that the server's control
    variate is the mean of the clients'."""

    def round(self, r: int, s: list[int]) -> None:
        found: list[Values] = []
        for i in s:
            c_i, y, steps = self.kept.get(i, np.zeros(3)), self.x, self.batches(i, r)
            for rows in steps:
                y = y - ETA * (self.gradient(y, i, rows) - c_i + self.c)
            plus = c_i - self.c + (self.x - y) / (len(steps) * ETA)
            found.append(self.counted({"d": y - self.x, "c": plus - c_i}))
            self.kept[i] = c_i + found[-1]["c"]
        self.x = self.x + self.mean([f["d"] for f in found])
        self.c = self.c + self.share(len(s)) * self.mean([f["c"] for f in found])


class FedDyn(Twin):
    """Acar et al. 2021, Algorithm 1. The state follows what is added, as the server's h does."""

    alpha = 0.1

    def round(self, r: int, s: list[int]) -> None:
        found: list[Vector] = []
        for i in s:
            linear, y = self.kept.get(i, np.zeros(3)), self.x
            for rows in self.batches(i, r):
                y = y - ETA * (self.gradient(y, i, rows) - linear + self.alpha * (y - self.x))
            found.append(self.counted({"d": y - self.x})["d"])
            self.kept[i] = linear - self.alpha * found[-1]
        delta = self.mean(found)
        self.c = self.c - self.alpha * self.share(len(s)) * delta
        self.x = self.x + delta - self.c / self.alpha


TWINS: dict[str, tuple[type[Twin], str, dict[str, object]]] = {
    "fedavg": (FedAvg, "fedavg", {}),
    "fedprox": (FedProx, "fedprox", {"mu": 0.3}),
    "fednova": (FedNova, "fednova", {}),
    "fednova-momentum": (FedNovaMomentum, "fednova", {"momentum": 0.7}),
    "mime": (Mime, "mime", {}),
    "mimelite": (MimeLite, "mime", {"lite": True}),
    "scaffold": (Scaffold, "scaffold", {}),
    "feddyn": (FedDyn, "feddyn", {"alpha": 0.1}),
    "fedavgm": (FedAvgM, "fedavgm", {}),
    "fedadam": (FedAdam, "fedadam", {}),
    "fedyogi": (FedYogi, "fedyogi", {}),
}
