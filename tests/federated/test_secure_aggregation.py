"""Secure aggregation by its machines alone: sums equal plain ones bit for bit, whichever sites drop out and when, and
what the coordinator sees tells nothing of the updates."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isthmus.errors import PeerError
from isthmus.federated.algorithms import AlgorithmSpec, ClientUpdate, Combine, algorithm_names, load_algorithm
from isthmus.federated.partial import PartialSum
from isthmus.federated.secure import shamir
from isthmus.federated.secure.masks import WEIGHTS
from isthmus.federated.secure.shamir import PRIME, deal, draw_secret, recover
from isthmus.federated.server import Server
from isthmus.protocol import secure_site
from isthmus.protocol.federated_messages import (
    ClientTask,
    ClientTime,
    PhaseId,
    PhaseOpened,
    PhaseSetup,
    RefusedUpdate,
    SumsSent,
)
from isthmus.protocol.federated_planning import SecureRules
from isthmus.protocol.secure_messages import (
    KeysListed,
    SealedShare,
    SecureReport,
    SharesDelivered,
    SharesDisputed,
    SharesRevealed,
    SiteKeys,
    UnmaskAsked,
)
from isthmus.protocol.secure_site import SecureSite, neighbour_count, neighbours, threshold_of
from isthmus.session.program import OutOfPhase
from isthmus_testing.secure_phase import SecurePhase, SecureResult, Step
from tests.lazy import Lazy
from tests.programs.ports import Asked, SiteRecorder
from tests.tiers import THOROUGH

stats = Lazy("scipy.stats")

pytestmark = pytest.mark.thorough

RETURNS: dict[str, Combine] = {"delta": "weighted_mean", "steps": "mean", "control": "sum"}
PHASE = PhaseId(0)


def draw_from(seed: int) -> shamir.Draw:
    return np.random.default_rng(seed).bytes


def update_of(client: int, samples: int) -> ClientUpdate:
    draws = torch.Generator().manual_seed(client)
    values = {"delta": torch.randn(7, generator=draws), "steps": torch.randn(1, generator=draws) * 100}
    return ClientUpdate(values=values | {"control": torch.randn(3, generator=draws) * 1e-3})


def sums_of(clients: Mapping[int, int], among: Mapping[int, int]) -> PartialSum:
    """Of the updates of these clients, by their samples, in a phase with those."""
    partial = PartialSum(RETURNS)
    partial.begin(sum(among.values()), len(among))
    for client, samples in clients.items():
        partial.fold(client, update_of(client, samples), samples)
    return partial


def masked_values(partial: PartialSum) -> dict[str, Tensor]:
    weights = partial.weights()
    return {**partial.tensors(), WEIGHTS: torch.tensor([weights.total, weights.clients])}


def secure(count: int, lost: Mapping[int, Step], late: set[int], seed: int = 0) -> tuple[SecureResult, dict[int, int]]:
    samples = {client: 1 + 37 * client % 91 for client in range(count)}
    updates = {f"s{client:03}": masked_values(sums_of({client: samples[client]}, samples)) for client in samples}
    phase = SecurePhase(
        updates,
        SecureRules(),
        lost={f"s{client:03}": step for client, step in lost.items()},
        late=[f"s{client:03}" for client in late],
        draw=draw_from(seed),
    )
    return phase.run(), samples


def check_equals_plain(result: SecureResult, samples: Mapping[int, int]) -> None:
    assert result.sums is not None
    plain = sums_of({c: n for c, n in samples.items() if f"s{c:03}" in result.summed}, samples)
    assert result.weights == plain.weights()
    assert result.sums.keys() == plain.tensors().keys()
    for name, value in plain.tensors().items():
        assert torch.equal(result.sums[name], value)


STEPS: tuple[Step, ...] = ("keys", "shares", "update", "reveal")
SERVERS = {
    name: Server(load_algorithm(AlgorithmSpec(name=name)), torch.randn(9), {"mean": torch.zeros(2)}, 200)
    for name in algorithm_names()
}
PASSES = [(name, number) for name, server in sorted(SERVERS.items()) for number in range(len(server.forms))]


def updates_of(name: str, number: int, count: int) -> list[ClientUpdate]:
    """Of so many clients in one pass of an algorithm."""
    draws = torch.Generator().manual_seed(7)
    forms = SERVERS[name].forms[number]
    return [
        ClientUpdate(values={n: torch.randn(form.shape, generator=draws) for n, form in forms.items()})
        for _ in range(count)
    ]


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_the_sum_is_the_plain_one_bit_for_bit_whichever_sites_drop_out(data: st.DataObject) -> None:
    """Of every algorithm, of 3 to 200 sites, that drop out in every phase, with all or some for neighbours."""
    name, number = data.draw(st.sampled_from(PASSES))
    count = data.draw(st.integers(3, 200 if THOROUGH else 12))
    lost = data.draw(st.dictionaries(st.integers(0, count - 1), st.sampled_from(STEPS), max_size=max(9, count // 6)))
    late = data.draw(st.sets(st.integers(0, count - 1), max_size=2)) - lost.keys()
    updates, returns = updates_of(name, number, count), SERVERS[name]._returns(number)

    def summed(clients: Iterable[int]) -> PartialSum:
        partial = PartialSum(returns)
        partial.begin(64 * count, count)
        for client in clients:
            partial.fold(client, updates[client], 1 + client % 60)
        return partial

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secure_site, "PER_DOUBLING", 2)
        patch.setattr(secure_site, "COMPLETE_BELOW", data.draw(st.sampled_from([8, 100])))
        sparse = neighbour_count(count) < count - 1
        phase = SecurePhase(
            {f"s{client:03}": masked_values(summed([client])) for client in range(count)},
            SecureRules(),
            lost={f"s{client:03}": step for client, step in lost.items()},
            late=[f"s{client:03}" for client in late],
            draw=draw_from(count),
        )
        result = phase.run()
    if result.sums is None:
        assert "secure aggregation" in result.reason
        assert sparse or too_few(count, lost, late)
        return
    assert sparse or not too_few(count, lost, late)
    plain = summed(client for client in range(count) if f"s{client:03}" in result.summed)
    assert result.weights == plain.weights()
    assert result.sums.keys() == plain.tensors().keys()
    assert all(torch.equal(result.sums[n], value) for n, value in plain.tensors().items())


def too_few(count: int, lost: Mapping[int, Step], late: set[int]) -> bool:
    """Whether a sum of sites that are all neighbours cannot be unmasked."""
    left = {step: sum(of == step for of in lost.values()) for step in STEPS}
    keyed = count - left["keys"]
    masking = keyed - left["shares"]
    updates = masking - left["update"] - len(late)
    revealing = updates - left["reveal"]
    return revealing < threshold_of(keyed, 0.5) or masking < 2


def test_where_every_update_is_lost_nothing_is_unmasked() -> None:
    result, _ = secure(3, {0: "keys", 1: "update", 2: "update"}, set())
    assert result.sums is None and result.reason == "secure aggregation: no site's update is in the sum"


@pytest.mark.parametrize("per_doubling", [2, pytest.param(10, marks=pytest.mark.long)])
def test_the_sum_is_the_plain_one_where_each_site_has_some_neighbours(
    per_doubling: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 200
    monkeypatch.setattr(secure_site, "PER_DOUBLING", per_doubling)
    lost: dict[int, Step] = {client: STEPS[client % 4] for client in range(0, count, 11)}
    result, samples = secure(count, lost, {1})
    assert neighbour_count(count) < count - 1
    check_equals_plain(result, samples)
    dropped_before = sum(step != "reveal" for step in lost.values())
    assert len(result.summed) == count - dropped_before - 1


# Shamir


@given(st.integers(0, PRIME - 1), st.integers(1, 9), st.data())
def test_any_threshold_of_shares_gives_the_secret_back(secret: int, threshold: int, data: st.DataObject) -> None:
    holders = data.draw(st.integers(threshold, 12))
    shares = deal(secret.to_bytes(32, "little"), holders, threshold, draw_from(secret % 2**32))
    chosen = data.draw(st.permutations(range(1, holders + 1)))[:threshold]
    assert recover({holder: shares[holder - 1] for holder in chosen}) == secret.to_bytes(32, "little")


@given(st.integers(0, PRIME - 1), st.integers(0, PRIME - 1), st.integers(2, 6))
def test_fewer_shares_are_of_every_secret_equally(secret: int, other: int, threshold: int) -> None:
    """For each other secret there is exactly one polynomial through the same shares: nothing tells them apart."""
    shares = deal(secret.to_bytes(32, "little"), threshold, threshold, draw_from(1))
    known = {holder: shares[holder - 1] for holder in range(1, threshold)}
    # The share that the last holder would have, had the secret been the other one.
    points = {0: other, **{holder: int.from_bytes(share, "little") for holder, share in known.items()}}
    last = interpolated(points, threshold).to_bytes(32, "little")
    assert recover({**known, threshold: last}) == other.to_bytes(32, "little")


def interpolated(points: Mapping[int, int], at: int) -> int:
    total = 0
    for x, y in points.items():
        term = y
        for other in points.keys() - {x}:
            term = term * (at - other) * pow(x - other, -1, PRIME) % PRIME
        total += term
    return total % PRIME


def test_fewer_shares_are_of_every_secret_equally_counted_over_a_small_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """All polynomials of degree 2 over 7 elements: two shares come equally often with every secret."""
    monkeypatch.setattr(shamir, "PRIME", 7)
    seen: dict[tuple[bytes, bytes], collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for secret, first, second in itertools.product(range(7), repeat=3):
        coefficients = iter([first, second])
        shares = deal(secret.to_bytes(32, "little"), 3, 3, lambda _, c=coefficients: next(c).to_bytes(32, "little"))
        seen[shares[0], shares[2]][secret] += 1
    assert all(counts == dict.fromkeys(range(7), 1) for counts in seen.values())
    assert len(seen) == 49


def test_a_share_that_is_none_is_refused() -> None:
    with pytest.raises(PeerError, match="no number of the field"):
        recover({1: b"\xff" * 32})


# What the coordinator sees


class View:
    """All that came to an honest but curious coordinator."""

    def __init__(self) -> None:
        self.values: dict[str, list[np.ndarray]] = collections.defaultdict(list)
        self.revealed: dict[str, SharesRevealed] = {}

    def __call__(self, site: str, sent: SecureReport | Mapping[str, Tensor]) -> None:
        if isinstance(sent, Mapping):
            self.values[site].append(np.concatenate([value.numpy().view(np.uint64) for value in sent.values()]))
        elif isinstance(sent, SharesRevealed):
            self.revealed[site] = sent


def viewed(updates: Mapping[str, Mapping[str, Tensor]], lost: Mapping[str, Step] = {}, seed: int = 0) -> View:
    view = View()
    SecurePhase(updates, SecureRules(), lost=lost, draw=draw_from(seed), heard=view).run()
    return view


@pytest.mark.parametrize("inputs", ["zeros", "equal", "random"])
def test_masked_values_are_uniform_whatever_the_updates_are(inputs: str) -> None:
    draws = np.random.default_rng(5)
    make = {
        "zeros": lambda: np.zeros(20_000, dtype=np.int64),
        "equal": lambda: np.full(20_000, 123_456_789, dtype=np.int64),
        "random": lambda: draws.integers(-(2**40), 2**40, 20_000),
    }[inputs]
    updates = {n: {"delta": torch.from_numpy(make()), WEIGHTS: torch.tensor([10, 1])} for n in ("a", "b", "c", "d")}
    view = viewed(updates, seed=11)
    for (values,) in view.values.values():
        for shift in (0, 28, 56):  # low, middle and high bytes
            counts = np.bincount((values >> np.uint64(shift)).astype(np.uint8), minlength=256)
            assert stats.chisquare(counts).pvalue > 1e-4  # of fixed seeds: passes always, or never
        if inputs == "random":
            plain = [np.append(update["delta"].numpy(), [10, 1]) for update in updates.values()]
            assert all(abs(np.corrcoef(values.astype(float), one)[0, 1]) < 0.05 for one in plain)


@settings(deadline=None, max_examples=15)
@given(st.dictionaries(st.integers(0, 6), st.sampled_from(STEPS), max_size=3))
def test_the_coordinator_never_has_both_secrets_of_one_site(lost: Mapping[int, Step]) -> None:
    updates = {f"s{n}": {"delta": torch.tensor([n]), WEIGHTS: torch.tensor([1, 1])} for n in range(7)}
    view = viewed(updates, {f"s{n}": step for n, step in lost.items()})
    seeds = {share.site for sent in view.revealed.values() for share in sent.seeds}
    keys = {share.site for sent in view.revealed.values() for share in sent.keys}
    assert view.revealed
    assert not seeds & keys


class SiteAtTheEnd:
    """A site, one of five, whose masked update is sent."""

    def __init__(self, fewest: int = 2) -> None:
        self.port = SiteRecorder()
        self.policy = SecureSite(self.port.port, "a", 0.5, fewest=fewest)
        peers = [SiteKeys(name, bytes([n]) * 32, bytes([n + 100]) * 32, bytes(32)) for n, name in enumerate("bcde")]
        self.policy.ordered(PhaseOpened(opening=PhaseSetup(phase=PHASE, clients=5, samples=5), tasks=()))
        self.policy.ordered(KeysListed(phase=PHASE, peers=tuple(peers)))
        self.policy.ordered(SharesDelivered(phase=PHASE, shares=tuple(SealedShare(name, b"") for name in "bcde")))
        self.policy.trained(SumsSent(phase=PHASE, timed=(ClientTime(0, 1, 1.0),)))
        assert self.policy.phase == "masked"
        self.port.took()

    def asked(self, summed: str, dropped: str) -> list[Asked]:
        """Return what it asks of its host when the coordinator wants these shares."""
        self.policy.ordered(UnmaskAsked(phase=PHASE, summed=tuple(summed), dropped=tuple(dropped)))
        return self.port.took()

    def reason_to_leave(self, summed: str, dropped: str) -> str:
        (forget, (distrust, reason)) = self.asked(summed, dropped)
        assert forget == ("forget_secrets",) and distrust == "distrust" and self.policy.over
        return str(reason)


def test_a_site_reveals_once_and_of_each_site_one_share() -> None:
    site = SiteAtTheEnd()
    reveal, (send, report), forget = site.asked("abc", "de")
    assert reveal == ("reveal", PHASE, ("a", "b", "c"), ("d", "e"), ("a", "b", "c"), ())
    assert send == "send" and isinstance(report, SharesRevealed) and forget == ("forget_secrets",)
    assert site.asked("ade", "bc") == []


@pytest.mark.parametrize(
    ("summed", "dropped", "reason"),
    [
        ("abcd", "de", "both kinds"),
        ("abc", "d", "not of every neighbour"),
        ("bcde", "a", "both kinds"),
        ("ab", "cde", "too few"),
        ("abcdef", "", "not of every neighbour"),
    ],
)
def test_a_site_leaves_a_coordinator_that_asks_for_too_much(summed: str, dropped: str, reason: str) -> None:
    assert reason in SiteAtTheEnd().reason_to_leave(summed, dropped)


def test_a_site_leaves_a_coordinator_that_wants_a_sum_of_fewer_than_the_job_says() -> None:
    """Each has the noise for `minimum` sites: fewer have less than epsilon counts on."""
    assert "a sum of 3 sites" in SiteAtTheEnd(fewest=4).reason_to_leave("abc", "de")
    assert SiteAtTheEnd(fewest=3).asked("abc", "de")[0][0] == "reveal"


def test_a_site_whose_shares_cannot_be_opened_has_no_update() -> None:
    site = SiteAtTheEnd()
    peers = tuple(SiteKeys(name, bytes([n]) * 32, bytes([n + 100]) * 32, bytes(32)) for n, name in enumerate("bcd"))
    phase = PhaseId(1)
    setup = PhaseSetup(phase=phase, clients=4, samples=4)
    site.policy.ordered(PhaseOpened(opening=setup, tasks=(ClientTask(3, 1),)))
    site.policy.ordered(KeysListed(phase=phase, peers=peers))
    site.policy.trained(SumsSent(phase=phase, timed=(ClientTime(3, 1, 1.0),)))
    site.port.took()
    shares = (SealedShare("b", b""), SealedShare("c", b"disputed"), SealedShare("d", b""))
    site.policy.ordered(SharesDelivered(phase=phase, shares=shares))
    refused = (RefusedUpdate(3, "the shares that c dealt cannot be opened"),)
    assert site.port.took() == [
        ("send", SharesDisputed(phase=phase, owners=("c",))),
        ("send_none", SumsSent(phase=phase, timed=(), refused=refused)),
        ("forget_secrets",),
    ]


@pytest.mark.parametrize("order", [SharesDelivered(phase=PHASE, shares=()), KeysListed(phase=PHASE, peers=())])
def test_an_order_that_does_not_follow_asks_for_nothing(order: SharesDelivered | KeysListed) -> None:
    site = SiteAtTheEnd()
    with pytest.raises(OutOfPhase, match=f"{type(order).__name__} came in phase 'masked'"):
        site.policy.ordered(order)
    assert not site.port.asked and site.policy.phase == "masked"


def test_neighbours_are_mutual_and_as_many_as_they_should_be() -> None:
    draws = np.random.default_rng(0)
    for count in (3, 99, 100, 150):
        found = neighbours({f"s{n}": draws.bytes(32) for n in range(count)})
        assert all(len(peers) == len(set(peers)) == neighbour_count(count) for peers in found.values())
        assert all(site in found[peer] for site, peers in found.items() for peer in peers)


def test_neighbourhoods_hide_and_survive_with_a_fifth_colluding_and_a_fifth_lost() -> None:
    """The figures of `PER_DOUBLING`."""
    for count in (100, 200, 500, 1000):
        size = neighbour_count(count) + 1
        needed = threshold_of(size, 0.5)
        bad = stats.hypergeom(count, count // 5, size).sf(needed - 1)
        assert count * bad < 2**-30


def test_secrets_are_elements_of_the_field() -> None:
    answers = iter([(PRIME + 3).to_bytes(32, "little"), (5).to_bytes(32, "little")])
    assert draw_secret(lambda _: next(answers)) == (5).to_bytes(32, "little")
