"""The rows as tables. Full rows that no machine has run say so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpu_cases import FULL, lost_case
from lost_device import TORCHFT_PARAMETERS, TORCHFT_S, Recovery
from pipelines import Pipeline
from rich.table import Table
from rounds import WORKLOADS, Round

NOT_RUN = "not run"


def _drawn(title: str, *headings: str) -> Table:
    table = Table("", "on", title=title)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _add_missing(table: Table, names: Iterable[str], have: Sequence[Pipeline | Recovery | Round]) -> None:
    full = {row.key for row in have if row.size == "full"}
    for name in dict.fromkeys(names):
        if name not in full:
            table.add_row(name, NOT_RUN)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def pipelines_table(rows: Sequence[Pipeline]) -> Table:
    table = _drawn(
        "Pipelines in bf16 on one accelerator, links of 200 Mbit/s and 50 ms",
        "parameters",
        "tokens/s",
        "step",
        "predicted",
        "overlap",
        "copies beside work",
        "memory model",
    )
    for row in rows:
        table.add_row(
            row.key,
            row.device,
            f"{row.parameters / 1e6:,.1f} M",
            f"{row.tokens_per_s:,.0f}",
            f"{row.step_s:.3f} s",
            f"{row.error:+.1%}",
            _share(row.overlap),
            _share(row.copies_beside_work),
            f"{row.memory_error:+.1%}",
        )
    _add_missing(table, (case.key for case in FULL), rows)
    table.caption = (
        "overlap: of the shorter of sending and computing, the share beside the other; memory model: predicted "
        "against taken, of the stage that is furthest off"
    )
    return table


def recoveries_table(rows: Sequence[Recovery]) -> Table:
    table = _drawn("A device lost, a spare in its place", "state", "at work again", "next step done", "redone")
    for row in rows:
        table.add_row(
            row.key,
            row.device,
            f"{row.state_bytes / 1e9:.3f} GB",
            f"{row.at_work_s:.1f} s",
            f"{row.step_s:.1f} s",
            f"{row.redone} steps",
        )
    _add_missing(table, [lost_case(FULL).key], rows)
    table.add_row(f"torchft, {TORCHFT_PARAMETERS / 1e9:.0f} B, as it reports", "", "", f"{TORCHFT_S:.0f} s")
    return table


def rounds_table(rows: Sequence[Round]) -> Table:
    table = _drawn("Federated rounds", "side", "median round")
    for row in rows:
        table.add_row(row.key, row.device, row.side, f"{row.round_s * 1e3:.1f} ms")
    _add_missing(table, [WORKLOADS["full"]], rows)
    return table
