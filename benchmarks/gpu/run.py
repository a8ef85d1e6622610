"""Pipelines, a lost device and federated rounds on this machine's accelerator.

`python benchmarks/gpu/run.py [--device cuda:0] [--quick] [--only PART ...] [--case TEXT] [--peers] [--json PATH]`

With an accelerator the full sizes are run, and rows that are not run again stay in the results file. Without one, or
with --quick, small sizes show that the benchmark works, and full rows that no machine has run yet say so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import lost_device
import msgspec
import pipelines
import rounds
from gpu_cases import FULL, SMALL, lost_case
from lost_device import Recovery
from pipelines import Pipeline
from rich.console import Console
from rounds import Round
from tables import pipelines_table, recoveries_table, rounds_table

from isthmus.accelerators import accelerator_names, resolve_accelerator

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "latest.json"
PARTS = ("pipelines", "recovery", "federated")
Found = Pipeline | Recovery | Round
MEMORY_LIMIT = 0.05


class Report(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    pipelines: tuple[Pipeline, ...] = ()
    recoveries: tuple[Recovery, ...] = ()
    rounds: tuple[Round, ...] = ()

    def having(self, host: str, new: Found) -> Report:
        """With this row, in place of an earlier one of the same size and name on the same device."""
        field = {Pipeline: "pipelines", Recovery: "recoveries", Round: "rounds"}[type(new)]
        kept = [row for row in getattr(self, field) if _key(row) != _key(new)]
        return msgspec.structs.replace(self, host=host, **{field: (*kept, new)})

    @property
    def good(self) -> bool:
        return all(abs(row.memory_error) <= MEMORY_LIMIT for row in self.pipelines if row.size == "full")


def _key(row: Found) -> tuple[str, ...]:
    return (row.size, row.key, row.device, row.side if isinstance(row, Round) else "")


def measurements(
    device: str, hardware: str, size: str, parts: list[str], *, case: str, peers: bool
) -> Iterator[Callable[[], list[Found]]]:
    """Each gives its rows when it is called."""
    when = datetime.now(UTC).isoformat(timespec="minutes")
    cases = FULL if size == "full" else SMALL
    if "pipelines" in parts:
        for one in cases:
            if case in one.key:
                yield lambda one=one: [pipelines.measure(one, device, hardware, when)]
    if "recovery" in parts:
        lost = lost_case(cases)
        yield lambda: [lost_device.measure(lost, device, hardware, when)]
    if "federated" in parts:
        yield lambda: [*rounds.measure(size, device, hardware, when, peers=peers)]
        if device != "cpu":
            yield lambda: [*rounds.measure(size, "cpu", _processor(), when, peers=False)]


def _processor() -> str:
    return f"CPU, {os.cpu_count()} cores"


def hardware_of(device: str) -> str:
    """In a process of its own: this one must not start the accelerator's driver."""
    if device == "cpu":
        return _processor()
    asks = "import sys; from isthmus.accelerators import open_accelerator; print(open_accelerator(sys.argv[1]).name)"
    done = subprocess.run([sys.executable, "-c", asks, device], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def main() -> int:
    parser = options_of(__doc__, LATEST, "small sizes, on an accelerator too")
    parser.add_argument("--device", default="auto", help="cuda:0, cpu, checked; default: the first accelerator, if any")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS, metavar="PART", help="these parts only")
    parser.add_argument("--case", default="", metavar="TEXT", help="pipelines with this in their names, as 'GPT-2'")
    parser.add_argument("--peers", action="store_true", help="Flower too: makes its environment, about 3 GB, once")
    options = parser.parse_args()
    device = resolve_accelerator(options.device, "--device")
    size = "full" if device in accelerator_names() and not options.quick else "small"
    hardware = hardware_of(device)
    host = machine()
    found = msgspec.json.decode(options.json.read_bytes(), type=Report) if options.json.is_file() else Report(host=host)
    failed = 0
    for measure in measurements(device, hardware, size, options.only, case=options.case, peers=options.peers):
        try:
            rows = measure()
        except Exception:  # on a machine that is lent for minutes the other rows are worth having
            traceback.print_exc()
            failed += 1
            continue
        for row in rows:
            found = found.having(host, row)
        write_figures(options.json, found)
    console = Console(width=130)
    for table in (pipelines_table(found.pipelines), recoveries_table(found.recoveries), rounds_table(found.rounds)):
        console.print(table)
    return 0 if found.good and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
