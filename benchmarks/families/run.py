"""Which of transformers' families a job can cut: each with a tiny random config, one step against the plain module.

`python benchmarks/families/run.py [--only REGEX] [--tasks LIST] [--seconds S] [--json PATH]`

Each family is captured as a job captures it, cut into three stages, and its loss and gradients compared with those of
the plain module. What was found is added to the JSON after each family, in place of what it had of that family. Ends
with 1 if a family that was tried now differs, or fails without a line of ours that says why.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch
import transformers
from configs import TASKS, Family, NotTried, Tiny, families, tiny
from rich.console import Console
from rich.table import Table
from torch import Tensor

from isthmus.errors import IsthmusError
from isthmus.graph import Flow, cuts
from isthmus.training.engine import EngineConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "training"))  # the stages of a cut model in one process
from in_process import (  # pyright: ignore[reportMissingImports]
    Pipeline,
    batches,
    capture_of,
    copies,
    module_of,
    weights_of,
)
from reference import reference_step  # pyright: ignore[reportMissingImports]

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import chosen, machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "latest.json"
CONFIG = EngineConfig(micro_batches=2, micro_batch_size=2)
CLOSE = 1e-6
"""Relative difference where sums have another order (docs/parity.md)."""

Outcome = Literal["equal", "close", "different", "refused", "crash", "time", "random", "not tried"]
MEANING: dict[Outcome, str] = {
    "equal": "loss and gradients bit for bit those of the plain module",
    "close": f"within {CLOSE:g}",
    "different": "not",
    "refused": "with a line that says why",
    "crash": "an error that is not ours",
    "time": "not done in the time that a family has",
    "random": "draws random numbers without dropout: not comparable",
    "not tried": "no tiny config, or the plain module fails with it",
}


class Step(NamedTuple):
    loss: float
    gradients: dict[str, Tensor]
    """By parameter name."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    outcome: Outcome
    line: str = ""
    stages: int = 0
    operators: int = 0
    loss_difference: float = 0.0
    gradient_difference: float = 0.0
    """The largest of any parameter's; both are relative."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    family: str
    task: str
    model: str
    when: str
    seconds: float
    found: Found


class Report(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    torch: str
    transformers: str
    rows: tuple[Row, ...] = ()

    def with_row(self, row: Row) -> Report:
        others = [r for r in self.rows if r.family != row.family]
        order = list(TASKS)
        rows = sorted([*others, row], key=lambda r: (order.index(r.task), r.family))
        return msgspec.structs.replace(self, rows=tuple(rows))


def attempt(family: Family) -> Found:
    shape = tiny(family)
    data = batches(shape.columns, CONFIG.micro_batches, CONFIG.micro_batch_size, seed=7)
    for mask in (batch["attention_mask"] for batch in data if "attention_mask" in batch):
        mask.fill_(1)[0, -3:] = 0  # one sample is padded
    try:
        expected, again = (plain(shape, data, drawn) for drawn in (1, 2))
    except Exception as e:  # sizes that a constructor takes and a forward does not
        raise NotTried(f"the plain module: {type(e).__name__}: {e}") from e
    captured = capture_of(shape.build, shape.columns)
    legal = [cut.position for cut in cuts(Flow(captured.train))]
    chosen = sorted({legal[len(legal) // 3], legal[2 * len(legal) // 3]}) if legal else []
    pipeline = Pipeline(captured, chosen, weights_of(shape.build, captured), CONFIG)
    got = Step(*pipeline.step(0, copies(data)))
    found = Found(outcome="random") if again.loss != expected.loss else compared(got, expected)
    return msgspec.structs.replace(found, stages=len(chosen) + 1, operators=len(captured.train.ops))


def plain(shape: Tiny, data: list[dict[str, Tensor]], drawn: int) -> Step:
    module = module_of(shape.build)
    torch.manual_seed(drawn)
    return Step(*reference_step(module, copies(data), CONFIG))


def compared(got: Step, expected: Step) -> Found:
    one_sided = got.gradients.keys() ^ expected.gradients.keys()
    both = got.gradients | expected.gradients
    missing = sorted(name for name in one_sided if bool(both[name].any()))
    if missing:
        return Found(outcome="different", line=f"gradients that only one of the two has: {', '.join(missing[:3])}")
    loss = abs(got.loss - expected.loss) / max(abs(expected.loss), 1e-9)
    gradient = max(
        float((got.gradients[n] - g).norm() / (g.norm() + 1e-12))
        for n, g in expected.gradients.items()
        if n in got.gradients
    )
    worst = max(loss, gradient)
    outcome: Outcome = "equal" if worst == 0 else "close" if worst <= CLOSE else "different"
    return Found(outcome=outcome, loss_difference=loss, gradient_difference=gradient)


def answered(family: Family) -> Found:
    try:
        return attempt(family)
    except NotTried as e:
        return Found(outcome="not tried", line=_line(e))
    except IsthmusError as e:
        return Found(outcome="refused", line=_line(e))
    except Exception as e:
        return Found(outcome="crash", line=f"{type(e).__name__}: {_line(e)}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]


def in_child(family: Family, seconds: float) -> Found:
    """A forked process, so that no family meets what another left behind, or takes more than its time."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        os.write(write, msgspec.json.encode(answered(family)))
        os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], seconds)
    said = os.read(read, 1 << 16) if ready else b""  # less than a pipe holds: written at once
    os.close(read)
    if not ready:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if not ready:
        return Found(outcome="time", line=f"not done in {seconds:g} s")
    return msgspec.json.decode(said, type=Found) if said else Found(outcome="crash", line="the process died")


