"""Robust means, differential privacy, and who can take part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.data.availability import read_availability
from isthmus.errors import UserError
from isthmus.federated import Algorithm, AlgorithmSpec, ClientUpdate, Cohort, Combine, Server, load_algorithm
from isthmus.federated.privacy import Privacy, Private, guarantee
from isthmus.federated.robust import Aggregation, Robust, robust_mean
from isthmus.protocol.federated_messages import PhaseId, PhaseSetup
from isthmus.protocol.federated_participation import Participation, cohort

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
    server = Server(algorithm, MODEL, torch.empty(0), 5)
    for number, one in enumerate(algorithm.passes):
        server.open(PhaseSetup(phase=PhaseId(0, 0, number), clients=5, samples=50))
        for client in range(5):
            far = 1e6 if client == 3 else 1.0
            values = {n: torch.full(form.shape, far) for n, form in server.forms[number].items()}
            assert values.keys() == set(one.returns)
            server.fold(client, ClientUpdate(values=values), 10)
        server.absorb()
    assert server.values["model"].abs().max() <= 1.0


def test_too_few_updates_for_krum() -> None:
    robust = Robust(inner=load_algorithm(AlgorithmSpec()), rule=Aggregation(rule="krum", byzantine=1))
    with pytest.raises(UserError, match="krum of 4 updates, expected 5"):
        robust.changed({"delta": "mean"}, {"delta": torch.zeros(4, 2)}, Cohort(clients=4, population=9))


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
    server = Server(private(noise=1e-9), MODEL, torch.empty(0), 9)
    server.open(PhaseSetup(phase=PhaseId(0), clients=3, samples=1000))
    for client, samples in ((0, 1), (1, 998)):
        server.fold(client, ClientUpdate(values={"delta": torch.full((4,), 0.25)}), samples)
    server.absorb()
    assert torch.allclose(server.values["model"], torch.full((4,), 2 * 0.25 / 4), atol=1e-6)


def test_what_is_collected_is_not_private() -> None:
    with pytest.raises(UserError, match="privacy: the algorithm collects 'delta'"):
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
    with pytest.raises(UserError, match="keeps running means"):
        Server(private(), MODEL, torch.zeros(3), 9)


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


def test_clients_drawn_each_by_themselves() -> None:
    rules, sizes = Participation(clients=20, poisson=True), np.full(100, 5)
    counts = [len(cohort(rules, sizes, 1, r)) for r in range(400)]
    assert abs(np.mean(counts) - 20) < 1
    assert abs(np.std(counts) - 4) < 0.5, "binomial"
    assert all(len(cohort(Participation(clients=1, poisson=True), sizes, 1, r)) for r in range(50))


@pytest.mark.parametrize("options", [{}, {"weighted": True}, {"poisson": True}, {"dropout": 0.5}])
def test_only_candidates_are_drawn(options: dict[str, object]) -> None:
    rules, here = Participation(clients=3, **options), np.array([2, 5, 7, 9])
    for round_ in range(20):
        drawn = cohort(rules, np.arange(1, 13), 0, round_, here)
        assert set(drawn.tolist()) <= set(here.tolist())
        assert len(drawn) >= 1
    assert len(cohort(rules, np.arange(1, 13), 0, 0, here[:0])) == 0


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
        ("client, from, to\n1, nan, 3\n", "line 2: to: got '3', expected a time after 'nan'"),
    ],
)
def test_a_bad_line_is_named(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "when.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        read_availability(path, 4, 60.0)
