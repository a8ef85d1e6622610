"""One site that lies ends no secure round of the others, over TLS: the coordinator is an honest one here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.federated.secure.masks import WEIGHTS
from isthmus.federated.secure.site_secrets import SiteSecrets
from isthmus.programs.masked import Masked, SecurePort
from isthmus.protocol.federated_messages import PhaseId
from isthmus.protocol.federated_planning import SecureRules
from isthmus.protocol.secure_messages import (
    KeysListed,
    KeysSent,
    RevealedShare,
    SealedShare,
    SharesDisputed,
    SharesSent,
    SiteKeys,
)
from isthmus_testing.secure_phase import SecurePhase
from tests.programs.ports import Recorder

from .hostile import HostileCoordinator, settled

NAMES = ("a", "b", "c", "d")


def test_the_sum_is_the_same_although_a_site_reveals_wrong_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Site a's: its share is the first of every secret. All of them are named, unless the masks were off before a's
    answer came."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    honest = HostileCoordinator(tmp_path / "one", NAMES)
    expected = honest.secure_sum(PhaseId(0), NAMES)
    honest.close()
    reveal = SiteSecrets.reveal

    def lie(self: SiteSecrets, seeds: Collection[str], keys: Collection[str]) -> tuple[list[RevealedShare], ...]:
        right = reveal(self, seeds, keys)
        return right if self._site != "a" else tuple([RevealedShare(s.site, bytes(32)) for s in of] for of in right)

    monkeypatch.setattr(SiteSecrets, "reveal", lie)
    coordinator = HostileCoordinator(tmp_path / "two", NAMES)
    found = coordinator.secure_sum(PhaseId(0), NAMES)
    assert isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor), found
    assert torch.equal(found, expected)
    assert coordinator.wrong in (set(), {("a", owner) for owner in NAMES})
    coordinator.close()


def test_a_site_that_reveals_wrong_shares_is_left_out_of_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, where its answer comes first."""
    reveal = SiteSecrets.reveal

    def lie(self: SiteSecrets, seeds: Collection[str], keys: Collection[str]) -> tuple[list[RevealedShare], ...]:
        right = reveal(self, seeds, keys)
        return right if self._site != "a" else tuple([RevealedShare(s.site, bytes(32)) for s in of] for of in right)

    monkeypatch.setattr(SiteSecrets, "reveal", lie)
    updates = {name: {"w": torch.arange(3) + n, WEIGHTS: torch.tensor([1, 1])} for n, name in enumerate(NAMES)}
    machine = Masked(SecureRules())
    for round_, names in enumerate(("abcd", "bcd")):
        result = SecurePhase(updates, SecureRules(), machine=machine, round_=round_).run()
        assert result.summed == frozenset(names)
        assert result.sums is not None
        assert torch.equal(result.sums["w"], torch.stack([updates[name]["w"] for name in names]).sum(0))


def test_badly_sealed_shares_are_a_message_and_no_site_hangs_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deal = SiteSecrets.deal

    def spoilt(self: SiteSecrets, peers: Sequence[SiteKeys], threshold: int) -> list[SealedShare]:
        right = deal(self, peers, threshold)
        return right if self._site != "d" else [SealedShare(s.site, bytes(len(s.sealed))) for s in right]

    monkeypatch.setattr(SiteSecrets, "deal", spoilt)
    coordinator = HostileCoordinator(tmp_path, NAMES)
    answer = coordinator.secure_sum(PhaseId(0), NAMES)
    assert answer == "the shares that d dealt cannot be opened"
    for name in "abc":
        settled(coordinator.sites[name], "round 1: the shares that d dealt cannot be opened")
    again = coordinator.secure_sum(PhaseId(0, attempt=1), NAMES[:3])  # on the same connections
    assert isinstance(again, torch.Tensor), again
    coordinator.close()


def dealt(machine: Masked, attempt: int) -> Recorder:
    """A phase until shares are delivered: what the machine asks."""
    phase, asked = PhaseId(0, attempt), Recorder(SecurePort)
    machine.port = asked.port
    machine.opened(phase, frozenset(NAMES))
    for n, name in enumerate(NAMES):
        keys = SiteKeys(name, bytes([n]) * 32, bytes([n + 9]) * 32, bytes(32))
        machine.heard(name, KeysSent(phase=phase, keys=keys))
    for name, peers in listed(asked).items():
        shares = tuple(SealedShare(peer, b"") for peer in peers)
        machine.heard(name, SharesSent(phase=phase, shares=shares))
    return asked


