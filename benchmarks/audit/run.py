"""Audit: what fingerprints of every step cost a run.

`python benchmarks/audit/run.py [--quick] [--json PATH]`

The same run with `[runtime] fingerprints` and without, in turns: two emulated devices joined by 100 Mbit/s. What counts
is the median time of a step. On a busy machine these medians differ by more than fingerprints cost, so the hashes of a
step are also timed alone, by the processor time of their thread, and put beside the processor time that one device's
forwards and backwards of a step take.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from isthmus.cost import build_plan
from isthmus.data import DataSpec
from isthmus.experiments import RunOptions, Watcher, check_outcome, run_plan
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.graph import cuts
from isthmus.job import Job, Prepared, RuntimeConfig, TrainingConfig, prepare
from isthmus.models import ModelSpec
from isthmus.plans import Plan
from isthmus.trace import Trace, step_times
from isthmus.training.digests import leaf

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "latest.json"
LIMIT = 0.01
STAGE_S = 0.3
"""Half of the model for one micro-batch on an emulated device: more than a core of this kind needs."""
MICRO_BATCHES, SAMPLES, TOKENS, WIDTH = 4, 4, 64, 288
MODEL = ModelSpec(
    name="gpt",
    options={"vocab_size": 256, "sequence_length": TOKENS, "width": WIDTH, "layers": 5, "heads": 4},
)
DATA = DataSpec(kind="text", options={"files": "stdlib", "sequence_length": TOKENS, "max_bytes": 200_000})


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    hashed_bytes: int
    """Per device and step, about."""
    hash_s: float
    """Processor time of these hashes."""
    compute_s: float
    """Processor time of the model's forward and backward of half of the model, for a step."""
    without_s: tuple[float, ...]
    with_s: tuple[float, ...]
    """Steps of all runs."""
    file_bytes: int
    """Per step, of both devices."""

    @property
    def cost(self) -> float:
        return statistics.median(self.with_s) / statistics.median(self.without_s) - 1

    @property
    def share(self) -> float:
        return self.hash_s / self.compute_s


def prepared_for(steps: int, *, fingerprints: bool) -> Prepared:
    training = TrainingConfig(steps=steps, batch_size=MICRO_BATCHES * SAMPLES, micro_batches=MICRO_BATCHES)
    runtime = RuntimeConfig(fingerprints=fingerprints, adapt=False, snapshots=False)
    return prepare(Job(name="audit", model=MODEL, data=DATA, training=training, runtime=runtime))


def planned(prepared: Prepared) -> tuple[Plan, Fleet]:
    def fleet(speed: float) -> Fleet:
        devices = tuple(
            Device(name=name, region="here", flops_per_s=speed, memory_bytes=1 << 34) for name in ("a", "b")
        )
        return Fleet(name="pair", devices=devices, links=Links(default=Link(0.005, 100e6 / 8)))

    total = prepared.problem(fleet(1.0)).cumulative_flops
    middle = min(cuts(prepared.flow), key=lambda c: abs(total[c.position] - total[-1] / 2)).position
    found = fleet(total[-1] / 2 / STAGE_S)
    return build_plan(prepared.problem(found), found.names, [middle], planner="equal FLOPs"), found


def one_run(prepared: Prepared, plan: Plan, fleet: Fleet) -> tuple[list[float], int]:
    """Seconds of steps, without the first two and the last; and bytes of fingerprints."""
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_plan(prepared, plan, fleet, Path(folder), RunOptions(), Watcher())
        kept = Path(folder) / "fingerprints.jsonl"
        size = sum(len(line) for line in kept.read_bytes().splitlines()[1:]) if kept.exists() else 0
    check_outcome(outcome)
    times = step_times(Trace(source="runtime", run="audit", spans=outcome.spans))
    return [s for step, s in sorted(times.items()) if 1 < step < prepared.job.training.steps - 1], size


def hashed(prepared: Prepared) -> list[Tensor]:
    """What one of the two devices hashes in a step: half of the gradients, and messages both ways."""
    graph = prepared.captured.train
    shapes = [op.outputs[0].shape_at(SAMPLES) for op in graph.ops if op.kind == "parameter"]
    message = torch.randn(SAMPLES, TOKENS, WIDTH)
    return [*(torch.randn(shape) for shape in shapes[::2]), *(message.clone() for _ in range(2 * MICRO_BATCHES))]


def processor_s(act: Callable[[], object], times: int = 7) -> float:
    """The median of this thread's processor time."""
    found: list[float] = []
    for _ in range(times):
        began = time.thread_time()
        act()
        found.append(time.thread_time() - began)
    return statistics.median(found)


def compute_s(prepared: Prepared) -> float:
    """Of a step, on one of two equal devices."""
    torch.set_num_threads(1)
    module = prepared.build()
    ids = torch.randint(0, 256, (SAMPLES, TOKENS))

    def micro_batch() -> None:
        found = module(ids, ids)
        (found[0] if isinstance(found, tuple) else found).backward()

    micro_batch()
    return processor_s(micro_batch) * MICRO_BATCHES / 2


def main() -> int:
    options = options_of(__doc__, LATEST, "fewer steps, one run of each kind").parse_args()
    steps, turns = (9, 1) if options.quick else (13, 2)
    kinds = {on: prepared_for(steps, fingerprints=on) for on in (False, True)}
    plan, fleet = planned(kinds[True])
    seconds: dict[bool, list[float]] = {False: [], True: []}
    size = 0
    for turn in range(turns):
        for on in (False, True) if turn % 2 == 0 else (True, False):
            found, kept = one_run(kinds[on], plan, fleet)
            seconds[on] += found
            size = max(size, kept)
            print(f"fingerprints {'on' if on else 'off'}: median {statistics.median(found):.4f} s", file=sys.stderr)
    tensors, key = hashed(kinds[True]), bytes(32)
    report = Report(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        host=machine(),
        hashed_bytes=sum(t.numel() * t.element_size() for t in tensors),
        hash_s=processor_s(lambda: [leaf(key, t) for t in tensors]),
        compute_s=compute_s(kinds[True]),
        without_s=tuple(seconds[False]),
        with_s=tuple(seconds[True]),
        file_bytes=size // steps,
    )
    write_figures(options.json, report)
    table = Table("hashed", "in", "computing", "share", "step without", "with", "cost", "kept", title="Fingerprints")
    table.add_row(
        f"{report.hashed_bytes / 1e6:.1f} MB",
        f"{report.hash_s * 1e3:.1f} ms",
        f"{report.compute_s * 1e3:.0f} ms",
        f"{report.share:.2%}",
        f"{statistics.median(report.without_s) * 1e3:.0f} ms",
        f"{statistics.median(report.with_s) * 1e3:.0f} ms",
        f"{report.cost:+.1%}",
        f"{report.file_bytes} B",
    )
    Console(width=120).print(table)
    return 0 if report.cost <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
