"""Nothing is held out where nothing is evaluated."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.data import DataSpec
from isthmus.data.partition import PartitionSpec
from isthmus.federated.job import FederatedConfig, FederatedJob, client_data
from isthmus.federated.local import FederatedTraining
from isthmus.federated.task_spec import load_site
from isthmus.job import Job, TrainingConfig
from isthmus.job.prepared import described_here
from isthmus.models import ModelSpec

SITE = """
job = "clinics"
{metrics}

[algorithm]
name = "fedavg"

[model]
name = "mlp"

[data]
kind = "digits"
"""


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (DataSpec(kind="digits"), {"holdout": 0.0}),
        (DataSpec(kind="npz", options={"path": "a", "holdout": 0.2}), {"path": "a", "holdout": 0.2}),
        (DataSpec(kind="npz", options={"path": "a", "heldout_path": "b"}), {"path": "a", "heldout_path": "b"}),
        (DataSpec(kind="text", options={"files": "a"}, heldout="b"), {"files": "a"}),
        (DataSpec(kind="package.module:load", options={"a": 1}), {"a": 1}),
        (DataSpec(kind="clients", options={"path": "a"}), {"path": "a", "options": {"holdout": 0.0}}),
    ],
)
def test_options_say_otherwise(spec: DataSpec, expected: dict[str, object]) -> None:
    assert spec.training_alone().options == expected


@pytest.mark.parametrize(("every", "count"), [(0, 1797), (5, 1617)])
def test_of_jobs(every: int, count: int) -> None:
    model, data = ModelSpec(name="mlp"), DataSpec(kind="digits")
    assert (
        described_here(Job(name="j", model=model, data=data, training=TrainingConfig(eval_every=every))).train == count
    )
    training, parts = FederatedTraining(eval_every=every), PartitionSpec(clients=3)
    federated = FederatedJob(
        name="f", model=model, data=data, federated=FederatedConfig(partition=parts), training=training
    )
    assert client_data(federated).sizes.sum() == count


@pytest.mark.parametrize(("metrics", "options"), [("", {"holdout": 0.0}), ('metrics = ["accuracy"]', {})])
def test_of_sites(metrics: str, options: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(SITE.format(metrics=metrics))
    assert load_site(tmp_path / "site.toml").data.options == options
