"""Robust means, differential privacy, and who can take part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.data.availability import read_availability
from isthmus.errors import UserError
from isthmus.federated import (
    Algorithm,
    AlgorithmSpec,
    ClientUpdate,
    Cohort,
    Combine,
    LocalTrainer,
    Server,
    Values,
    load_algorithm,
)
from isthmus.federated.admission import Privacy, Private, guarantee
from isthmus.federated.robust import Aggregation, Robust, robust_mean
from isthmus.protocol.federated_messages import PhaseId, PhaseSetup
from isthmus.protocol.federated_participation import Buffer, Participation, cohort
from isthmus.protocol.secure_site import threshold_of

MODEL = torch.zeros(4)
rows = st.integers(1, 9).flatmap(
    lambda n: st.lists(st.lists(st.floats(-100, 100), min_size=3, max_size=3), min_size=n, max_size=n)
)


@given(rows)
def test_the_median_is_numpys(values: list[list[float]]) -> None:
    found = robust_mean(Aggregation(rule="median"), {"x": torch.tensor(values, dtype=torch.float64)})["x"]
    assert np.allclose(found.numpy(), np.median(np.array(values), axis=0))


@given(rows, st.sampled_from([0.0, 0.1, 0.25, 0.4]))
def test_the_trimmed_mean_is_of_what_is_left(values: list[list[float]], trim: float) -> None:
    found = robust_mean(Aggregation(rule="trimmed_mean", trim=trim), {"x": torch.tensor(values, dtype=torch.float64)})
    cut = int(trim * len(values))
    expected = [np.mean(sorted(column)[cut : len(values) - cut]) for column in zip(*values, strict=True)]
    assert np.allclose(found["x"].numpy(), expected)


@given(
    st.integers(5, 8).flatmap(
        lambda n: st.lists(st.lists(st.integers(-50, 50), min_size=3, max_size=3), min_size=n, max_size=n)
    ),
    st.integers(1, 2),
)
def test_krum_is_the_naive_one(values: list[list[int]], keep: int) -> None:
    n, f = len(values), 1
    points = np.array(values, dtype=np.float64)
    scores = [
        sum(sorted(float(((points[i] - points[j]) ** 2).sum()) for j in range(n) if j != i)[: n - f - 2])
        for i in range(n)
    ]
    best = sorted(range(n), key=lambda i: (round(scores[i], 6), i))[:keep]
    rule = Aggregation(rule="krum", byzantine=f, keep=keep)
    stacked = torch.tensor(values, dtype=torch.float64)
    found = robust_mean(rule, {"x": stacked[:, :1], "y": stacked[:, 1:]})
    assert np.allclose(torch.cat([found["x"], found["y"]]).numpy(), points[best].mean(0))


@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "krum"])
@pytest.mark.parametrize("name", ["fedavg", "fednova", "scaffold", "mime"])
def test_a_hostile_update_does_not_move_the_model(rule: str, name: str) -> None:
    algorithm = Robust(
        inner=load_algorithm(AlgorithmSpec(name=name)), rule=Aggregation(rule=rule, trim=0.2, byzantine=1)
    )
    server = Server(algorithm, MODEL, {}, 5)
    for number, one in enumerate(algorithm.passes):
        server.open(PhaseSetup(phase=PhaseId(0, 0, number), clients=5, samples=50))
        for client in range(5):
            far = 1e6 if client == 3 else 1.0
            values = {n: torch.full(form.shape, far) for n, form in server.forms[number].items()}
            assert values.keys() == set(one.returns)
            server.partial.fold(client, ClientUpdate(values=values), 10)
        server.absorb()
    assert server.values["model"].abs().max() <= 1.0


def test_too_few_updates_for_krum() -> None:
    robust = Robust(inner=load_algorithm(AlgorithmSpec()), rule=Aggregation(rule="krum", byzantine=1))
    with pytest.raises(UserError, match="krum of 4 updates, expected 5"):
        robust.changed({"delta": "mean"}, {"delta": torch.zeros(4, 2)}, Cohort(clients=4, population=9))


def trimmed(trim: float, clients: int) -> float:
    """Of ones and a thousand."""
    robust = Robust(inner=load_algorithm(AlgorithmSpec()), rule=Aggregation(rule="trimmed_mean", trim=trim))
    collected = torch.ones(clients, 1, dtype=torch.float64)
    collected[1] = 1000.0
    found = robust.changed({"delta": "mean"}, {"delta": collected}, Cohort(clients=clients, population=clients))
    return float(found["delta"])


@pytest.mark.parametrize(("trim", "fewest"), [(0.1, 10), (0.2, 5), (0.3, 4), (0.49, 3), (0.01, 100)])
def test_a_trimmed_mean_that_would_cut_nothing_off_is_refused(trim: float, fewest: int) -> None:
    assert Aggregation(rule="trimmed_mean", trim=trim).fewest == fewest
    assert trimmed(trim, fewest) == 1.0
    with pytest.raises(UserError, match=f"trimmed_mean of {fewest - 1} updates, expected {fewest} or more .* trim = "):
        trimmed(trim, fewest - 1)
    assert trimmed(0.0, 4) == 1003 / 4, "which says that none is to be cut off"


@pytest.mark.parametrize(("trim", "clients", "cut"), [(0.29, 100, 29), (0.07, 100, 7), (0.1, 30, 3), (0.35, 20, 7)])
def test_a_share_is_the_decimal_number_that_was_written(trim: float, clients: int, cut: int) -> None:
    values = torch.arange(clients, dtype=torch.float64).square()
    found = robust_mean(Aggregation(rule="trimmed_mean", trim=trim), {"x": values.unsqueeze(1)})["x"]
    assert float(found) == pytest.approx(float(values[cut : clients - cut].mean()), rel=1e-15)


@given(st.integers(1, 99), st.integers(1, 400))
def test_shares_of_counts_are_exact(percent: int, count: int) -> None:
    share, exactly = percent / 100, Fraction(percent * count, 100)
    assert Participation(fraction=share).needed(count) == max(1, round(exactly))
    asked = Participation(clients=count, over_select=float(f"1.{percent:02}")).asked(10 * count)
    assert asked == math.ceil(count + exactly)
    if share >= 0.5:
        assert threshold_of(count, share) == min(count, math.floor(exactly) + 1)


def test_the_number_of_steps_does_not_decide_which_updates_krum_keeps() -> None:
    """Honest clients of FedNova take from 1 to 300 steps and agree on the direction; the hostile one takes 100."""
    inner = load_algorithm(AlgorithmSpec(name="fednova"))
    algorithm = Robust(inner=inner, rule=Aggregation(rule="krum", byzantine=1, keep=1))
    server = Server(algorithm, MODEL, {}, 5)
    server.open(PhaseSetup(phase=PhaseId(0), clients=5, samples=50))
    for client, steps in enumerate([1.0, 99.0, 100.0, 101.0, 300.0]):
        direction = torch.full((4,), -0.4 if client == 2 else 0.01)
        server.partial.fold(client, ClientUpdate(values={"direction": direction, "steps": torch.tensor([steps])}), 10)
    server.absorb()
    assert torch.allclose(server.values["model"], torch.full((4,), 100 * 0.01))


class Watching(Algorithm, frozen=True):
    """Keeps who it was told took part."""

    @property
    def returns(self) -> Mapping[str, Combine]:
        return {"delta": "mean"}

    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        return ClientUpdate(values={"delta": local.descend(broadcast["model"])})

    def server(self, server: Values, combined: Values, cohort: Cohort) -> Values:
        return {"model": server["model"] + 0 * combined["delta"] + cohort.clients}


@pytest.mark.parametrize("came", [1, 3, 6])
def test_what_is_private_does_not_depend_on_how_many_came(came: int) -> None:
    algorithm = Private(inner=Watching(), privacy=Privacy(clip=0.5, noise_multiplier=1.0), expected=4)
    server = Server(algorithm, MODEL, {}, 9)
    server.open(PhaseSetup(phase=PhaseId(0), clients=6, samples=60))
    for client in range(came):
        server.partial.fold(client, ClientUpdate(values={"delta": torch.zeros(4)}), 10)
    server.absorb()
    assert server.values["model"].tolist() == [4.0] * 4


def private(name: str = "fedavg", expected: float = 4.0, noise: float = 2.0) -> Private:
    privacy = Privacy(clip=0.5, noise_multiplier=noise)
    return Private(inner=load_algorithm(AlgorithmSpec(name=name)), privacy=privacy, expected=expected)


def test_noise_has_the_deviation_that_was_promised() -> None:
    algorithm = private(expected=10.0)
    combined = {"delta": torch.zeros(200_000)}
    noisy = algorithm.changed({"delta": "weighted_mean"}, combined, Cohort(clients=3, population=9))["delta"]
    assert abs(float(noisy.std()) / (2.0 * 0.5 / 10.0) - 1) < 0.02
    assert abs(float(noisy.mean())) < 0.002
    other = algorithm.changed({"delta": "weighted_mean"}, combined, Cohort(clients=3, population=9))["delta"]
    assert not torch.equal(noisy, other)


def test_one_client_moves_the_sum_by_the_clip_at_most_whatever_its_weight() -> None:
    server = Server(private(noise=1e-9), MODEL, {}, 9)
    server.open(PhaseSetup(phase=PhaseId(0), clients=3, samples=1000))
    for client, samples in ((0, 1), (1, 998)):
        server.partial.fold(client, ClientUpdate(values={"delta": torch.full((4,), 0.25)}), samples)
    server.absorb()
    assert torch.allclose(server.values["model"], torch.full((4,), 2 * 0.25 / 4), atol=1e-6)


def test_what_is_collected_is_not_private() -> None:
    with pytest.raises(UserError, match=r"federated.algorithm: got one that collects 'delta'"):
        private().operations({"delta": "collect"})


class Sums(Algorithm, frozen=True):
    """Declares a sum."""

    @property
    def returns(self) -> Mapping[str, Combine]:
        return {"total": "sum"}


def test_a_sum_stays_a_sum() -> None:
    combined = {"total": torch.ones(3, 2)}
    robust = Robust(inner=Sums(), rule=Aggregation(rule="median"))
    cohort_ = Cohort(clients=3, population=3)
    assert robust.changed({"total": "sum"}, combined, cohort_)["total"].tolist() == [3, 3]
    noisy = private(noise=1e-9).changed({"total": "sum"}, {"total": torch.full((2,), 3.0)}, cohort_)
    assert torch.allclose(noisy["total"], torch.full((2,), 3.0))


@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "krum"])
def test_whole_numbers_have_a_robust_mean_too(rule: str) -> None:
    counts = torch.tensor([[2], [2], [2], [2], [900]])
    found = robust_mean(Aggregation(rule=rule, trim=0.2), {"counts": counts})  # pyright: ignore[reportArgumentType]
    assert found["counts"].tolist() == [2.0]


def test_running_means_are_refused() -> None:
    with pytest.raises(UserError, match="averaged as they are"):
        Server(private(), MODEL, {"norm.running_mean": torch.zeros(3)}, 9)


def test_epsilon_is_that_of_the_analytic_gaussian() -> None:
    pytest.importorskip("dp_accounting")
    privacy = Privacy(clip=1.0, noise_multiplier=1.0)
    # Balle and Wang 2018: delta = Phi(1/2 - e) - exp(e) Phi(-1/2 - e) for sensitivity 1 and deviation 1.
    found = guarantee(privacy, 1, 1, None)
    cdf = lambda x: (1 + math.erf(x / math.sqrt(2))) / 2  # noqa: E731
    delta = cdf(0.5 - found.epsilon) - math.exp(found.epsilon) * cdf(-0.5 - found.epsilon)
    assert abs(delta / 1e-5 - 1) < 0.02
    assert guarantee(privacy, 4, 1, None).epsilon == pytest.approx(
        guarantee(Privacy(clip=1.0, noise_multiplier=0.5), 1, 1, None).epsilon, rel=1e-2
    )
    assert guarantee(privacy, 5, 1, 0.1).epsilon < guarantee(privacy, 5, 1, None).epsilon / 2


# Who can take part


def test_epsilon_of_little_noise_is_large_and_soon_found() -> None:
    pytest.importorskip("dp_accounting")
    found = guarantee(Privacy(clip=1.0, noise_multiplier=0.02), 2, 1, None)
    assert 2700 < found.epsilon < 2900  # 1 / 2s^2 + 4.26 / s, for s = 0.02 / sqrt(2)


@pytest.mark.parametrize("multiplier", [1e-4, 1e-5, 1e-9])
@pytest.mark.parametrize("rate", [None, 0.1])
def test_epsilon_of_hardly_any_noise_is_that_of_concentrated_privacy(multiplier: float, rate: float | None) -> None:
    pytest.importorskip("dp_accounting")
    found = guarantee(Privacy(clip=1.0, noise_multiplier=multiplier), 10, 2, rate).epsilon
    rho = 10 * 2 / (2 * multiplier**2)  # Bun and Steinke 2016; ten rounds of two passes
    assert found == pytest.approx(rho + 2 * math.sqrt(rho * math.log(1e5)), rel=1e-12)
    with pytest.raises(UserError, match=r"privacy.noise_multiplier: got 1e-200, for which epsilon is no finite number"):
        guarantee(Privacy(clip=1.0, noise_multiplier=1e-200), 10, 2, rate)


def test_clients_drawn_each_by_themselves() -> None:
    rules, sizes = Participation(clients=20, poisson=True), np.full(100, 5)
    counts = [len(cohort(rules, sizes, 1, r)) for r in range(400)]
    assert abs(np.mean(counts) - 20) < 1
    assert abs(np.std(counts) - 4) < 0.5, "binomial"


@pytest.mark.parametrize("options", [{}, {"weighted": True}, {"poisson": True}, {"dropout": 0.5}])
def test_only_candidates_are_drawn(options: dict[str, object]) -> None:
    rules, here = Participation(clients=3, **options), np.array([2, 5, 7, 9])
    for round_ in range(20):
        drawn = cohort(rules, np.arange(1, 13), 0, round_, here)
        assert set(drawn.tolist()) <= set(here.tolist())
        assert len(drawn) >= (0 if rules.poisson else 1)
    assert len(cohort(rules, np.arange(1, 13), 0, 0, here[:0])) == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weighted": True},
        {"poisson": True},
        {"dropout": 0.5},
        {"over_select": 2.0},
        {"staleness": 2},
    ],
)
def test_clients_with_too_few_samples_are_never_drawn(options: dict[str, object]) -> None:
    rules, sizes = Participation(clients=4, min_samples=5, **options), np.arange(1, 13)
    buffer = Buffer(rules, sizes, 0) if rules.staleness else None
    seen = {c for r in range(30) for c in (cohort(rules, sizes, 0, r) if buffer is None else buffer.round(r))}
    assert seen == set(range(4, 12))


def test_who_is_available_follows_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "when.csv"
    path.write_text("from, to, client\n0, 90, 3\n1 min, 2 min, 1\n\n60 s, 180 s, 1\n")
    found = read_availability(path, 4, 60.0)
    assert [found.at_round(r).tolist() for r in range(4)] == [[3], [1, 3], [1], []]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("client, from\n1, 2\n", "got columns"),
        ("client, from, to\n", "got no line"),
        ("client, from, to\n4, 0, 1\n", "line 2: client: got '4', expected a number below 4"),
        ("client, from, to\n1, 0, 1\n1, 5, 5\n", "line 3: to: got '5', expected a time after '5'"),
        ("client, from, to\n1, 0\n", "line 2: no to"),
        ("client, from, to\n1, soon, 3\n", "line 2: from"),
        ("client, from, to\n1, nan, 3\n", "line 2: from: got 'nan', expected a finite number"),
    ],
)
def test_a_bad_line_is_named(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "when.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        read_availability(path, 4, 60.0)
