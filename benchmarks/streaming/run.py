"""Streams: memory, speed and the way back to a position, beside `datasets` and beside reading the files whole.

`python benchmarks/streaming/run.py [--quick] [--json PATH]`

Parquet files of vectors, 1024 float32 each, 20 times the memory that a reader may take; row groups of 64 rows. Each
reader is a process of its own. It goes through one epoch in batches of 64, shuffled; in another process it goes on from
the middle of the epoch. Memory is the growth of the largest resident size over that after a file of one row group was
read.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from isthmus.data import DataSpec, batch_at, load_dataset, sample_order

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, own_status, write_figures

LATEST = Path(__file__).parent / "results" / "latest.json"
FACTOR = 20
"""Size of the data over the memory that a reader may take."""
ROWS, WIDTH, GROUPS, BATCH, WINDOW = 64, 1024, 128, 64, 8
FILE_BYTES = GROUPS * ROWS * WIDTH * 4
QUICK_FILES, FILES = 4, 20


class Reader(msgspec.Struct, frozen=True):
    name: str
    first_s: float
    """From nothing opened to the first batch."""
    rows_per_s: float
    grown_bytes: int
    middle_s: float
    """In a new process, from nothing opened to the first batch after the middle of the epoch."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    data_bytes: int
    allowed_bytes: int
    readers: tuple[Reader, ...]


class Measured(msgspec.Struct, frozen=True):
    first_s: float
    rows_per_s: float
    grown_bytes: int
    state: dict[str, Any] | None = None
    """Of `datasets` in the middle of the epoch."""


def _stream(folder: Path, from_middle: bool, state: object) -> Iterator[int]:
    options: dict[str, object] = {"path": str(folder / "*.parquet"), "shuffle_blocks": WINDOW, "holdout": 0.0}
    data = load_dataset(DataSpec(kind="stream", options=options), "train")
    order = sample_order(data, 0)
    for start in range(len(data) // 2 if from_middle else 0, len(data), BATCH):
        yield len(batch_at(data, order, start, BATCH, ["x"])["x"])


def _datasets(folder: Path, from_middle: bool, state: object) -> Iterator[int]:
    datasets = importlib.import_module("datasets")
    files = sorted(map(str, folder.glob("*.parquet")))
    found = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    found = found.shuffle(seed=0, buffer_size=WINDOW * ROWS).with_format("torch")
    if from_middle:
        found.load_state_dict(state)
    for number, batch in enumerate(found.iter(BATCH)):
        if not from_middle and number == len(files) * GROUPS // 2:
            STATE.update(found.state_dict())
        yield len(batch["x"])


def _whole(folder: Path, from_middle: bool, state: object) -> Iterator[int]:
    column = importlib.import_module("pyarrow.parquet").read_table(folder, columns=["x"]).column("x").combine_chunks()
    x = column.flatten().to_numpy().reshape(-1, WIDTH)
    order = np.random.default_rng(0).permutation(len(x))
    for start in range(len(x) // 2 if from_middle else 0, len(x), BATCH):
        yield len(x[order[start : start + BATCH]])


STATE: dict[str, Any] = {}
READERS: dict[str, Callable[[Path, bool, object], Iterator[int]]] = {
    "isthmus stream": _stream,
    "datasets, streaming": _datasets,
    "files read whole": _whole,
}


def read(name: str, folder: Path, state: object) -> Measured:
    """In this process. With a `state` from the middle on, and one batch alone."""
    reader, from_middle = READERS[name], state is not None
    sum(reader(folder / "warm", False, None))
    STATE.clear()
    Path("/proc/self/clear_refs").write_text("5")
    before, begun_s = own_status("VmRSS"), time.perf_counter()
    batches = reader(folder / "all", from_middle, state)
    rows, first_s = next(batches), time.perf_counter() - begun_s
    if from_middle:
        return Measured(first_s, 0.0, 0)
    rows += sum(batches)
    return Measured(first_s, rows / (time.perf_counter() - begun_s), own_status("VmHWM") - before, STATE or None)


def _in_process(name: str, folder: Path, state: object) -> Measured:
    command = [sys.executable, __file__, "--read", name, "--folder", str(folder)]
    done = subprocess.run(command, input=msgspec.json.encode(state), stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout, type=Measured)


def _write(folder: Path, files: int) -> int:
    pyarrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    vectors = pyarrow.array(np.random.default_rng(0).random(ROWS * WIDTH, dtype=np.float32))
    group = pyarrow.table({"x": pyarrow.FixedSizeListArray.from_arrays(vectors, WIDTH)})
    for name, groups in {"warm/one": 1, **{f"all/{number:03d}": GROUPS for number in range(files)}}.items():
        path = folder / f"{name}.parquet"
        path.parent.mkdir(exist_ok=True)
        with parquet.ParquetWriter(path, group.schema, compression="NONE", use_dictionary=False) as writer:
            for _ in range(groups):
                writer.write_table(group)
    return sum(file.stat().st_size for file in (folder / "all").iterdir())


def main() -> None:
    parser = options_of(__doc__, LATEST, quick=f"{QUICK_FILES * FILE_BYTES >> 20} MiB of data")
    parser.add_argument("--read", choices=READERS, help="be this reader")
    parser.add_argument("--folder", type=Path, help="of the data, with --read")
    options = parser.parse_args()
    if options.read:
        measured = read(options.read, options.folder, msgspec.json.decode(sys.stdin.buffer.read()))
        sys.stdout.buffer.write(msgspec.json.encode(measured))
        return
    found: list[Reader] = []
    with tempfile.TemporaryDirectory() as place:
        size_bytes = _write(Path(place), QUICK_FILES if options.quick else FILES)
        for name in READERS:
            epoch = _in_process(name, Path(place), None)
            middle = _in_process(name, Path(place), epoch.state or {})
            found.append(Reader(name, epoch.first_s, epoch.rows_per_s, epoch.grown_bytes, middle.first_s))
    allowed_bytes = size_bytes // FACTOR
    report = Report(
        when=f"{datetime.now(UTC):%Y-%m-%d}",
        host=machine(),
        data_bytes=size_bytes,
        allowed_bytes=allowed_bytes,
        readers=tuple(found),
    )
    write_figures(options.json, report)
    table = Table(title=f"{size_bytes >> 20} MiB of Parquet; a reader may take {allowed_bytes >> 20} MiB")
    for heading in ("reader", "first batch", "rows/s", "memory grew by", "from the middle"):
        table.add_column(heading)
    for one in found:
        grown = f"{one.grown_bytes / (1 << 20):.1f} MiB"
        table.add_row(one.name, f"{one.first_s:.2f} s", f"{one.rows_per_s:,.0f}", grown, f"{one.middle_s:.2f} s")
    Console().print(table)


if __name__ == "__main__":
    main()
