"""What steps of one's own by speed (`Options(balance=True)`) do to time and loss: `balance.py [--quick] [--json PATH]`.

Four workers train the small ResNet on digits in mode `local`; the last computes half as fast (every step is stretched
by sleeping). With equal steps the others wait for it; balanced, it makes fewer and counts less in the averages.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import isthmus.sync
from isthmus.sync import Options
from training import Task, of_mean

sys.path.insert(0, str(Path(__file__).parents[1] / "sync"))

from workload import ResNet  # pyright: ignore[reportMissingImports]

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import options_of, write_figures

LATEST = Path(__file__).parent / "results" / "balance.json"
WORKERS, PERIOD, BATCH, SEEDS, PERIODS = 4, 6, 16, 3, 24
STEP_S = (0.06, 0.06, 0.06, 0.12)
"""Least seconds of one worker's step."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    balance: bool
    seed: int
    loss: float
    """Of the mean model at the end, held out."""
    steps: list[int]
    """By worker."""
    period_samples: float
    """All workers' samples in a period."""
    period_s: float
    """Mean of the periods after the second, when balanced workers have their own steps."""


def train(balance: bool, seed: int, periods: int) -> Run:
    task = Task("resnet", lambda: ResNet(32), seed)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    sync = isthmus.sync.attach(task.model, optimizer, mode="local", period=PERIOD, options=Options(balance=balance))
    settled_s = time.perf_counter()
    while sync.periods < periods:
        started_s = time.perf_counter()
        optimizer.zero_grad()
        task.loss(task.model, sync.steps, BATCH).backward()
        time.sleep(max(0.0, STEP_S[dist.get_rank()] - (time.perf_counter() - started_s)))
        before = sync.periods
        sync.step()
        if before < 2 <= sync.periods:
            settled_s = time.perf_counter()
    period_s = (time.perf_counter() - settled_s) / (periods - 2)
    steps = torch.zeros(WORKERS, dtype=torch.int64)
    steps[dist.get_rank()] = sync.steps
    dist.all_reduce(steps)
    loss, _ = of_mean(task, task.model)
    sync.close()
    return Run(
        balance=balance,
        seed=seed,
        loss=loss,
        steps=steps.tolist(),
        period_s=period_s,
        period_samples=BATCH * int(steps.sum()) / periods,
    )


def worker(rank: int, store: str, quick: bool) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORKERS),
        rank=rank,
        world_size=WORKERS,
        timeout=datetime.timedelta(seconds=120),
    )
    for seed in range(1 if quick else SEEDS):
        for balance in (False, True):
            done = train(balance, seed, PERIODS // 4 if quick else PERIODS)
            if rank == 0:
                print(msgspec.json.encode(done).decode(), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measure(quick: bool) -> list[Run]:
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, *(["--quick"] if quick else [])]
        running = [
            subprocess.Popen([*words, "--worker", str(rank), f"{folder}/store"], stdout=subprocess.PIPE, text=True)
            for rank in range(WORKERS)
        ]
        outputs = [process.communicate(timeout=240)[0] for process in running]
    return [msgspec.json.decode(line, type=Run) for line in outputs[0].splitlines()]


def table(runs: list[Run]) -> Table:
    drawn = Table("steps", title=f"{WORKERS} workers, the last half as fast; {PERIODS} periods of {PERIOD} on average")
    for heading in ("of each worker", "samples a period", "ms a period", "held-out loss"):
        drawn.add_column(heading, justify="right")
    for balance in (False, True):
        of = [run for run in runs if run.balance is balance]
        losses = [run.loss for run in of]
        drawn.add_row(
            "balanced" if balance else "equal",
            " ".join(map(str, of[-1].steps)),
            f"{of[-1].period_samples:.0f}",
            f"{1e3 * statistics.fmean(run.period_s for run in of):.0f}",
            f"{statistics.fmean(losses):.3f} ± {statistics.pstdev(losses):.3f}",
        )
    return drawn


def main() -> int:
    parser = options_of(__doc__, LATEST, "one seed, a quarter of the periods")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(int(options.worker[0]), options.worker[1], options.quick)
        return 0
    runs = measure(options.quick)
    write_figures(options.json, runs)
    Console(width=120).print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
