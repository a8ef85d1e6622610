"""`isthmus train` with `[runtime] device`: device processes on the emulated accelerator, from the command line."""

from pathlib import Path

import msgspec
import pytest

from isthmus.job import load_job, prepare
from tests.runtime.commands import edited, isthmus, write_job
from tests.runtime.jobs import plain_run

STEPS = 3


@pytest.mark.long
def test_processes_train_there_as_the_plain_loop_does(tmp_path: Path) -> None:
    path = edited(
        write_job(tmp_path, steps=STEPS),
        ("[training]", '[runtime]\ndevice = "checked"\nemulate = false\n[training]'),
        ("eval_every = 5", "eval_every = 2"),
    )
    done = isthmus("train", path)
    assert done.code == 0, done.err
    written = (tmp_path / "runs" / "small" / "losses.jsonl").read_bytes().splitlines()
    lines = [msgspec.json.decode(line, type=dict[str, object]) for line in written]
    losses = [line["loss"] for line in lines if line["split"] == "train"]
    job = load_job(path)
    _, expected = plain_run(job, prepare(job))
    assert losses == expected
    assert len(losses) == STEPS
