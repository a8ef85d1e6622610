"""What is on disk: committed rounds, and histories."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from isthmus.errors import UserError
from isthmus.federated import Commits, RunIdentity
from isthmus.federated.admission import AdmissionRules, Privacy
from isthmus.federated.evaluation import RoundHistory, RoundLine
from isthmus.federated.robust import Aggregation
from isthmus.programs.open_phase import RoundRecord
from isthmus.protocol.federated_messages import ClientTime

IDENTITY = RunIdentity(algorithm="fedavg", options={}, model="m", local="l", numbers=3, data="abc", seed=0, clients=5)


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
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


def test_one_tensor_under_two_names_is_committed_twice(tmp_path: Path) -> None:
    commits, model = Commits(tmp_path, IDENTITY), torch.ones(3)
    commits.save(0, {"model": model, "before": model, "part": model[1:]}, None)
    assert (found := commits.newest()) is not None
    assert [found[1][name].tolist() for name in ("model", "before", "part")] == [[1, 1, 1], [1, 1, 1], [1, 1]]


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


def test_another_combination_is_named_by_its_key(tmp_path: Path) -> None:
    def identity(noise: float) -> RunIdentity:
        privacy = Privacy(clip=1.0, noise_multiplier=noise)
        combining = msgspec.json.encode((Aggregation(), privacy, AdmissionRules())).decode()
        return msgspec.structs.replace(IDENTITY, combining=combining)

    Commits(tmp_path, identity(0.8)).save(0, {"model": torch.ones(3)}, None)
    with pytest.raises(UserError, match=r"another job: privacy\.noise_multiplier was 0\.8, is now 0\.4$"):
        Commits(tmp_path, identity(0.4)).newest()


def test_a_history_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    line = RoundLine(record=RoundRecord(round=0, attempt=0, trained={}), seconds=1.0)
    with pytest.raises(UserError, match=r"history .*rounds.jsonl: cannot be written: "):
        RoundHistory(tmp_path / "gone" / "rounds.jsonl").add(line)


def test_a_history_forgets_what_is_made_again_and_half_lines(tmp_path: Path) -> None:
    history = RoundHistory(tmp_path / "rounds.jsonl")
    for number in range(4):
        trained = {"e0": (ClientTime(number, 3, 0.5), ClientTime(9, 3, 0.25))}
        history.add(RoundLine(record=RoundRecord(round=number, attempt=0, trained=trained), seconds=1.0))
    with (tmp_path / "rounds.jsonl").open("ab") as file:
        file.write(b'{"record": {"ro')
    said: list[str] = []
    history.keep(2, said.append)
    assert said == [f"{tmp_path}/rounds.jsonl: line 5 is the last one and is not whole: passed over"]
    assert [line.record.round for line in history.lines()] == [0, 1]
    assert history.lines()[1].makespan_s == 0.75


def test_a_history_damaged_in_its_middle_says_so_once(tmp_path: Path) -> None:
    history = RoundHistory(tmp_path / "rounds.jsonl")
    for number in range(6):
        history.add(RoundLine(record=RoundRecord(round=number, attempt=0, trained={}), seconds=1.0))
    lines = (tmp_path / "rounds.jsonl").read_bytes().splitlines()
    damaged = [lines[0], b"\xff" + lines[1], b"", lines[3][:9], lines[4], b"[]"]
    (tmp_path / "rounds.jsonl").write_bytes(b"\n".join(damaged))
    said: list[str] = []
    history.keep(5, said.append)
    assert said == [f"{tmp_path}/rounds.jsonl: lines 2 to 4, 6 cannot be read: passed over"]
    assert [line.record.round for line in history.lines(said.append)] == [0, 4] and len(said) == 1
