"""`python -m isthmus_testing.lab` compares the links of a fleet with what a lab of it measures."""

from __future__ import annotations

import argparse
import sys
from itertools import permutations

import msgspec
from rich.console import Console
from rich.table import Table

from isthmus.errors import IsthmusError
from isthmus.fleet import Fleet
from isthmus.fleet.built_in import resolve_fleet
from isthmus_testing.lab.lab import Lab, example_fleet, measure

_TITLE = "One-way delay (ms) and TCP payload (Mbit/s), nominal and measured"


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    target: str
    nominal_delay_s: float
    delay_s: float
    nominal_payload_bytes_per_s: float
    payload_bytes_per_s: float
    drops: int


def _measure_all(fleet: Fleet, duration_s: float) -> list[_Row]:
    rows: list[_Row] = []
    with Lab(fleet) as lab:
        for source, target in permutations(fleet.names, 2):
            found = measure(lab, source, target, duration_s)
            row = _Row(
                source=source,
                target=target,
                nominal_delay_s=fleet.link(source, target).latency_s,
                delay_s=found.delay_s,
                nominal_payload_bytes_per_s=lab.payload_bandwidth_bytes_per_s(source, target),
                payload_bytes_per_s=found.payload_bytes_per_s,
                drops=lab.statistics().pairs[source, target].drops,
            )
            rows.append(row)
    return rows


def _table(rows: list[_Row]) -> Table:
    table = Table("from", "to", title=_TITLE)
    for heading in ("delay", "measured", "payload", "measured", "drops"):
        table.add_column(heading, justify="right")
    for row in rows:
        delays = (f"{1e3 * delay_s:.1f}" for delay_s in (row.nominal_delay_s, row.delay_s))
        rates = (f"{8e-6 * rate:.1f}" for rate in (row.nominal_payload_bytes_per_s, row.payload_bytes_per_s))
        table.add_row(row.source, row.target, *delays, *rates, str(row.drops))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m isthmus_testing.lab", description=_TITLE)
    parser.add_argument("fleet", nargs="?", help="a built-in fleet or a TOML file; three example devices if absent")
    parser.add_argument("--devices", type=int, default=3, help="how many of the fleet's devices take part")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to send on each link, from 1")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    try:
        fleet = example_fleet() if options.fleet is None else resolve_fleet(options.fleet)
        rows = _measure_all(fleet.thin(options.devices), options.seconds)
    except IsthmusError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if options.json:
        print(msgspec.json.encode(rows).decode())
    else:
        Console().print(_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
