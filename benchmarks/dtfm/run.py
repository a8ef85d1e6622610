"""GPT-3 on DT-FM's networks, simulated: what its layouts, `auto`, Megatron and ZeRO-3 take for a step.

`python benchmarks/dtfm/run.py [--quick] [--fleets FLEET ...] [--json PATH]`, see `end_to_end.py`. The file is written
as rows come in. Ends with 1 where `auto` takes longer than another layout.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from against_paper import behind, closed_forms, gains, of_peak, steps
from end_to_end import FLEETS, STRATEGIES, UTILISATION, WORKLOADS, Question, Row, rows
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "end-to-end.json"


class EndToEnd(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    utilisation: float
    rows: tuple[Row, ...]


def end_to_end(path: Path, question: Question, console: Console) -> bool:
    """False where `auto` takes longer than another layout."""
    found: list[Row] = []
    for row in rows(question):
        print(f"{row.fleet}, {row.model} x {row.layers}, {row.batch}", file=sys.stderr)
        found.append(row)
        _write(path, EndToEnd(when=_now(), host=_host(), utilisation=question.utilisation, rows=tuple(found)))
    for drawn in (steps(found), gains(found), of_peak(found), closed_forms(found)):
        console.print(drawn)
    for words in (slower := behind(found)):
        console.print(words)
    return not slower


def _write(path: Path, found: EndToEnd) -> None:
    path.parent.mkdir(exist_ok=True)
    write_figures(path, found)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _host() -> str:
    return machine()


def main() -> int:
    parser = options_of(__doc__, LATEST, "two workloads on case 5 and FluidStack")
    parser.add_argument("--fleets", nargs="*", choices=FLEETS, metavar="FLEET", help="by default all")
    parser.add_argument(
        "--strategies", nargs="*", choices=STRATEGIES, default=STRATEGIES, metavar="NAME", help="by default all"
    )
    parser.add_argument(
        "--utilisation", type=float, default=UTILISATION, help="of the devices' peak while they compute"
    )
    options = parser.parse_args()
    question = Question(
        fleets=tuple(options.fleets or (FLEETS[-2:] if options.quick else FLEETS)),
        workloads=WORKLOADS[:: len(WORKLOADS) - 1] if options.quick else WORKLOADS,
        strategies=tuple(options.strategies),
        utilisation=options.utilisation,
    )
    return 0 if end_to_end(options.json, question, Console(width=160)) else 1


if __name__ == "__main__":
    sys.exit(main())
