"""How federated rounds go, and when one is over: rules that are configured, written down, and told in every line."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from isthmus.protocol.federated_participation import at_least

Why = Literal["all", "quorum", "behind", "deadline"]
"""The event that ended a round: all clients that were asked have answered; its quorum is in; all others still work for
an earlier round; its deadline is over."""


class ExecutorChurn(msgspec.Struct, frozen=True, kw_only=True):
    """Executors that come and go, as sites do: who is lost may come back, and takes part from the next phase on."""

    start: int
    """The run begins when so many are here."""
    wait_s: float = 5.0
    """Later, and after a restart: once the round's `minimum` is here, so long for the others."""


class SecureRules(msgspec.Struct, frozen=True, kw_only=True):
    """How the sums of a run are masked."""

    share: float = 0.5
    """More than this share of a secret's shares give it back."""
    wait_s: float = 10.0
    """For sites that do not answer, in each step."""
    fewest: int = 2
    """Updates in a sum."""


class RoundRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a run's rounds go."""

    rounds: int
    first_round: int = 0
    passes: int = 1
    needed: int = 1
    """Clients that a round wants; more may be asked (over-selection)."""
    poisson: bool = False
    """Each client is drawn independently, and every drawn client is needed. `needed` is the population then."""
    quorum: float = 1.0
    minimum: int = 1
    deadline_s: float = 600.0
    attempts: int = 3
    planner: str = "certified"
    warm_up_rounds: int = 0
    """So many first rounds are scheduled by number of clients alone (Parrot's R_w)."""
    steals: bool = True
    stealing_pays_s: float = 0.01
    """No executor steals in a phase that is expected to end sooner. Asking in vain costs two round trips, of a
    millisecond each on busy cores."""
    single: bool = False
    """One client at a time, its result back at once (the FA scheme)."""
    staleness: int = 0
    """Rounds that an update may be late; it then has a smaller weight (FedBuff). 0: late updates are ignored."""
    at_work: int = 0
    """Clients at work at any time in a simulation with late updates; a round is the next `needed` of them that end."""
    secure: SecureRules | None = None
    """Sums are masked: when a phase is over, the masks are taken off first. None: they are not."""
    most_samples: int = 0
    """The most samples of a client, which does not say how many it has; 0: it does."""
    gathering: ExecutorChurn | None = None
    """None: a run begins when all executors are connected, and a lost executor stays lost."""

    def enough(self, needed: int) -> int:
        """Clients that close a round of which `needed` are wanted, also where others are still at work."""
        return max(self.minimum, at_least(self.quorum, needed))

    @property
    def description(self) -> str:
        """The closing rules in words."""
        if self.at_work:
            share = f"the next {self.needed} of {self.at_work} at work"
        else:
            of = "those drawn" if self.poisson else str(self.needed)
            share = f"{'all' if self.quorum == 1 else f'{self.quorum:.0%}'} of {of}"
        late = f", late ones count for {self.staleness} rounds" if self.staleness else ""
        return f"{share}, at least {self.minimum}, deadline {self.deadline_s:g} s{late}"

    def why_over(self, outstanding: int, done: int, enough: int, open_s: float, behind: int = 0) -> Why | None:
        """Why a phase is over with `done` clients finished and others `outstanding`; None while it is not. `enough`
        close it. `behind` of the outstanding ones are with executors that still work for an earlier phase: a round
        with its `minimum` goes on without them."""
        if not outstanding:
            return "all"
        if done >= enough:
            return "quorum"
        if outstanding == behind and done >= self.minimum:
            return "behind"
        return "deadline" if open_s >= self.deadline_s else None


class Waiting(NamedTuple):
    """For executors, before a phase."""

    needed: int
    until_s: float | None
    """The time, by the clock of `Tick`, at which the wait ends; None: it has no end."""
    goes_on: bool = False
    """Whether the phase begins without the others then; else the run ends."""
