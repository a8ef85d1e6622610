"""A coordinator that has a round repeated with other sites learns no single update from the sums."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.protocol.federated_messages import PhaseId, PhaseOpened, PhaseSetup
from isthmus.protocol.secure_graph import threshold_of
from isthmus.protocol.secure_messages import KeysListed, SealedShare, SharesDelivered, SiteKeys, UnmaskAsked
from isthmus.protocol.secure_site import RevealShares, SecureSiteMachine, SendRefusal, UpdateReady

NAMES = "abcdefg"
KEYS = {name: SiteKeys(name, bytes([n]) * 32, bytes([n + 100]) * 32, bytes(32)) for n, name in enumerate(NAMES)}


class Asked(NamedTuple):
    """What a coordinator tries in one attempt at the round."""

    listed: str
    summed: str
    of: str
    """Whom it asks for shares, of those in the sum."""


@pytest.mark.parametrize("of", [(), ("model M pass 0", "update U")], ids=["round", "model"])
def test_another_device_under_the_name_of_one_that_was_summed_is_another_site(of: tuple[str, ...]) -> None:
    """Of a coordinator with certificates of its own: it knows that device's update, so the sums differ by d's."""
    machine = SecureSiteMachine("a", 0.5, device_of=lambda keys: keys.certificate.hex())
    said: list[object] = []
    for attempt, device in enumerate((b"d", b"d", b"e")):
        phase = PhaseId(0 if not of else attempt, attempt)
        peers = [msgspec.structs.replace(KEYS[n], certificate=device if n == "d" else n.encode()) for n in "bcd"]
        events = (
            PhaseOpened(opening=PhaseSetup(phase=phase, clients=4, samples=1), tasks=()),
            KeysListed(phase=phase, peers=tuple(peers)),
            SharesDelivered(phase=phase, shares=tuple(SealedShare(n, b"") for n in "bcd")),
            UpdateReady(phase=phase, of=of),
            UnmaskAsked(phase=phase, summed=tuple("abcd"), dropped=()),
        )
        said += [one for event in events for one in machine.handle(event)]
    assert [one.parties for one in said if isinstance(one, RevealShares)] == [("a", "b:62", "c:63", "d:64")] * 2
    refused = [one.reason for one in said if isinstance(one, SendRefusal)]
    assert len(refused) == 1
    assert "with other sites, are revealed" in refused[0]
    assert ("another federated.seed" in refused[0]) == bool(of)


def takes_part(machine: SecureSiteMachine, site: str, phase: PhaseId, asked: Asked) -> list[object]:
    """All that the site answers, its masked update included."""
    peers = [name for name in asked.listed if name != site]
    dropped = tuple(name for name in asked.listed if name not in asked.summed)
    events = (
        PhaseOpened(opening=PhaseSetup(phase=phase, clients=len(asked.listed), samples=1), tasks=()),
        KeysListed(phase=phase, peers=tuple(KEYS[name] for name in peers)),
        SharesDelivered(phase=phase, shares=tuple(SealedShare(name, b"") for name in peers)),
        UpdateReady(phase=phase),
        UnmaskAsked(phase=phase, summed=tuple(asked.summed), dropped=dropped),
    )
    return [instruction for event in events for instruction in machine.handle(event)]


def sums_of(attempts: Sequence[Asked], *, remember: bool = True) -> list[frozenset[str]]:
    """The sites of each sum whose masks the coordinator can take off."""
    revealed: dict[str, Mapping[str, frozenset[str]]] = {}
    found: list[frozenset[str]] = []
    for number, asked in enumerate(attempts):
        answered = 0
        for site in asked.of:  # each on a new connection
            machine = SecureSiteMachine(site, 0.5, revealed.get(site, {}) if remember else {})
            answers = takes_part(machine, site, PhaseId(0, number), asked)
            answered += any(isinstance(one, RevealShares) and one.seeds for one in answers)
            revealed[site] = machine.revealed
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
def attempt(draw: st.DrawFn) -> Asked:
    listed = draw(some_of(NAMES, 2))
    summed = draw(some_of(listed, 2))
    return Asked(listed, summed, draw(some_of(summed, 0)))


@given(st.lists(attempt(), min_size=1, max_size=8))
def test_no_combination_of_a_rounds_sums_is_one_update(attempts: list[Asked]) -> None:
    assert not tells_one_update(sums_of(attempts))


def test_a_round_with_one_site_fewer_would_tell_its_update() -> None:
    """So what is tested above is not true by itself."""
    repeated = [Asked("abcd", "abcd", "abcd"), Asked("abc", "abc", "abc")]
    assert tells_one_update(sums_of(repeated, remember=False))
    assert sums_of(repeated) == [frozenset("abcd")]


def test_a_round_is_repeated_with_the_same_sites_and_the_next_one_with_any() -> None:
    assert sums_of([Asked("abc", "abc", "abc")] * 2) == [frozenset("abc")] * 2
    machine = SecureSiteMachine("a", 0.5)
    three, two = Asked("abc", "abc", "abc"), Asked("ab", "ab", "ab")
    for phase in (PhaseId(0), PhaseId(0, 0, 1), PhaseId(1)):
        asked = three if phase == PhaseId(0) else two
        assert any(isinstance(one, RevealShares) for one in takes_part(machine, "a", phase, asked))
    said = takes_part(machine, "a", PhaseId(0, 1), two)
    assert [one.reason for one in said if isinstance(one, SendRefusal)] == [
        "its shares of a sum of this round, with other sites, are revealed: two sums would tell too much"
    ]
