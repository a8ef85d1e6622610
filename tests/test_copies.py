"""What a copy of a process finds is what the process would have found, and the process stays as it was."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.copies import begun_in_a_copy, in_a_copy
from tests.interpreters import script

JOB = """
name = "one"
fleet = "three-sites"
[model]
name = "hf-llama"
[model.options]
vocab_size = 256
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
[data]
kind = "text"
[data.options]
files = "*.txt"
sequence_length = 8
shift_labels = false
[training]
steps = 1
batch_size = 2
micro_batches = 2
[[optimizer]]
name = "sgd"
lr = 0.1
"""
SCRIPT = """
import os
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
import torch
from isthmus.copies import asked, begun_in_a_copy, can_copy, in_a_copy
from isthmus.errors import FleetTooSmall, InternalError, IsthmusWarning, warn
from isthmus.job import prepare
from isthmus.job.first_weights import first_weights
from isthmus.job.settings import load_job
from isthmus.training.stored import StoredTensor, in_memory
from isthmus.training.weights import initial_weights


def refuses():
    warn("be careful")
    raise FleetTooSmall("too small: " + "x" * 100_000)


def ends():
    os._exit(9)


def crashes():
    os.kill(os.getpid(), signal.SIGSEGV)


def leaves():
    sys.exit("no licence")


def litters():
    Path(tempfile.mkdtemp(), "left").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def has_a_child():
    child = os.fork()
    if not child:
        time.sleep(600)
        os._exit(0)
    return child


assert can_copy()
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    try:
        in_a_copy(refuses, int, 'a test')
    except FleetTooSmall as e:
        assert str(e) == "too small: " + "x" * 100_000
    else:
        raise AssertionError
assert [(w.category, str(w.message)) for w in warned] == [(IsthmusWarning, "be careful")]
tempfile.tempdir = str(Path("temporary").absolute())
os.mkdir(tempfile.tempdir)
for question in (ends, crashes, lambda: 1 / 0, leaves, litters):
    try:
        asked(question, int, "building one")
    except (InternalError, SystemExit) as e:
        print(e)
begun = begun_in_a_copy(lambda: time.sleep(600), int, "a test")
del begun  # nobody wants its answer
assert not os.listdir(tempfile.tempdir)
os.kill(asked(has_a_child, int), signal.SIGKILL)  # it still lives
assert in_a_copy(lambda: [Path("a")], list[Path], "a test") == [Path("a")]

job = load_job(Path("job.toml"))
prepared = prepare(job)
first = first_weights(prepared)
assert "transformers" not in sys.modules
assert all(isinstance(value, StoredTensor) for value in first.values.values())
here = initial_weights(prepared.build, prepared.captured, job.training.seed)
assert "transformers" in sys.modules
assert here.keys() == first.values.keys()
assert all(torch.equal(in_memory(first.values[name]), value) for name, value in here.items())
print(len(here) > 5)
"""


def test_a_model_is_captured_and_built_in_copies(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "data.txt").write_text("Isthmus " * 200)
    done = subprocess.run(script(SCRIPT, tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "building one ended with code 9 without an answer",
        "building one ended by SIGSEGV without an answer: code that it calls crashed",
        "building one failed: ZeroDivisionError: division by zero",
        "no licence",
        "building one ended by SIGKILL without an answer: it may be that no memory was left",
        "True",
    ]


@pytest.mark.parametrize("ask", [in_a_copy, lambda *question: begun_in_a_copy(*question)()])
def test_threads_that_ask_take_turns(ask: Callable[..., int]) -> None:
    """Torch traces for the whole process: models of two runs at once made nonsense of each other."""
    answers: list[int] = []
    second = threading.Event()

    def first() -> int:
        other.start()
        assert not second.wait(0.3), "the other began before this one was done"
        return 1

    def late() -> int:
        second.set()
        return 2

    other = threading.Thread(target=lambda: answers.append(ask(late, int, "the second")))
    starter = threading.Thread(target=lambda: answers.append(ask(first, int, "the first")))
    starter.start()
    starter.join()
    other.join()
    assert sorted(answers) == [1, 2]
