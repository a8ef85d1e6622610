"""Metrics of federated runs are plain torch's on whole sets, of the server's samples and of each client's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import isthmus
from isthmus.data import DataSpec
from isthmus.errors import UserError
from isthmus.federated.evaluation import Evaluation, client_figures
from tests.metrics.plain import Classifier, confidence, measured, samples, top_two

SIZES = (40, 7, 1, 23, 300)
METRICS = ["accuracy", "perplexity", top_two, confidence]


def federated(folder: Path, **more: object) -> isthmus.Run:
    torch.manual_seed(3)
    given: dict[str, object] = {
        "model": Classifier(),
        "loss": F.cross_entropy,
        "clients": [samples(size, seed) for seed, size in enumerate(SIZES)],
        "test": samples(301, 99),
        "rounds": 2,
        "metrics": METRICS,
        "run": folder,
        "overrides": {"runtime.executors": 1, "learning_rate": 0.5, "training.eval_clients": 5},
    }
    return isthmus.federate(**(given | more))  # pyright: ignore[reportArgumentType]


def test_they_are_plain_torchs_on_held_out_samples_and_on_each_clients_own(tmp_path: Path) -> None:
    result = federated(tmp_path / "run")
    found, model = result.evaluation, result.model
    assert found is not None
    expected = measured(model, samples(301, 99))
    assert {"loss": found.loss, **found.metrics} == pytest.approx(expected, rel=1e-5)
    each = [measured(model, samples(size, seed)) for seed, size in enumerate(SIZES)]
    for name in expected:
        figures, values = found.clients[name], np.array([one[name] for one in each])
        assert list(figures.each.values()) == pytest.approx(values.tolist(), rel=1e-5)
        assert (figures.clients, figures.mean) == (5, pytest.approx(values.mean(), rel=1e-5))
        worst = values.max() if name in ("loss", "perplexity") else values.min()
        assert figures.worst_decile == pytest.approx(worst, rel=1e-5)
        assert figures.deviation == pytest.approx(values.std(), rel=1e-4, abs=1e-9)
    kept = (tmp_path / "run" / "rounds.jsonl").read_text()
    assert '"each":{"0":' in kept and '"top_two"' in kept
    assert (tmp_path / "run" / "metrics.png").is_file()


def test_a_callback_gets_them(tmp_path: Path) -> None:
    seen: list[isthmus.Evaluated] = []

    class Seen(isthmus.Callback):
        def evaluation(self, evaluated: isthmus.Evaluated) -> None:
            seen.append(evaluated)

    result = federated(tmp_path / "run", callbacks=[Seen()])
    assert result.evaluation is not None and len(seen) == 2
    assert seen[-1].metrics == result.evaluation.metrics
    assert seen[-1].clients == {name: f.mean for name, f in result.evaluation.clients.items()}


def test_the_worst_tenth_is_of_the_highest_where_low_is_good() -> None:
    each = {str(n): {"loss": float(n), "accuracy": n / 20} for n in range(20)} | {"20": {"accuracy": None}}
    found = client_figures(each, {"loss"})
    assert found["loss"].worst_decile == 18.5 and found["accuracy"].worst_decile == 0.5 / 20
    assert found["accuracy"].clients == 20


def step(outputs: object, batch: object) -> torch.Tensor:
    return torch.ones(())


def bad_form(outputs: object, batch: object) -> object:
    return "much"


def bad_shape(outputs: object, batch: object) -> object:
    return torch.ones(3), torch.ones(())


def fails(outputs: object, batch: object) -> object:
    raise KeyError("no such column")


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (["acuracy"], "unknown metric 'acuracy': did you mean 'accuracy'?"),
        (["no_such_module:f"], "no_such_module"),
        (["tests.metrics.plain:CLASSES"], "metrics: tests.metrics.plain:CLASSES: got 5, expected a function"),
        ([3], "metrics: got 3, expected a name or a function"),
        ("accuracy", "metrics: got 'accuracy', expected a list"),
        ([step], "metrics: got 'step', expected another name: trackers have a column of this one"),
        (["accuracy", "accuracy"], "metrics: got 'accuracy' twice"),
        ([bad_form], r"metrics: bad_form returned str, expected \(sum, count\)"),
        ([bad_shape], r"metrics: bad_shape returned \[3\] of float32, a scalar, expected \(sum, count\)"),
        ([fails], "metrics: fails raised KeyError: 'no such column'"),
    ],
)
def test_what_is_no_metric_is_refused_before_the_run(metrics: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        federated(tmp_path / "run", metrics=metrics)
    assert not (tmp_path / "run" / "rounds.jsonl").exists()


def test_what_has_no_classes_has_no_accuracy(tmp_path: Path) -> None:
    regression = [{"x": torch.randn(9, 6), "target": torch.randn(9, 5)}]
    with pytest.raises(UserError, match=r"metrics: accuracy: got logits \[2, 5\] .* and labels \[2, 5\] of float32"):
        federated(tmp_path / "run", loss=F.mse_loss, clients=regression, test=regression[0], metrics=["accuracy"])
    with pytest.raises(UserError, match=r"metrics: got \['accuracy'\], but nothing is evaluated"):
        federated(tmp_path / "run", clients=[samples(9)], test=None, metrics=["accuracy"], overrides={})
    with pytest.raises(UserError, match=r"metrics: got .* with training.eval_every = 0"):
        federated(tmp_path / "run", metrics=["accuracy"], overrides={"training.eval_every": 0})


def test_names_that_sites_choose_cannot_steer_a_terminal() -> None:
    assert list(client_figures({"oslo": {"accu\x1b[2Jracy\n": 0.5}}, set())) == ["accu [2Jracy "]


@pytest.mark.parametrize("values", [[1e200, 1.0], [1e308, 1.5e308, 1.7e308], [-1.7e308, 1.7e308], [0.0, 0.0], [5e-324]])
def test_figures_of_any_size_can_be_read_again(values: list[float]) -> None:
    found = client_figures({str(number): {"perplexity": value} for number, value in enumerate(values)}, {"perplexity"})
    written = Evaluation(loss=None, clients=found)
    assert msgspec.json.decode(msgspec.json.encode(written), type=Evaluation) == written
    assert found["perplexity"].worst_decile == max(values)


def test_names_of_clients_are_in_the_run_s_folder(tmp_path: Path) -> None:
    given = {"c00": samples(20), "c01": samples(20, 1)}
    overrides = {"runtime.executors": 1, "training.eval_clients": 2}
    named = isthmus.federate(
        model=Classifier(), loss=F.cross_entropy, clients=given, rounds=1, run=tmp_path / "a", overrides=overrides
    )
    assert named.client_names == list(given) and named.evaluation is not None
    assert list(named.evaluation.clients["loss"].each) == ["0", "1"]
    spec = write_clients(tmp_path / "clients", given)
    assert isinstance(named.job, isthmus.FederatedJob)
    job = msgspec.structs.replace(named.job, data=spec, model=named.job.model).altered(partition=None)
    assert isthmus.federate(job, run=tmp_path / "b", overrides=overrides).client_names == list(given)
    without = isthmus.federate(
        model=Classifier(),
        loss=F.cross_entropy,
        clients=list(given.values()),
        rounds=1,
        run=tmp_path / "c",
        overrides=overrides,
    )
    assert without.client_names == []


def write_clients(folder: Path, given: dict[str, dict[str, torch.Tensor]]) -> DataSpec:
    folder.mkdir()
    for name, columns in given.items():
        arrays: dict[str, Any] = {key: column.numpy() for key, column in columns.items()}
        np.savez(folder / f"{name}.npz", **arrays)
    return DataSpec(kind="clients", options={"path": str(folder), "kind": "npz", "options": {"holdout": 0}})