def listed(found: Recorder) -> dict[str, list[str]]:
    """The neighbours that each site was told."""
    told: list[Any] = [order for what, *order in found.asked if what == "tell"]
    return {site: [peer.site for peer in order.peers] for site, order in told if isinstance(order, KeysListed)}


def left_out(found: Recorder) -> dict[Any, object]:
    """Why, by sites."""
    return {call[2]: call[3] for call in found.asked if call[0] == "leave_out"}


@pytest.mark.parametrize(
    ("said", "out"),
    [
        ([("a", "d")], {}),
        ([("a", "d"), ("b", "d"), ("c", "d")], {"d": "shares between it and 3 other sites were wrong"}),
        ([("a", "d"), ("b", "c")], {}),
        ([("a", "c"), ("a", "d"), ("b", "c"), ("b", "d")], {}),
        ([("a", "b"), ("a", "c"), ("a", "d")], {"a": "shares between it and 3 other sites were wrong"}),
        (
            [("a", "b"), ("a", "c"), ("a", "d"), ("b", "c"), ("b", "d")],
            {
                "a": "shares between it and 3 other sites were wrong",
                "b": "shares between it and 3 other sites were wrong",
            },
        ),
    ],
    ids=[
        "one word against another",
        "an owner that lies",
        "two words",
        "as many against as many",
        "a holder that lies",
        "two holders that lie",
    ],
)
def test_who_is_left_out_after_complaints(said: list[tuple[str, str]], out: dict[str, str]) -> None:
    machine = Masked(SecureRules())
    assert not left_out(dealt(machine, 0))
    for holder in dict.fromkeys(holder for holder, _ in said):
        owners = tuple(owner for by, owner in said if by == holder)
        machine.heard(holder, SharesDisputed(phase=PhaseId(0), owners=owners))
    assert left_out(dealt(machine, 1)) == {(site,): f"secure aggregation: {how}" for site, how in out.items()}


VICTIMS = [["a"], ["a", "b"], ["c", "d"]]


@pytest.mark.parametrize("victims", VICTIMS, ids=["".join(one) for one in VICTIMS])
def test_a_site_that_deals_some_wrong_shares_leaves_none_of_them_out(
    victims: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Site e's are sealed well. The sum is right; no honest site is left out of any of three rounds."""
    deal = SiteSecrets.deal

    def spoilt(self: SiteSecrets, peers: Sequence[SiteKeys], threshold: int) -> list[SealedShare]:
        real = self._seal
        if self._site == "e":
            monkeypatch.setattr(self, "_seal", lambda peer, s: real(peer, bytes(64) if peer in victims else s))
        return deal(self, peers, threshold)

    monkeypatch.setattr(SiteSecrets, "deal", spoilt)
    updates = {name: {"w": torch.arange(3) + n, WEIGHTS: torch.tensor([1, 1])} for n, name in enumerate("abcde")}
    machine = Masked(SecureRules(fewest=4))
    for round_ in range(3):
        phase = SecurePhase(updates, SecureRules(fewest=4), machine=machine, round_=round_)
        result = phase.run()
        assert {"a", "b", "c", "d"} <= result.summed
        assert result.sums is not None
        assert torch.equal(result.sums["w"], torch.stack([updates[name]["w"] for name in result.summed]).sum(0))


def test_after_one_wrong_share_its_owner_and_its_holder_deal_each_other_none() -> None:
    machine = Masked(SecureRules(fewest=3))
    dealt(machine, 0)
    machine.heard("a", SharesDisputed(phase=PhaseId(0), owners=("d",)))
    asked = dealt(machine, 1)
    assert listed(asked) == {"a": ["b", "c"], "b": ["a", "c", "d"], "c": ["a", "b", "d"], "d": ["b", "c"]}
    asked.took()
    machine.sums_wanted(PhaseId(0, 1), frozenset("acd"))  # a would see two: it would leave
    reason = "secure aggregation: a knows 2 sites of the sum, expected 3"
    assert asked.took() == [("unmasked", PhaseId(0, 1), reason)]


@given(st.sets(st.tuples(st.booleans(), st.sampled_from("abc")), max_size=6))
def test_one_site_that_lies_leaves_no_honest_one_out(lies: set[tuple[bool, str]]) -> None:
    """Whatever site d does, as owner and as holder: it is in every pair."""
    machine = Masked(SecureRules())
    machine.opened(PhaseId(0), frozenset(NAMES))
    machine._disputes = {("d", other) if holds else (other, "d") for holds, other in lies}
    out = {site for sites in left_out(dealt(machine, 1)) for site in sites}
    assert out == ({"d"} if len({other for _, other in lies}) > 1 else set())
