"""Mode 'decoupled' of `isthmus.sync`: workers that never wait end with one model, which the record gives again."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from isthmus.errors import UserError
from isthmus.plans import OuterOptimizer
from isthmus.runtime.decoupled.merged_run import merges_file
from isthmus.sync import Decoupled, Options, attach
from isthmus.training.decoupled import MergedFragments, change_codec, delta_codec, flat_fragments
from isthmus_testing.decoupled_replay import ReplicasTogether, replay_together
from tests.sync.decoupled_cases import RULES, SAMPLES, Training
from tests.sync.torchrun import environment

from .small import net, sgd

NAMES = [f"worker {rank}" for rank in range(len(SAMPLES))]


def models(folder: Path, *arguments: str) -> tuple[dict[int, dict[str, Tensor]], str]:
    """Of the workers that came to the end, and what the merger said."""
    cases = Path(__file__).parent / "decoupled_cases.py"
    done = subprocess.run(
        [sys.executable, str(cases), str(folder), *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return {int(path.stem): load_file(path) for path in folder.glob("*.safetensors")}, done.stderr


def replayed(folder: Path, spoils: str = "") -> MergedFragments:
    """From the record, in this process."""
    start = flat_fragments(Training(0, seed=0).model, RULES.fragments)
    merged = MergedFragments(start, OuterOptimizer(rate=RULES.rate, momentum=RULES.momentum), change_codec(RULES))
    together = ReplicasTogether(
        merged, delta_codec(RULES), lambda name: Training(NAMES.index(name), seed=0, spoils=name == spoils)
    )
    merges = [line.merge for line in merges_file(folder).lines()]
    assert len(merges) > 1
    return replay_together(together, NAMES, sum(SAMPLES), merges)


def same(model: dict[str, Tensor], merged: MergedFragments) -> bool:
    own = Training(0, seed=0).model
    own.load_state_dict(model)
    return all(torch.equal(a, b) for a, b in zip(flat_fragments(own, RULES.fragments), merged.known, strict=True))


def test_all_workers_end_with_the_bits_that_the_record_gives(tmp_path: Path) -> None:
    found, _ = models(tmp_path)
    merged = replayed(tmp_path)
    assert sorted(found) == [0, 1, 2]
    assert all(same(model, merged) for model in found.values())


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 2])
def test_the_others_end_where_one_is_killed_and_one_is_stopped(tmp_path: Path, killed: int) -> None:
    """Worker 0 too, which started the merger and has torch's store."""
    found, _ = models(tmp_path, "kill", str(killed))
    merged = replayed(tmp_path)
    assert sorted(found) == sorted({0, 1, 2} - {killed})
    assert all(same(model, merged) for model in found.values())


@pytest.mark.long
def test_one_whose_changes_make_the_weights_too_large_is_left_out(tmp_path: Path) -> None:
    """Each change is admissible. The others end with one model, of which the record says all."""
    found, said = models(tmp_path, "spoil", "2")
    merged = replayed(tmp_path, "worker 2")
    assert sorted(found) == [0, 1]
    assert all(same(model, merged) for model in found.values())
    found = re.findall(r"worker 2 is (?:lost|left out): its change of fragment \d has a root mean square of .*", said)
    assert len(found) == 1, said
    lines = merges_file(tmp_path).lines()
    last = [c.replica for fragment in lines[-1].merge.fragments for c in fragment.contributions]
    assert "worker 2" not in last and last, "it is in no merge since"
    assert all(values.square().mean().sqrt() < 20 for values in merged.known)


@pytest.mark.usefixtures("alone")
def test_what_the_mode_cannot_do_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    with pytest.raises(UserError, match=r"model: got running statistics .* with sync.mode 'decoupled'"):
        attach(model, sgd(model), mode="decoupled")
    model = net().double()
    with pytest.raises(UserError, match=r"got parameters of torch\.float64 with .*, expected float32"):
        attach(model, sgd(model), mode="decoupled")
    model = net()
    with pytest.raises(UserError, match="fragments: got 4, expected at most the model's 2 layers"):
        attach(model, sgd(model), mode="decoupled")
    with pytest.raises(UserError, match=r"'weight': got 0\.5 with mode 'decoupled', expected the samples of a step"):
        attach(model, sgd(model), mode="decoupled", options=Options(weight=0.5))


def test_options_are_those_of_a_job_file() -> None:
    with pytest.raises(UserError, match=r"'decoupled': .*quorum"):
        Options(decoupled=Decoupled(quorum=0))
    with pytest.raises(UserError, match="replicas: got 'regions', which is for job files"):
        Options(decoupled=Decoupled(replicas="regions"))
