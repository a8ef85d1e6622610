import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.data import SampleOrder
from isthmus.errors import UserError

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**63)


@given(size=sizes, seed=seeds, epoch=st.integers(0, 10**9), shuffle=st.booleans())
def test_each_sample_once_per_epoch(size, seed, epoch, shuffle):
    order = SampleOrder(size, seed, shuffle)
    assert sorted(order.indices(epoch * size, size)) == list(range(size))


@settings(max_examples=60)
@given(size=sizes, seed=seeds, start=st.integers(0, 10**6), counts=st.lists(st.integers(0, 60), max_size=5))
def test_any_cutting_of_a_range_gives_the_same_samples(size, seed, start, counts):
    order = SampleOrder(size, seed)
    whole = order.indices(start, sum(counts))
    parts = [order.indices(start + sum(counts[:i]), count) for i, count in enumerate(counts)]
    assert whole.dtype == np.int64
    assert np.array_equal(whole, np.concatenate([*parts, np.empty(0, np.int64)]))


@given(size=sizes, start=st.integers(0, 10**6), count=st.integers(0, 99))
def test_without_shuffle_the_stream_counts(size, start, count):
    expected = [position % size for position in range(start, start + count)]
    assert SampleOrder(size, 0, shuffle=False).indices(start, count).tolist() == expected


def test_epochs_and_seeds_differ():
    order = SampleOrder(100, 1)
    assert not np.array_equal(order.indices(0, 100), order.indices(100, 100))
    assert not np.array_equal(order.indices(0, 100), SampleOrder(100, 2).indices(0, 100))


def test_stream_does_not_change_between_versions():
    """Machines with different numpy versions must agree, and old runs must resume."""
    assert SampleOrder(10, 7).indices(5, 12).tolist() == GOLDEN


GOLDEN = [6, 2, 4, 5, 9, 9, 0, 8, 6, 7, 1, 3]


def test_a_caller_cannot_spoil_the_cached_epoch():
    order = SampleOrder(6, 3)
    first = order.indices(0, 6)
    kept = first.copy()
    first[:] = 0
    assert np.array_equal(order.indices(0, 6), kept)


def test_bad_arguments():
    with pytest.raises(UserError, match="got size 0"):
        SampleOrder(0, 1)
    with pytest.raises(UserError, match="got seed -1"):
        SampleOrder(1, -1)
    with pytest.raises(ValueError, match="start -1"):
        SampleOrder(1, 1).indices(-1, 1)


WITHOUT_TORCH = """
import sys
for name in ("torch", "transformers", "tokenizers", "datasets", "sklearn"):
    sys.modules[name] = None
from isthmus.data import DataSpec, SampleOrder, load_dataset
from isthmus.errors import UserError
data = load_dataset(DataSpec(kind="text", options={"files": sys.argv[1], "sequence_length": 4}), "train")
print(len(data), len(data.fingerprint), SampleOrder(len(data), 0).indices(0, 1).shape)
try:
    data.batch([0], ["labels"])
except UserError as error:
    print(error)
"""


def test_order_and_size_need_no_torch(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 100)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path / "a.txt")],
        capture_output=True,
        text=True,
        check=True,
    )
    size, error = done.stdout.splitlines()
    assert size == "23 64 (1,)"  # 95 bytes are left of 100, and each window shares a byte with the next
    assert "pip install '.[train]'" in error
