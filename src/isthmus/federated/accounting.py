"""Which noise and which draw of clients a run's epsilon counts on: those that its rounds have."""

from __future__ import annotations

from pathlib import Path

import msgspec

from isthmus.disclosure import SPENT
from isthmus.federated.admission import Guarantee, Privacy, guarantee
from isthmus.federated.secure.site_noise import concentrated, distributed_guarantee
from isthmus.protocol.federated_participation import Participation
from isthmus.reading import read_json


class Accounting(msgspec.Struct, frozen=True, kw_only=True):
    """The assumptions of a private run's epsilon."""

    privacy: Privacy
    participation: Participation
    population: int
    deployed: bool  # over real sites
    passes: int  # passes of a round: so many sums have noise

    @property
    def probability(self) -> float | None:
        """The probability of each client to be in a round; None where epsilon counts every client in every round.

        It lowers epsilon only where clients are drawn each by itself and nothing else decides who is in a round, or
        whether there is one: no trace, no quorum, no minimum, no site that is away.
        """
        rules = self.participation
        open_to_all = rules.quorum == 1 and rules.minimum == 1 and rules.availability is None and not self.deployed
        if self.privacy.noise == "sites" or not (rules.poisson and open_to_all):
            return None
        return rules.needed(self.population) / self.population

    @property
    def _most(self) -> int:
        """Clients in a round, at most."""
        rules = self.participation
        return self.population if rules.poisson else rules.asked(self.population)

    def __str__(self) -> str:
        """The assumptions besides clip, noise, delta, algorithm and number of clients."""
        if self.privacy.noise == "sites":
            return f"{self.participation.minimum} to {self._most} sites in a round"
        if self.probability is None:
            return "every client in every round"
        return f"each client with probability {self.probability!r}"

    def guarantee(self, rounds: int, numbers: int, unsampled: int = 0) -> Guarantee:
        """After so many rounds with updates of so many numbers; `unsampled` as in `Guarantee`. UserError where
        dp-accounting is not installed."""
        if self.privacy.noise == "sites":
            rho = concentrated(self.privacy, self.participation.minimum, self._most, numbers)
            return distributed_guarantee(self.privacy, rounds, self.passes, rho, unsampled)
        return guarantee(self.privacy, rounds, self.passes, self.probability, unsampled)


def written_guarantee(folder: Path) -> Guarantee | None:
    """Read the guarantee of the run in this folder so far; None without noise. UserError for a damaged file."""
    try:
        return read_json(folder / SPENT, Guarantee)
    except FileNotFoundError:
        return None
