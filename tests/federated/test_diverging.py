"""A federated run whose clients' numbers are not finite ends with exit code 1, as any training does."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from isthmus.errors import Diverged, DivergedUpdate, PeerError
from isthmus.federated import Update
from isthmus.federated.admission import AdmissionRules, bounded, refusal_of
from isthmus.federated.partial import Partial
from isthmus.protocol.federated_events import Finish
from isthmus.runtime.federated.conductor import ended
from tests.federated.test_run_folders import JOB
from tests.runtime.commands import isthmus, refused


@pytest.mark.parametrize("more", ['"sp"\ntogether = 1', '"sp"\ntogether = 3', '"ours"\nexecutors = 2'])
@pytest.mark.parametrize("rate", ["1e25", "1e38"])
def test_clients_that_all_diverge_end_the_run(more: str, rate: str, tmp_path: Path) -> None:
    text = JOB.format(folder=tmp_path).replace('"sp"', more)
    (tmp_path / "job.toml").write_text(f"{text}\n[local]\nlearning_rate = {rate}\n")
    refused(isthmus("train", tmp_path / "job.toml"), 1, "round 1: 0 clients were in, expected at least 1")


@pytest.mark.parametrize(
    ("numbers", "rules", "diverged"),
    [
        ([math.nan, 1.0], AdmissionRules(), True),
        ([1e30, 1.0], AdmissionRules(), True),
        ([math.inf, 1.0], AdmissionRules(max_norm=5.0), True),
        ([8.0, 1.0], AdmissionRules(max_norm=5.0, clip=False), False),
        ([1.0, 1.0, 1.0], AdmissionRules(), False),
    ],
)
def test_it_is_known_why_an_update_is_refused(numbers: list[float], rules: AdmissionRules, diverged: bool) -> None:
    partial = Partial({"delta": "weighted_mean"}, {"delta": 2})
    partial.begin(4, 2)
    with pytest.raises(PeerError) as found:
        partial.fold(3, bounded(Update(values={"delta": torch.tensor(numbers)}), rules), 2)
    assert isinstance(found.value, DivergedUpdate) == diverged
    assert refusal_of(3, found.value).diverged == diverged


def test_how_a_run_ends_is_raised() -> None:
    with pytest.raises(Diverged, match="why"):
        ended(Finish("diverged", "why"))
    with pytest.raises(PeerError, match="why"):
        ended(Finish("lost", "why"))
    assert ended(Finish("interrupted")).outcome == "interrupted"
