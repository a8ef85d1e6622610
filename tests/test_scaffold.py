"""First files run as they are written."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from isthmus.api.job_overrides import kind_of_file
from isthmus.errors import UserError
from isthmus.federated.job import load_federated_job
from isthmus.federated.task_spec import load_site
from isthmus.job import fleet_of, load_job, prepare
from isthmus.scaffold import (
    FirstJob,
    Task,
    check_name,
    copy_example,
    example_names,
    name_for,
    task_of,
    write_first_job,
)
from tests.runtime.commands import COMMAND, isthmus
from tests.tiers import represented_by


def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, first: FirstJob) -> None:
    """As somebody who has gone there: modules of an earlier folder are forgotten."""
    write_first_job(folder, first)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    for name in ("model", "algorithm"):
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)


@pytest.mark.parametrize("task", ["text", "images"])
def test_a_first_job_is_captured_and_has_a_fleet(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_folder(tmp_path / "new", monkeypatch, FirstJob(name="first", task=task, devices=3, steps=7))
    job = load_job(Path("job.toml"))
    assert (job.name, job.training.steps, len(fleet_of(job).devices)) == ("first", 7, 3)
    assert prepare(job).captured.train.trainable


def test_a_first_federated_job_is_read_with_its_own_algorithm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_folder(tmp_path, monkeypatch, FirstJob(name="first", task="federated", devices=1, clients=12, steps=3))
    job = load_federated_job(Path("job.toml"))
    assert (job.federated.rounds, job.runtime.executors) == (3, 1)
    assert type(job.algorithm(12)).__name__ == "MyAlgorithm"


@pytest.mark.parametrize("clients", [1, 9, 11])
def test_a_round_of_a_first_federated_job_has_no_more_clients_than_there_are(clients: int, tmp_path: Path) -> None:
    write_first_job(tmp_path, FirstJob(name="first", task="federated", clients=clients))
    tables = tomllib.loads((tmp_path / "job.toml").read_text())["federated"]
    assert (tables["partition"]["clients"], tables["participation"]["clients"]) == (clients, min(clients, 10))


def test_own_text_and_own_images(tmp_path: Path) -> None:
    (tmp_path / "corpus" / "deep").mkdir(parents=True)
    with pytest.raises(UserError, match=r"no \.txt file in .*corpus"):
        write_first_job(tmp_path / "a", FirstJob(name="a", data=str(tmp_path / "corpus")))
    (tmp_path / "corpus" / "deep" / "a.txt").write_text("text")
    for name in ("train/cat", "train/dog", "train/owl", "test/cat"):
        (tmp_path / "images" / name).mkdir(parents=True)
    write_first_job(tmp_path / "a", FirstJob(name="a", data=str(tmp_path / "corpus")))
    assert load_job(tmp_path / "a" / "job.toml").data.options["files"] == str(tmp_path / "corpus" / "**" / "*.txt")
    write_first_job(tmp_path / "b", FirstJob(name="b", task="images", data=str(tmp_path / "images")))
    job = load_job(tmp_path / "b" / "job.toml")
    assert (job.data.kind, job.model.options) == ("image-folder", {"channels": 3, "classes": 3})


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (FirstJob(name="x", data="no-such.txt"), "data: no file no-such.txt"),
        (FirstJob(name="x", data="/no-such/*.txt"), r"data: no file /no-such/\*.txt"),
        (FirstJob(name="x", task="images", data="nowhere"), "data: no folder nowhere"),
        (FirstJob(name="x", devices=1), "devices: got 1, expected at least 2"),
    ],
)
def test_what_cannot_be_written_leaves_nothing(first: FirstJob, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        write_first_job(tmp_path / "new", first)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["b c", "ü", "a/b", "../x", 'we"ird', "", "-a"])
def test_a_name_that_no_job_may_have_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"name: got .*expected letters"):
        write_first_job(tmp_path / "new", FirstJob(name=name))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("folder", "name"), [("b c", "b-c"), ("ü", "first"), ("2nd try!", "2nd-try"), ("a.b", "a.b")])
def test_a_folders_name_becomes_a_jobs(folder: str, name: str, tmp_path: Path) -> None:
    assert name_for(tmp_path / folder) == check_name(name)


def asked(folder: Path, *answers: str) -> str:
    """What `isthmus init` prints to a person at a terminal, who answers so."""
    terminal, theirs = pty.openpty()
    os.write(terminal, "".join(f"{answer}\n" for answer in answers).encode())
    command = [*COMMAND, "init", folder.name]
    done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, cwd=folder.parent, timeout=60)
    os.close(terminal)
    os.close(theirs)
    assert done.returncode == 0, done
    return done.stderr


def test_a_question_is_asked_again_and_the_line_to_go_on_with_is_one_that_a_shell_takes(tmp_path: Path) -> None:
    said = asked(tmp_path / "b c", "vision", "federated", "none", "0", "12", "my run", "", "", "3")
    assert "unknown task 'vision'" in said and "--task" not in said
    assert "got 'none', expected a whole number from 1" in said and "got '0', expected a whole number" in said
    assert "name: got 'my run', expected letters" in said
    assert "cd 'b c' && isthmus train job.toml" in said
    job = load_federated_job(tmp_path / "b c" / "job.toml")
    assert (job.name, job.federated.partition.clients, job.federated.rounds, job.runtime.executors) == ("b-c", 12, 3, 2)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("mine")
    with pytest.raises(UserError, match=r"has model\.py already"):
        write_first_job(tmp_path, FirstJob(name="x"))
    assert [path.name for path in tmp_path.iterdir()] == ["model.py"]


@pytest.mark.parametrize("name", represented_by(example_names(), "everything"))
def test_every_example_works_where_it_was_copied(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = isthmus("example", name, "new")
    assert done.code == 0, done
    monkeypatch.chdir("new")
    copied = [Path(line).relative_to("new") for line in done.out.splitlines()]
    for job in copied:
        if job.suffix == ".toml" and not job.stem.endswith("-fleet"):
            federated = kind_of_file(job) == "federated"
            more = ("--set", "federated.rounds=1") if federated else ()
            done = isthmus("simulate" if federated else "plan", job, *more)
            assert (done.code, done.out != "") == (0, True), done
    for script in sorted(Path("python").glob("plan_*.py")):
        subprocess.run([sys.executable, script.name], cwd="python", check=True, capture_output=True, timeout=300)
    if name == "pipeline-client":
        job = load_federated_job(Path(name, "fed.toml"))
        assert job.federated.deployment is not None
        assert [load_site(Path(name, f"{site}.toml")).job for site in job.federated.deployment.sites] == [job.name] * 2


def test_every_example_is_copied_once(tmp_path: Path) -> None:
    for name in example_names():
        assert all(path.exists() for path in copy_example(name, tmp_path))
        with pytest.raises(UserError, match="does not overwrite"):
            copy_example(name, tmp_path)
    assert {"gpt-stdlib.toml", "two-machines-fleet.toml", "torchrun"} <= {path.name for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match="gpt-stdlib"):
        copy_example("gpt-stdlb", tmp_path)
    with pytest.raises(UserError, match="images"):
        task_of("image")
