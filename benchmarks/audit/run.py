"""Audit: what fingerprints of every step cost a run.

`python benchmarks/audit/run.py [--quick] [--json PATH]`; with `--hashes` without the runs

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

from isthmus.cost import build_plan
from isthmus.data import DataSpec
from isthmus.experiments import RunOptions, Watcher, check_outcome, run_plan
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.graph import cuts
from isthmus.job import Job, Prepared, RuntimeConfig, TrainingConfig, prepare
from isthmus.models import ModelSpec, build_model
from isthmus.plans import Plan
from isthmus.trace import Trace, step_times
from isthmus.training.digests import KEY_BYTES, leaf, quick_leaf

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
    gradient_bytes: int
    """Of one of the two devices."""
    gradients_s: float
    """Processor time of their hashes, once in a step."""
    messages_s: float
    """And of the messages of one micro-batch, sent and received."""
    compute_s: float
    """Processor time of a forward and a backward of one micro-batch, by half of the model."""
    without_s: tuple[float, ...]
    with_s: tuple[float, ...]
    """Steps of all runs."""
    file_bytes: int
    """Per step, of both devices."""

    def hash_s(self, micro_batches: int) -> float:
        return self.gradients_s + micro_batches * self.messages_s

    def share(self, micro_batches: int) -> float:
        """Of the processor time of a step."""
        return self.hash_s(micro_batches) / (micro_batches * self.compute_s)


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


def processor_s(act: Callable[[], object], times: int = 7) -> float:
    """The median of this thread's processor time."""
    found: list[float] = []
    for _ in range(times):
        began = time.thread_time()
        act()
        found.append(time.thread_time() - began)
    return statistics.median(found)


def alone() -> tuple[int, float, float, float]:
    """The first four figures of a report after its host."""
    torch.set_num_threads(1)
    module, ids, key = build_model(MODEL), torch.randint(0, 256, (SAMPLES, TOKENS)), bytes(KEY_BYTES)
    parameters = list(module.parameters())
    gradients = [torch.randn_like(p) for p in parameters[: len(parameters) // 2]]
    message = torch.randn(SAMPLES, TOKENS, WIDTH)

    def micro_batch() -> None:
        module(ids, ids)["loss"].backward()

    micro_batch()
    return (
        sum(g.numel() * g.element_size() for g in gradients),
        processor_s(lambda: [quick_leaf(key, g) for g in gradients]),
        2 * processor_s(lambda: leaf(key, message)),
        processor_s(micro_batch) / 2,
    )


def ran(steps: int, turns: int) -> tuple[dict[bool, list[float]], int]:
    """Seconds of steps with fingerprints and without, and bytes that were kept of a run."""
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
    return seconds, size


def main() -> int:
    parser = options_of(__doc__, LATEST, "fewer steps, one run of each kind")
    parser.add_argument("--hashes", action="store_true", help="only the processor time of hashes")
    options = parser.parse_args()
    steps, turns = (9, 1) if options.quick else (13, 2)
    seconds, size = ({False: [], True: []}, 0) if options.hashes else ran(steps, turns)
    gradient_bytes, gradients_s, messages_s, compute_s = alone()
    report = Report(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        host=machine(),
        gradient_bytes=gradient_bytes,
        gradients_s=gradients_s,
        messages_s=messages_s,
        compute_s=compute_s,
        without_s=tuple(seconds[False]),
        with_s=tuple(seconds[True]),
        file_bytes=size // steps,
    )
    write_figures(options.json, report)
    table = Table("samples in a step", "hashes", "computing", "share", title="Processor time of a device")
    for count in (MICRO_BATCHES, 4 * MICRO_BATCHES, 16 * MICRO_BATCHES):
        hash_s, all_s = report.hash_s(count), count * report.compute_s
        table.add_row(
            f"{count * SAMPLES}", f"{hash_s * 1e3:.1f} ms", f"{all_s * 1e3:.0f} ms", f"{report.share(count):.2%}"
        )
    Console(width=120).print(table)
    if not seconds[True]:
        return 0
    off_s, on_s = statistics.median(seconds[False]), statistics.median(seconds[True])
    print(f"step without {off_s:.4f} s, with {on_s:.4f} s: {on_s / off_s - 1:+.1%}; {report.file_bytes} bytes are kept")
    return 0 if on_s / off_s - 1 <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