def measured(chosen: list[Family], seconds: float) -> Iterator[Row]:
    for family in chosen:
        started = time.perf_counter()
        found = in_child(family, seconds)
        took = time.perf_counter() - started
        print(f"{family.task} {family.name}: {found.outcome} ({took:.1f} s) {found.line[:100]}", file=sys.stderr)
        yield Row(
            family=family.name,
            task=family.task,
            model=family.model,
            seconds=round(took, 1),
            found=found,
            when=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def begun(path: Path) -> Report:
    """What the file has of the same versions on the same host, else nothing."""
    host = machine()
    empty = Report(host=host, torch=str(torch.__version__), transformers=transformers.__version__)
    if not path.exists():
        return empty
    known = msgspec.json.decode(path.read_bytes(), type=Report)
    return known if msgspec.structs.replace(known, rows=()) == empty else empty


def table(report: Report) -> Table:
    count = Counter((row.task, row.found.outcome) for row in report.rows)
    drawn = Table("outcome", *TASKS, "all", "", title=f"Families of transformers {report.transformers}")
    for outcome, meaning in MEANING.items():
        each = [count[task, outcome] for task in TASKS]
        if any(each):
            drawn.add_row(outcome, *map(str, each), str(sum(each)), meaning)
    return drawn


def main() -> int:
    parser = options_of(__doc__, LATEST)
    parser.add_argument("--only", default=".*", metavar="REGEX", help="families whose whole name matches")
    parser.add_argument("--tasks", default=",".join(TASKS), metavar="LIST", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--seconds", type=float, default=120.0, metavar="S", help="what each family may take")
    options = parser.parse_args()
    tasks = options.tasks.split(",")
    if unknown := set(tasks) - set(TASKS):
        parser.error(f"--tasks: got {', '.join(sorted(unknown))}, expected some of {', '.join(TASKS)}")
    torch.set_num_threads(1)
    whole = rf"\A(?:{options.only})\Z"
    picked = chosen(parser, "--only", whole, families(tasks), key=lambda family: family.name)
    report, good = begun(options.json), True
    for row in measured(picked, options.seconds):
        report = report.with_row(row)
        good &= row.found.outcome not in ("different", "crash")
        write_figures(options.json, report)
    Console(width=120).print(table(report))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
