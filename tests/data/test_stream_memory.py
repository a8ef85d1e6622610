"""A stream of 20 times the memory that its reader may take is read whole, and the reader takes no more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

MIB = 1 << 20
ALLOWED_BYTES = 5 * MIB
FILES, GROUPS, ROWS, WIDTH = 8, 50, 64, 1024
"""Of float32: 100 MiB."""
READER = """
import sys
import numpy as np, pyarrow.parquet
from pathlib import Path
from isthmus.data import DataSpec, load_dataset, sample_order
from isthmus.data.dataset import batch_at

def bytes_of(entry):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(entry))

def read(path):
    options = {"path": path, "shuffle_blocks": 4, "holdout": 0.0}
    data = load_dataset(DataSpec(kind="stream", options=options), "train")
    order, rows = sample_order(data, 0), 0
    for start in range(0, len(data), 50):
        count = min(50, len(data) - start)
        rows += int(batch_at(data, order, start, count, ["x", "y"])["y"].sum())
    return rows

def grown(use):
    Path("/proc/self/clear_refs").write_text("5")
    before = bytes_of("VmRSS")
    return use(), bytes_of("VmHWM") - before

folder = sys.argv[1]
read(folder + "/warm.parquet")
print(*grown(lambda: read(folder + "/part-*.parquet")))
print(*grown(lambda: pyarrow.parquet.read_table(folder + "/part-0.parquet").num_rows))
"""


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the largest resident size anew"
)
@pytest.mark.long
def test_a_reader_of_100_mib_grows_by_less_than_5(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    vectors = np.random.default_rng(0).random(ROWS * WIDTH, dtype=np.float32)
    x = arrow.FixedSizeListArray.from_arrays(arrow.array(vectors), WIDTH)
    group = arrow.table({"x": x, "y": arrow.array(np.ones(ROWS, dtype=np.int64))})
    for file in ("warm", *(f"part-{number}" for number in range(FILES))):
        path = tmp_path / f"{file}.parquet"
        with parquet.ParquetWriter(path, group.schema, compression="NONE", use_dictionary=False) as writer:
            for _ in range(1 if file == "warm" else GROUPS):
                writer.write_table(group)
    assert sum(file.stat().st_size for file in tmp_path.glob("part-*")) >= 20 * ALLOWED_BYTES
    command = [sys.executable, "-c", READER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    (rows, grown), (_, grown_by_a_file) = (map(int, line.split()) for line in done.stdout.splitlines())
    assert rows == FILES * GROUPS * ROWS and grown < ALLOWED_BYTES
    assert grown_by_a_file > ALLOWED_BYTES, "one file of eight at once is seen"
