"""What the coordinator has of a model's variables, and when it builds the model for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isthmus.job import Prepared, prepare
from isthmus.job.first_weights import FirstWeights
from isthmus.runtime.coordinator import parameter_store as module
from isthmus.runtime.coordinator.parameter_store import ParameterStore
from isthmus.training.checkpoint import CheckpointWriter, Manifest
from isthmus.training.stored import StoredTensor, in_memory
from isthmus.training.weights import initial_weights

from .jobs import DIGITS, job_of


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return prepare(job_of("mlp", {"layers": 2}, DIGITS, steps=4))


def test_the_model_is_built_when_something_of_it_is_wanted(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    first = initial_weights(prepared.build, prepared.captured, prepared.job.training.seed)
    built: list[int] = []

    def counted(*_: object) -> FirstWeights:
        built.append(1)
        return FirstWeights({**first})

    monkeypatch.setattr(module, "first_weights", counted)
    names = frozenset(first)
    some = sorted(names)[0]
    values = ParameterStore(prepared, names)
    found = values.of(names, (f"optimizer.{some}.",), replica=0, without=names)
    assert not found and not built, "what devices hold is enough"
    whole = values.of(names, (), replica=0, without=())
    assert whole.keys() == names and len(built) == 1
    assert not values.rest and len(built) == 1, "stages hold all of it"
    values.begin()
    assert torch.equal(in_memory(values.of(names, (), replica=0, without=())[some]), first[some])


def test_a_checkpoint_is_read_on_top_of_the_models_own(prepared: Prepared, tmp_path: Path) -> None:
    first = initial_weights(prepared.build, prepared.captured, prepared.job.training.seed)
    saved = {name: value + 1 for name, value in first.items()}
    writer = CheckpointWriter(tmp_path)
    writer.write(3, "stage-0", saved)
    values = ParameterStore(prepared, frozenset(first))
    values.load(writer.commit(Manifest(step=3, seed=0, batch=8)))
    found = values.of(first.keys(), (), replica=0, without=())
    assert all(isinstance(value, StoredTensor) for value in found.values()), "none of it is in memory"
    assert found.keys() == saved.keys()
    assert all(torch.equal(in_memory(found[name]), value) for name, value in saved.items())


def test_a_checkpoint_stays_as_long_as_what_training_does_not_change_is_read_from_it(
    prepared: Prepared, tmp_path: Path
) -> None:
    first = initial_weights(prepared.build, prepared.captured, prepared.job.training.seed)
    writer = CheckpointWriter(tmp_path, keep=1)
    some = sorted(first)[0]
    for written in (frozenset(first), frozenset(first) - {some}):
        writer.write(3, "stage-0", first)
        checkpoint, values = writer.commit(Manifest(step=3, seed=0, batch=8)), ParameterStore(prepared, written)
        values.load(checkpoint)
        assert values.reads(checkpoint) == (some not in written)
        writer.in_use = checkpoint.resolve() if values.reads(checkpoint) else None
        writer.write(4, "stage-0", first)
        later = writer.commit(Manifest(step=4, seed=0, batch=8))
        assert later.exists() and checkpoint.exists() == (some not in written)
