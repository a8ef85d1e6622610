"""Every algorithm in every setting equals its NumPy twin: docs/correctness.md has the table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from isthmus.federated import Algorithm, LocalConfig
from isthmus.federated.admission import AdmissionRules, Privacy, Private
from isthmus.federated.robust import Aggregation, Robust
from isthmus.federated.stacked import check_alike
from isthmus.protocol.federated_participation import Participation, cohort
from tests.federated.populations import Run
from tests.federated.quadratics import BATCH, EPOCHS, ETA, TWINS, Quadratic, Setting, Twin, Vector, clients
from tests.federated.twins import SEED

Members = Callable[[int], np.ndarray]
ROUNDS, CLIENTS = 6, 6
UNIT = 1e-9
"""Sums are of multiples of 2^-36: what so many rounds make of half a unit each."""


def everybody(_: int) -> np.ndarray:
    return np.arange(CLIENTS)


def drawn(rules: Participation) -> Members:
    return lambda r: cohort(rules, clients().sizes, SEED, r)


def median(rows: Vector) -> Vector:
    return np.median(rows, axis=0)


def trimmed(rows: Vector) -> Vector:
    return np.stack([np.mean(sorted(column)[1:-1]) for column in rows.T])


def krum(rows: Vector) -> Vector:
    n, f, keep = len(rows), 1, 2
    far = [[float(((a - b) ** 2).sum()) for j, b in enumerate(rows) if j != i] for i, a in enumerate(rows)]
    scores = [sum(sorted(others)[: n - f - 2]) for others in far]
    return np.mean([rows[i] for i in sorted(range(n), key=lambda i: scores[i])[:keep]], axis=0)


RULES = {
    "median": (median, Aggregation(rule="median")),
    "trimmed mean": (trimmed, Aggregation(rule="trimmed_mean", trim=0.2)),
    "Multi-Krum": (krum, Aggregation(rule="krum", byzantine=1, keep=2)),
}
KEEPS = {"scaffold", "feddyn"}
"""Whose server adds up what clients keep."""
CLIP = 0.4


def run_of(name: str, folder: Path, setting: Setting, members: Members, **more: object) -> Run:
    _, algorithm, options = TWINS[name]
    local = LocalConfig(epochs=EPOCHS, batch_size=BATCH, learning_rate=ETA, drop_last=setting.drop_last)
    rules = AdmissionRules() if setting.clip is None else AdmissionRules(max_norm=setting.clip, clip=True)
    run = Run(
        algorithm,
        options,
        folder,
        rounds=ROUNDS,
        executors=2,
        data=clients(),
        model=Quadratic,
        local=local,
        bounds=rules,
        drawn=members,
        needed=CLIENTS,
        **more,
    )
    assert run.run().outcome == "done"
    return run


def twin_of(name: str, setting: Setting, members: Members) -> Vector:
    made: Twin = TWINS[name][0](clients(), members, setting)
    return made.run(ROUNDS)


def assert_alike(name: str, folder: Path, setting: Setting, members: Members, **more: object) -> None:
    expected = twin_of(name, setting, members)
    found = run_of(name, folder, setting, members, **more).model.numpy()
    off = float(np.abs(found - expected).max())
    assert off < UNIT, f"{name}: {found}, expected {expected}"
    assert np.abs(expected - [1.0, -2.0, 0.5]).max() > 0.01, "a twin that stays where it was says nothing"


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize(
    ("setting", "members"),
    [
        pytest.param(Setting(), everybody, id="plain"),
        pytest.param(Setting(), drawn(Participation(clients=3)), id="partial"),
        pytest.param(Setting(), drawn(Participation(clients=4, weighted=True, dropout=0.3)), id="weighted-dropout"),
        pytest.param(Setting(clip=CLIP), everybody, id="clipped"),
        pytest.param(Setting(clip=CLIP), drawn(Participation(clients=3)), id="clipped-partial"),
        pytest.param(Setting(drop_last=True), everybody, id="drop_last"),
    ],
)
def test_equals_its_twin(name: str, setting: Setting, members: Members, tmp_path: Path) -> None:
    assert_alike(name, tmp_path, setting, members)


@pytest.mark.parametrize("name", sorted(set(TWINS) - {"fednova", "fednova-momentum"}))
def test_private_where_others_come_than_expected(name: str, tmp_path: Path) -> None:
    """Sums of clipped values over the expected number, whoever came. The noise is too small to be seen here."""
    privacy = Privacy(clip=CLIP, noise_multiplier=1e-14)

    def private(inner: Algorithm) -> Algorithm:
        return Private(inner=inner, privacy=privacy, expected=CLIENTS)

    members = drawn(Participation(clients=CLIENTS, dropout=0.4))
    assert {len(members(r)) for r in range(ROUNDS)} != {CLIENTS}
    assert_alike(name, tmp_path, Setting(clip=CLIP, divided_by=CLIENTS), members, around=private)


@pytest.mark.parametrize("name", sorted(set(TWINS) - KEEPS))
@pytest.mark.parametrize("rule", RULES)
def test_under_a_robust_rule(name: str, rule: str, tmp_path: Path) -> None:
    naive, ours = RULES[rule]

    def robust(inner: Algorithm) -> Algorithm:
        return Robust(inner=inner, rule=ours)

    assert_alike(name, tmp_path, Setting(rule=naive), everybody, around=robust)


@pytest.mark.parametrize("name", sorted(KEEPS))
def test_clipped_clients_meet_the_optimum(name: str, tmp_path: Path) -> None:
    """Of three quadratics, sum h a / sum h: the states add up to what the server has, so that nothing stays behind."""
    data = clients((1, 1, 1))
    h, a = (torch.stack([c[column][0] for c in data.clients]) for column in ("h", "a"))
    optimum = (h * a).sum(0) / h.sum(0)
    run = Run(
        name,
        {"alpha": 0.5} if name == "feddyn" else {},
        tmp_path,
        rounds=120,
        data=data,
        model=Quadratic,
        local=LocalConfig(epochs=4, batch_size=4, learning_rate=0.5),
        bounds=AdmissionRules(max_norm=1.0, clip=True),
        drawn=lambda _: np.arange(3),
        needed=3,
    )
    assert run.run().outcome == "done"
    assert (run.model - optimum).abs().max() < 1e-9


@pytest.mark.parametrize("name", ["scaffold", "feddyn", "mime", "fednova"])
def test_clipped_clients_trained_together_agree_with_one_by_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, models, groups = clients((6, 6, 6, 9, 9, 9)), [], []
    check = "isthmus.federated.client_trainer.check_alike"
    monkeypatch.setattr(check, lambda alone, several: groups.append(several) or check_alike(alone, several))
    for together in (1, 4):
        run = Run(
            name,
            {},
            tmp_path / f"{together}",
            rounds=3,
            clients_per_vmap=together,
            data=data,
            model=Quadratic,
            local=LocalConfig(epochs=EPOCHS, batch_size=BATCH, learning_rate=ETA, drop_last=True),
            bounds=AdmissionRules(max_norm=CLIP, clip=True),
            drawn=everybody,
            needed=CLIENTS,
        )
        assert run.run().outcome == "done"
        assert bool(groups) == (together > 1)
        models.append(run.model)
    assert torch.allclose(models[1], models[0], rtol=1e-9, atol=1e-10)


class Weighted(Quadratic):
    """Its mean is its own: that of a batch is another than the mean of its parts'."""

    def forward(self, h: Tensor, a: Tensor, labels: Tensor) -> Tensor:
        return (h * (self.w - a).square()).sum() / h.sum()


class Counted(Quadratic):
    def forward(self, h: Tensor, a: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": (h * (self.w - a).square()).sum(), "count": h.sum()}


@pytest.mark.parametrize("model", [Weighted, Counted])
def test_clients_trained_together_have_the_micro_batches_of_one_by_one(model: type[Quadratic], tmp_path: Path) -> None:
    def trained(micro_batches: int, together: int) -> Tensor:
        run = Run(
            "fedavg",
            {},
            tmp_path / f"{micro_batches}-{together}",
            rounds=2,
            clients_per_vmap=together,
            data=clients((6, 6, 6, 9, 9, 9)),
            model=model,
            local=LocalConfig(epochs=EPOCHS, batch_size=BATCH, learning_rate=ETA, micro_batches=micro_batches),
            drawn=everybody,
            needed=CLIENTS,
        )
        assert run.run().outcome == "done"
        return run.model

    alone = trained(2, 1)
    assert torch.allclose(trained(2, 4), alone, rtol=1e-9, atol=1e-10)
    assert torch.allclose(trained(1, 4), alone, rtol=1e-9, atol=1e-10) == (model is Counted)
