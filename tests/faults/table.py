"""`make test-faults`: each fault at many moments, over real processes; prints how long recovery took.

Each moment is drawn from its row and seed, and printed with both: `python -m tests.faults.table half-open --seed 7`
replays one. A moment has failed if the run ended otherwise than it should, if its history is not one line with each
range of samples once, if a step was lost that was held twice, or if the weights are not those of an undisturbed run:
bit for bit where the cuts are the same. What was found is kept, and not done again until all rows have all their
moments: then the next run begins anew.

`ISTHMUS_FAULT_MOMENTS` is how many moments each fault gets (20), `ISTHMUS_FAULT_STOP_S` how long a device is stopped
and a link is cut (60), `ISTHMUS_FAULT_AGAIN_S` for how long devices are killed again and again (600).
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from types import FrameType

import msgspec
import torch
from rich.console import Console

from tests.interpreters import copied

from . import disk_rows, fleet_rows, process_rows
from .kept import Moment, append, read, summed_up, table
from .rows import Found, Row

ROWS = {row.name: row for row in (*process_rows.ROWS, *fleet_rows.ROWS, *disk_rows.ROWS)}


class TooLong(Exception):
    """A moment that did not end."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"all, or some of: {', '.join(ROWS)}")
    parser.add_argument("--moments", type=int, default=int(os.environ.get("ISTHMUS_FAULT_MOMENTS", "20")))
    parser.add_argument("--seed", type=int, help="this moment alone, again")
    parser.add_argument("--at-once", type=int, default=2, help="moments at once: they mostly wait")
    parser.add_argument("--within", type=float, default=float("inf"), metavar="S", help="begin none after so long")
    parser.add_argument("--anew", action="store_true", help="forget what was found before")
    parser.add_argument("--kept", type=Path, default=Path("runs/faults/moments.jsonl"))
    options = parser.parse_args()
    if unknown := set(options.rows) - ROWS.keys():
        parser.error(f"no such row: {', '.join(sorted(unknown))}; expected some of: {', '.join(ROWS)}")
    rows, count = [ROWS[name] for name in options.rows or ROWS], options.moments
    if options.anew:
        options.kept.unlink(missing_ok=True)
    if options.seed is not None:
        due = [(row, options.seed) for row in rows]
    else:
        done = {(moment.row, moment.seed) for moment in read(options.kept)}
        if done:
            print(f"{len(done)} moments were found before (--anew forgets them)", file=sys.stderr)
        due = [(row, seed) for row, seed in _in_turn(rows, count) if (row.name, seed) not in done]
    left = _do(due, options.at_once, time.monotonic() + options.within, options.kept)
    failed = _tell(rows, options.kept)
    if left:
        print(f"{left} moments are left: the same command goes on with them", file=sys.stderr)
    elif {(m.row, m.seed) for m in read(options.kept)} >= {(r.name, s) for r, s in _in_turn([*ROWS.values()], count)}:
        options.kept.replace(options.kept.with_name("complete.jsonl"))
    return 1 if left or failed else 0


def _tell(rows: list[Row], path: Path) -> bool:
    """Print the table, and write it beside what was kept. Whether a moment has failed."""
    kept = read(path)
    summaries = [s for row in rows if (s := summed_up(row, [m for m in kept if m.row == row.name])).moments]
    path.with_name("summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summaries), indent=1))
    Console(width=160).print(table(summaries))
    return any(summary.failed for summary in summaries)


def _in_turn(rows: list[Row], moments: int) -> Iterator[tuple[Row, int]]:
    """The first moment of each row, then the second: whoever stops early has some of each."""
    for seed in range(moments):
        yield from ((row, seed) for row in rows if seed < row.moments)


def _do(due: list[tuple[Row, int]], at_once: int, until_s: float, kept: Path) -> int:
    """Returns how many were not begun."""
    left, count = iter(due), 0
    # Processes: what is done to a device is done to a child of the process that conducts.
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(at_once, mp_context=fresh, initializer=_begin) as lanes:
        at_work = {lanes.submit(_once, row.name, seed) for row, seed in _first(left, at_once)}
        count += len(at_work)
        while at_work:
            ended = next(as_completed(at_work))
            at_work.discard(ended)
            moment = ended.result()
            append(kept, moment)
            seconds = ", ".join(f"{s:.1f} s" for s in moment.found.seconds)
            told = f"{moment.row} --seed {moment.seed}: {moment.found.wrong or 'ok'} [{seconds}] {moment.found.note}"
            print(f"{told} in {moment.wall_s:.0f} s", file=sys.stderr, flush=True)
            if time.monotonic() < until_s:
                for row, seed in _first(left, 1):
                    at_work.add(lanes.submit(_once, row.name, seed))
                    count += 1
    return len(due) - count


def _first(left: Iterator[tuple[Row, int]], count: int) -> list[tuple[Row, int]]:
    return [found for _, found in zip(range(count), left, strict=False)]


_FOLDER: list[tempfile.TemporaryDirectory[str]] = []
_OPEN = contextlib.ExitStack()
"""Both end with their process."""


def _begin() -> None:
    """In each process, for all its moments."""
    torch.set_num_threads(1)
    _OPEN.enter_context(copied())


def _once(name: str, seed: int) -> Moment:
    """In a process that does moments one after another."""
    if not _FOLDER:
        _FOLDER.append(tempfile.TemporaryDirectory(prefix="isthmus-faults-"))
    row, folder, since_s = ROWS[name], Path(_FOLDER[0].name) / name, time.monotonic()
    folder.mkdir(exist_ok=True)
    signal.signal(signal.SIGALRM, _too_long)
    signal.setitimer(signal.ITIMER_REAL, row.limit_s)
    try:
        found = row.once(seed, folder)
    except Exception as e:  # a moment that fails is a finding, and the other moments are still of interest
        where = traceback.extract_tb(e.__traceback__)[-1]
        found = Found(wrong=f"{type(e).__name__}: {e} ({Path(where.filename).name}:{where.lineno})")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    return Moment(row=name, seed=seed, found=found, wall_s=time.monotonic() - since_s, load=os.getloadavg()[0])


def _too_long(number: int, frame: FrameType | None) -> None:
    faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)  # a command that runs in this process has another one
    raise TooLong("it did not end")


if __name__ == "__main__":
    sys.exit(main())
