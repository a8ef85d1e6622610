"""A coordinator that has a round repeated with other sites learns no single update from the sums."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.programs.ports import Asked, SiteRecorder

from isthmus.protocol.federated_messages import ClientTime, PhaseId, PhaseOpened, PhaseSetup, SumsSent
from isthmus.protocol.secure_messages import KeysListed, SealedShare, SharesDelivered, SiteKeys, UnmaskAsked
from isthmus.protocol.secure_site import SecureSite, threshold_of

NAMES = "abcdefg"
KEYS = {name: SiteKeys(name, bytes([n]) * 32, bytes([n + 100]) * 32, bytes(32)) for n, name in enumerate(NAMES)}


class Tried(NamedTuple):
    """What a coordinator tries in one attempt at the round."""

    listed: str
    summed: str
    of: str
    """Whom it asks for shares, of those in the sum."""


@pytest.mark.parametrize("of", [(), ("model M pass 0", "update U")], ids=["round", "model"])
def test_another_device_under_the_name_of_one_that_was_summed_is_another_site(of: tuple[str, ...]) -> None:
    """Of a coordinator with certificates of its own: it knows that device's update, so the sums differ by d's."""
    port = SiteRecorder()
    policy = SecureSite(port.port, "a", 0.5)
    for attempt, device in enumerate((b"d", b"d", b"e")):
        phase = PhaseId(0 if not of else attempt, attempt)
        peers = [msgspec.structs.replace(KEYS[n], certificate=device if n == "d" else n.encode()) for n in "bcd"]
        policy.ordered(PhaseOpened(opening=PhaseSetup(phase=phase, clients=4, samples=1), tasks=()))
        policy.ordered(KeysListed(phase=phase, peers=tuple(peers)))
        policy.ordered(SharesDelivered(phase=phase, shares=tuple(SealedShare(n, b"") for n in "bcd")))
        policy.trained(trained(phase), of)
        policy.ordered(UnmaskAsked(phase=phase, summed=tuple("abcd"), dropped=()))
    asked = port.took()
    assert [one[4] for one in asked if one[0] == "reveal"] == [("a", "b:62", "c:63", "d:64")] * 2
    refused = refusals(asked)
    assert len(refused) == 1
    assert "with other sites, are revealed" in refused[0]
    assert ("another training.seed" in refused[0]) == bool(of)


def trained(phase: PhaseId) -> SumsSent:
    return SumsSent(phase=phase, timed=(ClientTime(0, 1, 1.0),))


def refusals(asked: Sequence[Asked]) -> list[str]:
    """Return the reasons of updates that were not sent."""
    sent = [one[1] for one in asked if one[0] == "send_none"]
    return [refused.reason for sums in sent if isinstance(sums, SumsSent) for refused in sums.refused]


def reveals(asked: Sequence[Asked]) -> bool:
    return any(one[0] == "reveal" for one in asked)


def takes_part(policy: SecureSite, site: str, phase: PhaseId, tried: Tried) -> list[Asked]:
    """All that the site asks for, its masked update included."""
    port: Any = policy.port
    peers = [name for name in tried.listed if name != site]
    dropped = tuple(name for name in tried.listed if name not in tried.summed)
    policy.ordered(PhaseOpened(opening=PhaseSetup(phase=phase, clients=len(tried.listed), samples=1), tasks=()))
    policy.ordered(KeysListed(phase=phase, peers=tuple(KEYS[name] for name in peers)))
    policy.ordered(SharesDelivered(phase=phase, shares=tuple(SealedShare(name, b"") for name in peers)))
    policy.trained(trained(phase))
    policy.ordered(UnmaskAsked(phase=phase, summed=tuple(tried.summed), dropped=dropped))
    return port.took()


def sums_of(attempts: Sequence[Tried], *, remember: bool = True) -> list[frozenset[str]]:
    """The sites of each sum whose masks the coordinator can take off."""
    revealed: dict[str, Mapping[str, frozenset[str]]] = {}
    found: list[frozenset[str]] = []
    for number, asked in enumerate(attempts):
        answered = 0
        for site in asked.of:  # each on a new connection
            policy = SecureSite(SiteRecorder().port, site, 0.5, revealed.get(site, {}) if remember else {})
            answered += reveals(takes_part(policy, site, PhaseId(0, number), asked))
            revealed[site] = policy.revealed
        if answered >= threshold_of(len(asked.listed), 0.5):
            found.append(frozenset(asked.summed))
    return found


def tells_one_update(sums: Collection[frozenset[str]]) -> bool:
    """Whether some combination of the sums is a single site's update."""
    rows = np.array([[name in one for name in NAMES] for one in sums], dtype=float).reshape(len(sums), len(NAMES))
    rank = np.linalg.matrix_rank(rows) if len(sums) else 0
    return any(np.linalg.matrix_rank(np.vstack([rows, unit])) == rank for unit in np.eye(len(NAMES)))


def some_of(names: str, least: int) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(names), unique=True, min_size=least).map(sorted).map("".join)


@st.composite
def attempt(draw: st.DrawFn) -> Tried:
    listed = draw(some_of(NAMES, 2))
    summed = draw(some_of(listed, 2))
    return Tried(listed, summed, draw(some_of(summed, 0)))


@given(st.lists(attempt(), min_size=1, max_size=8))
def test_no_combination_of_a_rounds_sums_is_one_update(attempts: list[Tried]) -> None:
    assert not tells_one_update(sums_of(attempts))


def test_a_round_with_one_site_fewer_would_tell_its_update() -> None:
    """So what is tested above is not true by itself."""
    repeated = [Tried("abcd", "abcd", "abcd"), Tried("abc", "abc", "abc")]
    assert tells_one_update(sums_of(repeated, remember=False))
    assert sums_of(repeated) == [frozenset("abcd")]


def test_a_round_is_repeated_with_the_same_sites_and_the_next_one_with_any() -> None:
    assert sums_of([Tried("abc", "abc", "abc")] * 2) == [frozenset("abc")] * 2
    policy = SecureSite(SiteRecorder().port, "a", 0.5)
    three, two = Tried("abc", "abc", "abc"), Tried("ab", "ab", "ab")
    for phase in (PhaseId(0), PhaseId(0, 0, 1), PhaseId(1)):
        asked = three if phase == PhaseId(0) else two
        assert reveals(takes_part(policy, "a", phase, asked))
    assert refusals(takes_part(policy, "a", PhaseId(0, 1), two)) == [
        "its shares of a sum of this round, with other sites, are revealed: two sums would tell too much"
    ]
