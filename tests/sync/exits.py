"""How scripts with `isthmus.sync` end: two workers for every mode and every way to end, as often as is asked for.

    python tests/sync/exits.py [--runs 100] [--modes streaming] [--endings left closed]

Workers are forked from a process that has imported everything, and end as any interpreter does. Prints a JSON line: how
often each way ended in which exit codes (worker 0's, worker 1's); 'hung' for more than a minute.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # an optimizer's first step would import it, in every worker anew
import torch.distributed as dist
from torch import nn

import isthmus.sync
from isthmus.sync import Decoupled, Options
from isthmus.training.compression import Int8

LONGEST_S = 60.0
STEPS = 9
"""One more than two periods: the report of the second is on its way, and `streaming`'s next exchange."""
MODES = {
    "every-step": ("every-step", Options(), None),
    "s-sgd": ("s-sgd", Options(), None),
    "asc-wfbp": ("asc-wfbp", Options(bucket_bytes=512), None),
    "local": ("local", Options(), None),
    "partial": ("partial", Options(overlap=True, forward_overlap=True, smallest_layer_bytes=0), None),
    "dream": ("dream", Options(forward_overlap=True, smallest_layer_bytes=0), None),
    "dreamddp": ("dreamddp", Options(smallest_layer_bytes=0), None),
    "outer": ("outer", Options(), Int8()),
    "streaming": ("streaming", Options(delay=3, smallest_layer_bytes=0), None),
    "streaming-int8": ("streaming", Options(delay=3, smallest_layer_bytes=0), Int8()),
    "decoupled": ("decoupled", Options(decoupled=Decoupled(fragments=2)), None),
}


class SlowEnd:
    """Lives until the interpreter takes modules apart, and makes that last."""

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(1.0)


def stepped(mode: str, steps: int, before_last: Callable[[], None] = lambda: None) -> isthmus.sync.Sync:
    name, options, codec = MODES[mode]
    norm = nn.LayerNorm(64) if name == "decoupled" else nn.BatchNorm1d(64)
    model = nn.Sequential(nn.Linear(8, 64), norm, nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = isthmus.sync.attach(model, optimizer, mode=name, period=4, options=options, codec=codec)
    for step in range(steps):
        if step == steps - 1:
            before_last()
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        sync.step()
    return sync


def closed(mode: str, rank: int, ended: Path) -> None:
    stepped(mode, STEPS).close()
    dist.destroy_process_group()


def left(mode: str, rank: int, ended: Path) -> None:
    stepped(mode, STEPS)


def destroyed(mode: str, rank: int, ended: Path) -> None:
    stepped(mode, STEPS)
    dist.destroy_process_group()


def twice(mode: str, rank: int, ended: Path) -> None:
    kept.append([stepped(mode, STEPS), stepped(mode, STEPS)])


def late(mode: str, rank: int, ended: Path) -> None:
    """Worker 1 makes its last step when worker 0's interpreter is ending already."""

    def after_worker_0() -> None:
        while rank and not ended.exists():
            time.sleep(0.01)
        time.sleep(0.3 * rank)

    kept.append([stepped(mode, STEPS, after_worker_0), SlowEnd()])
    ended.touch()


def raised(mode: str, rank: int, ended: Path) -> None:
    kept.append([stepped(mode, STEPS)])
    if not rank:
        raise ValueError("a script's own error")


def exited(mode: str, rank: int, ended: Path) -> None:
    kept.append([stepped(mode, STEPS)])
    sys.exit(3)


def interrupted(mode: str, rank: int, ended: Path) -> None:
    kept.append([stepped(mode, STEPS)])
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1.0)


def gone(mode: str, rank: int, ended: Path) -> None:
    """Worker 1 is killed in the middle: worker 0's next step fails, or its last."""
    kept.append([stepped(mode, STEPS, lambda: os.kill(os.getpid(), signal.SIGKILL) if rank else None)])


ENDINGS = {each.__name__: each for each in (closed, left, destroyed, twice, late, raised, exited, interrupted, gone)}
kept: list[list[object]] = []
"""Until the interpreter takes this module apart."""


def begin(mode: str, ending: str, rank: int, folder: Path) -> None:
    os.dup2(os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    ENDINGS[ending](mode, rank, folder / "ended")


def ended(workers: list[int]) -> str:
    """Exit codes, by worker; minus the signal for one that was killed."""
    codes = {}
    until_s = time.monotonic() + LONGEST_S
    while len(codes) < len(workers):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > until_s:
            for worker in workers:
                if worker not in codes:
                    os.kill(worker, signal.SIGKILL)
                    os.waitpid(worker, 0)
            return f"hung: {set(workers) - set(codes)} of {workers}"
        else:
            time.sleep(0.005)
    return " ".join(str(codes[worker]) for worker in workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--endings", nargs="+", default=list(ENDINGS), choices=ENDINGS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # a worker that collects what was imported, as it ends, would copy every page of it: two seconds
    found: dict[str, Counter[str]] = {}
    for ending in options.endings:
        for mode in options.modes:
            if ending == "late" and not mode.startswith("streaming"):
                continue  # the others wait for worker 1 in the last step
            counted = found.setdefault(f"{mode}, {ending}", Counter())
            for _ in range(options.runs):
                folder = Path(tempfile.mkdtemp())
                workers: list[int] = []
                for rank in range(2):
                    worker = os.fork()
                    if not worker:
                        begin(mode, ending, rank, folder)
                        return  # to the interpreter's end
                    workers.append(worker)
                counted[ended(workers)] += 1
                shutil.rmtree(folder)
            print(f"{mode}, {ending}: {dict(counted)}", file=sys.stderr)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
