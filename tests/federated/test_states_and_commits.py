"""What is on disk: clients' states by round, committed rounds, and histories."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from isthmus.errors import UserError
from isthmus.federated import Commits, Identity, StateStore
from isthmus.federated.history import History, RoundLine
from isthmus.federated.server import uncommitted
from isthmus.protocol.federated_events import Record, Timed

IDENTITY = Identity(
    algorithm="fedavg", options={}, model="m", local="l", numbers=3, data="abc", seed=0, clients=5
)  # fmt: skip


def state(value: float) -> dict[str, torch.Tensor]:
    return {"control": torch.full((3,), value)}


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*.safetensors"))


def test_a_round_that_is_forgotten_leaves_the_one_before(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    store.write(7, 0, state(1.0))
    store.write(7, 3, state(2.0))
    assert store.read(7, 3)["control"].tolist() == [2, 2, 2]
    store.drop([(7, 3)])
    assert store.read(7, 0)["control"].tolist() == [1, 1, 1]
    with pytest.raises(UserError, match="missing"):
        store.read(7, 3)


def test_no_folder_is_large(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    folders = [store.path(client, 0).parent for client in range(20_000)]
    counts = np.unique([str(f) for f in folders], return_counts=True)[1]
    assert counts.max() <= 20
    assert len(counts) > 4000


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None)
@given(
    kept=st.dictionaries(st.integers(0, 5), st.integers(-1, 4)),
    left=st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5))),
)
def test_after_a_crash_only_committed_states_stay(
    tmp_path: Path, kept: dict[int, int], left: set[tuple[int, int]]
) -> None:
    store = StateStore(tmp_path / str(abs(hash((frozenset(kept.items()), frozenset(left))))))
    committed = {(client, round_) for client, round_ in kept.items() if round_ >= 0}
    for client, round_ in left | committed:
        store.write(client, round_, state(round_))
    rounds = np.full(6, -1, dtype=np.int32)
    for client, round_ in kept.items():
        rounds[client] = round_
    store.sweep(uncommitted(rounds, lambda r: np.arange(6), 5))
    assert {tuple(map(int, name.split(".")[0].split("-"))) for name in files(store.path(0, 0).parents[1])} == committed


@pytest.mark.parametrize("numbers", [3, 600_000])
def test_a_file_is_the_librarys_and_may_be_written_over(numbers: int, tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    draws = torch.Generator().manual_seed(0)
    first = {"a": torch.randn(numbers, generator=draws), "b": torch.arange(7).reshape(7, 1)}
    then = {"c": torch.randn(2, numbers, generator=draws, dtype=torch.float64).T, "d": torch.tensor(True)}
    store.write(1, 0, first)
    for name, value in load_file(store.path(1, 0)).items():
        assert torch.equal(value, first[name])
    store.retire([(1, 0)])
    store.write(2, 1, then)
    assert files(tmp_path) == ["2-000001.safetensors"]
    store.write(2, 2, first)
    store.retire([(2, 1)])
    store.expect(2, 2)
    store.write(3, 3, {"a": torch.ones(1)})  # a smaller one over a larger
    for name, value in store.read(2, 2).items():
        assert torch.equal(value, first[name])
    assert store.read(3, 3)["a"].tolist() == [1]
    assert files(tmp_path) == ["2-000002.safetensors", "3-000003.safetensors"]


def test_a_state_of_numbers_that_no_file_holds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"state 'z' of client 1: got torch.complex64, expected plain numbers"):
        StateStore(tmp_path).write(1, 0, {"z": torch.zeros(2, dtype=torch.complex64)})


def test_a_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    bad: dict[str, torch.Tensor] = {"steps": 3}  # pyright: ignore[reportAssignmentType]
    with pytest.raises(UserError, match=r"state 'steps' of client 2: got int, expected a tensor"):
        StateStore(tmp_path).write(2, 0, bad)


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    store.write(1, 0, state(1.0))
    path = store.path(1, 0)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match="cannot be read"):
        store.read(1, 0)


def test_the_newest_commit_comes_back(tmp_path: Path) -> None:
    commits = Commits(tmp_path, IDENTITY)
    assert commits.newest() is None
    rounds = np.arange(5, dtype=np.int32)
    for number in range(4):
        commits.save(number, {"model": torch.full((3,), float(number))}, rounds)
    found = commits.newest()
    assert found is not None
    assert (found[0], found[1]["model"].tolist()) == (3, [3, 3, 3])
    assert found[2] is not None
    assert found[2].tolist() == [0, 1, 2, 3, 4]
    assert len(files(tmp_path)) == 2


def test_a_commit_that_was_not_finished_does_not_count(tmp_path: Path) -> None:
    commits = Commits(tmp_path, IDENTITY)
    commits.save(0, {"model": torch.ones(3)}, None)
    (tmp_path / ".round-000001.safetensors").write_bytes(b"half")
    found = commits.newest()
    assert found is not None
    assert found[0] == 0


@pytest.mark.parametrize("field", ["algorithm", "data", "seed", "clients"])
def test_the_folder_of_another_job_is_refused(field: str, tmp_path: Path) -> None:
    Commits(tmp_path, IDENTITY).save(0, {"model": torch.ones(3)}, None)
    other = msgspec.structs.replace(IDENTITY, **{field: 99 if field in ("seed", "clients") else "other"})
    with pytest.raises(UserError, match=f"is of another job: {field} was"):
        Commits(tmp_path, other).newest()


def test_a_history_forgets_what_is_made_again_and_half_lines(tmp_path: Path) -> None:
    history = History(tmp_path / "rounds.jsonl")
    for number in range(4):
        trained = {"e0": (Timed(number, 3, 0.5), Timed(9, 3, 0.25))}
        history.add(RoundLine(record=Record(round=number, attempt=0, trained=trained), seconds=1.0))
    with (tmp_path / "rounds.jsonl").open("ab") as file:
        file.write(b'{"record": {"ro')
    history.keep(2)
    assert [line.record.round for line in history.lines()] == [0, 1]
    assert history.lines()[1].makespan_s == 0.75
