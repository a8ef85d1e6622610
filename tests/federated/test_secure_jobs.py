"""Jobs with masked updates: what does not go together is refused with the reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from isthmus.errors import UserError
from isthmus.federated.algorithms import AlgorithmSpec
from isthmus.federated.job import load_federated_job
from isthmus.federated.local import LocalConfig
from isthmus.federated.robust import Aggregation
from isthmus.federated.secure.rules import check_sizes
from isthmus.federated.task_spec import TaskSpec
from isthmus.models import ModelSpec
from tests.federated.sites import write_job
from tests.runtime.commands import edited

AGGREGATION = """[federated.aggregation]
secure = true
most_samples = 64

[federated.participation]
fraction = 1.0
minimum = 2

[runtime]"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "secure = true",
            'secure = true\nrule = "median"',
            "federated.aggregation.rule: got 'median' .* every update by itself",
        ),
        ("most_samples = 64", "", "federated.aggregation.most_samples: missing, expected the most samples of a site"),
        (
            "minimum = 2",
            "minimum = 1",
            "federated.participation.minimum: got 1 .* the sum of one update is that update",
        ),
        ("minimum = 2", "minimum = 2\nstaleness = 2", "federated.participation.staleness: got 2 .* of one round only"),
        ("minimum = 2", "minimum = 2\nmin_samples = 2", "federated.participation.min_samples: got 2 .* nobody knows"),
        ("minimum = 2", "minimum = 2\nweighted = true", "federated.participation.weighted: got true .* nobody knows"),
        (
            "[runtime]",
            "[federated.admission]\nmax_norm = 3.0\n\n[runtime]",
            "federated.admission.max_norm: got 3 .* without a proof",
        ),
        ("most_samples = 64", 'most_samples = 64\nwait = "0 s"', "federated.aggregation.wait: got '0 s'"),
        ("most_samples = 64", "most_samples = 64\nthreshold = 0.3", "federated.aggregation.threshold: .* got 0.3"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(old: str, new: str, words: str, tmp_path: Path) -> None:
    job_file = edited(write_job(tmp_path, ("a", "b")), ("[runtime]", AGGREGATION))
    load_federated_job(job_file)
    edited(job_file, (old, new))
    with pytest.raises(UserError, match=words):
        load_federated_job(job_file)


def test_clipping_goes_with_masks_for_sites_clip_themselves(tmp_path: Path) -> None:
    clipped = "[federated.admission]\nmax_norm = 3.0\nclip = true\n\n[runtime]"
    load_federated_job(edited(write_job(tmp_path, ("a", "b")), ("[runtime]", AGGREGATION), ("[runtime]", clipped)))


def test_more_samples_than_the_job_says_are_refused_at_both_ends() -> None:
    with pytest.raises(UserError, match=r"aggregation\.most_samples: got 5, expected at least 9"):
        check_sizes(Aggregation(most_samples=5), np.array([3, 9]))
    with pytest.raises(UserError, match=r"this site has 9 samples, the coordinator counts on at most 5"):
        _task(Aggregation(most_samples=5)).check_samples(9)


def _task(aggregation: Aggregation) -> TaskSpec:

    return TaskSpec(
        job="clinics",
        run="0" * 32,
        algorithm=AlgorithmSpec(name="fedavg"),
        model=ModelSpec(name="mlp"),
        local=LocalConfig(),
        seed=0,
        client=0,
        aggregation=aggregation,
    )
