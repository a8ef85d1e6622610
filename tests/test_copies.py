"""What a copy of a process finds is what the process would have found, and the process stays as it was."""

from __future__ import annotations

import subprocess
from pathlib import Path

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
import sys
import warnings
from pathlib import Path
import torch
from isthmus.copies import asked, can_copy, in_a_copy
from isthmus.errors import FleetTooSmall, InternalError, IsthmusWarning, warn
from isthmus.job import prepare
from isthmus.job.first_weights import first_weights
from isthmus.job.loading import load_job
from isthmus.training.stored import StoredTensor, in_memory
from isthmus.training.weights import initial_weights


def refuses():
    warn("be careful")
    raise FleetTooSmall("too small: " + "x" * 100_000)


def ends():
    sys.exit(9)


assert can_copy()
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    try:
        in_a_copy(refuses, int)
    except FleetTooSmall as e:
        assert str(e) == "too small: " + "x" * 100_000
    else:
        raise AssertionError
assert [(w.category, str(w.message)) for w in warned] == [(IsthmusWarning, "be careful")]
for question in (ends, lambda: 1 / 0):
    try:
        asked(question, int)
    except InternalError as e:
        print(e)
assert in_a_copy(lambda: [Path("a")], list[Path]) == [Path("a")]

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
        "a copy of this process ended with code 9 without an answer",
        "a copy of this process failed: ZeroDivisionError: division by zero",
        "True",
    ]
