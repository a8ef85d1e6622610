"""Drawn settings of private runs, and their epsilon by accountants that are built here, of what is done in the rounds.

`python -m tests.federated.drawn_privacy` writes the table of docs/correctness.md again.
"""

from __future__ import annotations

import logging
import math
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from isthmus.federated import AlgorithmSpec, load_algorithm
from isthmus.federated.accounting import Accounting
from isthmus.federated.admission import Privacy
from isthmus.protocol.federated_participation import Participation

PAGE = Path(__file__).parents[2] / "docs" / "correctness.md"
BEGIN, END = "<!-- drawn settings: begin -->", "<!-- drawn settings: end -->"
SEED, EACH, NUMBERS = 41, 4, 1000
KINDS = ("Poisson", "empty rounds", "dropout", "fixed", "resumed")
GRID = 1e-3


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A private run in a simulation."""

    kind: str
    clients: int
    participation: Participation
    noise: float
    rounds: int
    algorithm: str
    delta: float
    twice: int = 0
    """Rounds that a killed run made before, and the resumed one again."""

    @property
    def passes(self) -> int:
        return len(load_algorithm(AlgorithmSpec(name=self.algorithm)).passes)

    @property
    def probability(self) -> float:
        """Of a client to be in a round: drawn, and not dropped out."""
        rules = self.participation
        return rules.needed(self.clients) / self.clients * (1 - rules.dropout)

    def told(self) -> float:
        """Epsilon as Isthmus says it."""
        accounting = Accounting(
            privacy=Privacy(clip=1.0, noise_multiplier=self.noise, delta=self.delta),
            participation=self.participation,
            population=self.clients,
            deployed=False,
            passes=self.passes,
        )
        return accounting.guarantee(self.rounds, NUMBERS, self.twice).epsilon

    def at_least(self) -> float:
        """No more than the true epsilon: privacy loss distributions with every loss rounded down. A client's draw holds
        for all noisy sums of its round, also for those of a round that is made twice."""
        pld = import_module("dp_accounting.pld.privacy_loss_distribution")
        rate = self.probability if self.participation.poisson else 1.0

        def rounds(count: int, sums: int) -> Any:
            one = pld.from_gaussian_mechanism(
                self.noise / math.sqrt(sums),
                sampling_prob=rate,
                value_discretization_interval=GRID,
                pessimistic_estimate=False,
                use_connect_dots=False,
            )
            return one.self_compose(count)

        found = rounds(self.rounds - self.twice, self.passes)
        if self.twice:
            found = found.compose(rounds(self.twice, 2 * self.passes))
        return float(found.get_epsilon_for_delta(self.delta))

    def at_most(self) -> float:
        """No less than the true epsilon: Renyi differential privacy, without dropout, and with every client in what is
        made twice."""
        dp, rdp = import_module("dp_accounting"), import_module("dp_accounting.rdp")
        accountant = rdp.RdpAccountant()
        full = dp.GaussianDpEvent(self.noise / math.sqrt(self.passes))
        rate = self.participation.needed(self.clients) / self.clients
        accountant.compose(dp.PoissonSampledDpEvent(rate, full) if self.participation.poisson else full, self.rounds)
        if self.twice:
            accountant.compose(full, self.twice)
        return float(accountant.get_epsilon(self.delta))


def settings() -> list[Setting]:
    """The same on every machine."""
    draws = np.random.default_rng(SEED)
    found: list[Setting] = []
    for kind in KINDS * EACH:
        clients = int(draws.integers(4, 15) if kind == "empty rounds" else draws.integers(20, 1000))
        needed = 1 if kind == "empty rounds" else int(draws.integers(1, clients // 2))
        rounds = int(draws.integers(5, 30))
        found.append(
            Setting(
                kind=kind,
                clients=clients,
                participation=Participation(
                    clients=needed,
                    poisson=kind != "fixed",
                    dropout=round(float(draws.uniform(0.05, 0.5)), 2) if kind == "dropout" else 0.0,
                ),
                noise=round(float(draws.uniform(2.0, 4.0)), 2),
                rounds=rounds,
                algorithm=str(draws.choice(["fedavg", "mime"])),
                delta=float(draws.choice([1e-5, 1e-6])),
                twice=int(draws.integers(1, 5)) if kind == "resumed" else 0,
            )
        )
    return found


@cache
def epsilons() -> tuple[tuple[Setting, float, float, float], ...]:
    """Of every setting what is true at least, what Isthmus says, and what is true at most."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    return tuple((one, one.at_least(), one.told(), one.at_most()) for one in settings())


def table() -> str:
    lines = [
        "| rounds are | clients | per round | dropout | noise | rounds | passes | delta "
        "| dp-accounting, at least | Isthmus | dp-accounting, at most |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one, least, told, most in epsilons():
        rules = one.participation
        rounds = f"{one.rounds}, {one.twice} twice" if one.twice else f"{one.rounds}"
        lines.append(
            f"| {one.kind} | {one.clients} | {rules.clients} | {rules.dropout:g} | {one.noise:g} | {rounds} "
            f"| {one.passes} | {one.delta:g} | {least:.3f} | {told:.3f} | {most:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
