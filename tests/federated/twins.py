"""The algorithms once more, as naive as can be: float64, one client after another, lists of updates, plain means.

They share with the real ones the batches of each client (`orders`), and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from isthmus.rng import orders

Data = Mapping[str, Tensor]
ETA, BATCH, EPOCHS, SEED = 0.05, 4, 2, 3


def batches(data: Data, client: int, round_: int) -> list[Data]:
    n = len(data["labels"])
    found: list[Data] = []
    for order in orders(SEED, round_, [client], n, EPOCHS)[0]:
        found += [{k: v[order[i : i + BATCH]] for k, v in data.items()} for i in range(0, n, BATCH)]
    return found


class Twin:
    """`run(rounds)` gives the model after so many; `clients` is the data, `cohort(r)` who takes part."""

    def __init__(self, module: nn.Module, clients: list[Data], cohort: Callable[[int], np.ndarray]) -> None:
        self.module = module.double()
        self.clients = [{k: v.double() if v.is_floating_point() else v for k, v in d.items()} for d in clients]
        self.cohort = cohort
        self.x = torch.cat([p.detach().reshape(-1).clone() for p in module.parameters()])
        self.state: dict[int, Tensor] = {}
        zero = torch.zeros_like(self.x)
        self.m, self.v, self.c, self.h = zero.clone(), zero.clone(), zero.clone(), zero.clone()

    def grad(self, y: Tensor, batch: Data) -> Tensor:
        nn.utils.vector_to_parameters(y, self.module.parameters())
        loss = self.module(**batch)["loss"]
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(self.module.parameters()))])

    def full(self, y: Tensor, i: int) -> Tensor:
        d = self.clients[i]
        n = len(d["labels"])
        return sum(self.grad(y, {k: v[j : j + 1] for k, v in d.items()}) for j in range(n)) / n

    def size(self, i: int) -> int:
        return len(self.clients[i]["labels"])

    def run(self, rounds: int) -> Tensor:
        for r in range(rounds):
            self.round(r, [int(i) for i in self.cohort(r)])
        return self.x

    def round(self, r: int, s: list[int]) -> None:
        raise NotImplementedError


def weighted(values: list[Tensor], weights: list[int]) -> Tensor:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


class FedAvgTwin(Twin):
    mu = 0.0

    def local(self, i: int, r: int) -> Tensor:
        y = self.x.clone()
        for b in batches(self.clients[i], i, r):
            y = y - ETA * (self.grad(y, b) + self.mu * (y - self.x))
        return y

    def mean_model(self, r: int, s: list[int]) -> Tensor:
        return weighted([self.local(i, r) for i in s], [self.size(i) for i in s])

    def round(self, r: int, s: list[int]) -> None:
        self.x = self.mean_model(r, s)


class FedProxTwin(FedAvgTwin):
    mu = 0.3


class FedNovaTwin(Twin):
    rho = 0.0

    def round(self, r: int, s: list[int]) -> None:
        ds, taus = [], []
        for i in s:
            y, v, a = self.x.clone(), torch.zeros_like(self.x), []
            for b in batches(self.clients[i], i, r):
                v = self.rho * v + self.grad(y, b)
                y = y - ETA * v
                a = [self.rho * w for w in a]
                a = [w + 0 for w in a] + [1.0]
            steps = len(a)
            norm = sum(sum(self.rho**k for k in range(steps - j)) for j in range(steps))
            ds.append((self.x - y) / (ETA * norm))
            taus.append(torch.tensor(norm, dtype=torch.float64))
        n = [self.size(i) for i in s]
        self.x = self.x - weighted(taus, n) * ETA * weighted(ds, n)


class FedNovaMomentumTwin(FedNovaTwin):
    rho = 0.7


class MimeTwin(Twin):
    beta, lite = 0.9, False

    def round(self, r: int, s: list[int]) -> None:
        c = sum(self.full(self.x, i) for i in s) / len(s)
        ys = []
        for i in s:
            y = self.x.clone()
            for b in batches(self.clients[i], i, r):
                g = self.grad(y, b) if self.lite else self.grad(y, b) - self.grad(self.x, b) + c
                y = y - ETA * ((1 - self.beta) * g + self.beta * self.m)
            ys.append(y)
        self.x = sum(ys) / len(ys)
        self.m = (1 - self.beta) * c + self.beta * self.m


class MimeLiteTwin(MimeTwin):
    lite = True


class ScaffoldTwin(Twin):
    def round(self, r: int, s: list[int]) -> None:
        ys, dcs = [], []
        for i in s:
            ci = self.state.get(i, torch.zeros_like(self.x))
            y, k = self.x.clone(), 0
            for b in batches(self.clients[i], i, r):
                y = y - ETA * (self.grad(y, b) - ci + self.c)
                k += 1
            new = ci - self.c + (self.x - y) / (k * ETA)
            ys.append(y - self.x)
            dcs.append(new - ci)
            self.state[i] = new
        self.x = self.x + sum(ys) / len(s)
        self.c = self.c + len(s) / len(self.clients) * sum(dcs) / len(s)


class FedDynTwin(Twin):
    alpha = 0.1

    def round(self, r: int, s: list[int]) -> None:
        thetas = []
        for i in s:
            lam, theta = self.state.get(i, torch.zeros_like(self.x)), self.x.clone()
            for b in batches(self.clients[i], i, r):
                theta = theta - ETA * (self.grad(theta, b) - lam + self.alpha * (theta - self.x))
            self.state[i] = lam - self.alpha * (theta - self.x)
            thetas.append(theta)
        self.h = self.h - self.alpha / len(self.clients) * sum(t - self.x for t in thetas)
        self.x = sum(thetas) / len(s) - self.h / self.alpha


class FedAvgMTwin(FedAvgTwin):
    def round(self, r: int, s: list[int]) -> None:
        self.m = 0.9 * self.m + (self.mean_model(r, s) - self.x)
        self.x = self.x + self.m


class FedAdamTwin(FedAvgTwin):
    def round(self, r: int, s: list[int]) -> None:
        if r == 0:
            self.v = torch.full_like(self.x, 1e-6)
        d = self.mean_model(r, s) - self.x
        self.m = 0.9 * self.m + 0.1 * d
        self.v = self.second(d)
        self.x = self.x + 0.01 * self.m / (self.v**0.5 + 1e-3)

    def second(self, d: Tensor) -> Tensor:
        return 0.99 * self.v + 0.01 * d * d


class FedYogiTwin(FedAdamTwin):
    def second(self, d: Tensor) -> Tensor:
        return self.v - 0.01 * d * d * torch.sign(self.v - d * d)


TWINS: dict[str, tuple[type[Twin], str, dict[str, object]]] = {
    "fedavg": (FedAvgTwin, "fedavg", {}),
    "fedprox": (FedProxTwin, "fedprox", {"mu": 0.3}),
    "fednova": (FedNovaTwin, "fednova", {}),
    "fednova-momentum": (FedNovaMomentumTwin, "fednova", {"momentum": 0.7}),
    "mime": (MimeTwin, "mime", {}),
    "mimelite": (MimeLiteTwin, "mime", {"lite": True}),
    "scaffold": (ScaffoldTwin, "scaffold", {}),
    "feddyn": (FedDynTwin, "feddyn", {"alpha": 0.1}),
    "fedavgm": (FedAvgMTwin, "fedavgm", {}),
    "fedadam": (FedAdamTwin, "fedadam", {}),
    "fedyogi": (FedYogiTwin, "fedyogi", {}),
}
