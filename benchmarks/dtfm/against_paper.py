"""The end-to-end tables, and DT-FM's published figures beside ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from end_to_end import STRATEGIES, Row
from rich.table import Table

PEERS = ("Megatron", "Megatron, in order", "ZeRO-3", "ZeRO-3, in order")
FLUIDSTACK_OF_PEAK = {("GPT3-1.3B", 40, 4096): 0.274, ("GPT3-6.7B", 32, 1024): 0.264, ("GPT3-13B", 40, 1024): 0.297}
"""DT-FM, section 10.5, with its scheduler."""
PUBLISHED = {
    ("Megatron", "dtfm-case5"): "3.8-4.8",
    ("ZeRO-3", "dtfm-case5"): "3.6 *",
    ("random", "dtfm-case5"): "up to 2.7",
    **{("Megatron", f"dtfm-case{n}"): "1.2-2.5" for n in range(1, 5)},
}
"""DT-FM, section 4.2: what it gains over each. * over the best of DeepSpeed's ZeRO-3 and its ZeRO-1 with a pipeline."""


def steps(rows: Sequence[Row]) -> Table:
    drawn = Table("fleet", "model x layers", title="Seconds a step (PFLOPS), simulated; Megatron and ZeRO-3 modelled")
    for heading in ("batch", *STRATEGIES, *PEERS):
        drawn.add_column(heading, justify="right")
    for fleet in dict.fromkeys(row.fleet for row in rows):
        drawn.add_section()
        for row in rows:
            if row.fleet == fleet:
                cells = (_cell(row, name) for name in (*STRATEGIES, *PEERS))
                drawn.add_row(fleet, f"{row.model} x {row.layers}", str(row.batch), *cells)
    drawn.caption = "FLOPs count once, although checkpointing computes a part of them twice"
    return drawn


def _cell(row: Row, name: str) -> str:
    step_s, pflops = row.step_s(name), row.pflops(name)
    return "-" if step_s is None or pflops is None else f"{step_s:.4g} ({pflops:.2g})"


def gains(rows: Sequence[Row]) -> Table:
    """How many times as long the others take, over the workloads of GPT3-1.3B, beside the paper's own gain."""
    drawn = Table("fleet", "over", title="Times as fast as the others: GPT3-1.3B, all depths and batches")
    for heading in ("the paper", "dtfm-genetic", "auto"):
        drawn.add_column(heading, justify="right")
    for fleet in dict.fromkeys(row.fleet for row in rows):
        drawn.add_section()
        mine = [row for row in rows if row.fleet == fleet and row.model == "GPT3-1.3B"]
        for other in ("random", *PEERS):
            ranges = (_range(row.over(name, other) for row in mine) for name in ("dtfm-genetic", "auto"))
            drawn.add_row(fleet, other, PUBLISHED.get((other, fleet), "-"), *ranges)
    drawn.caption = "*: the best of ZeRO-3 and ZeRO-1 with a pipeline"
    return drawn


def _range(found: Iterable[float | None]) -> str:
    known = [number for number in found if number is not None]
    return f"{min(known):.2f}-{max(known):.2f}" if known else "-"


def of_peak(rows: Sequence[Row]) -> Table:
    drawn = Table("model", title="FluidStack: share of the devices' peak")
    for heading in ("batch", "the paper", *STRATEGIES, *PEERS[:2]):
        drawn.add_column(heading, justify="right")
    for row in rows:
        published = FLUIDSTACK_OF_PEAK.get((row.model, row.layers, row.batch))
        if row.fleet == "fluidstack" and published is not None:
            shares = (row.of_peak(name) for name in (*STRATEGIES, *PEERS[:2]))
            cells = ("-" if share is None else f"{share:.1%}" for share in shares)
            drawn.add_row(f"{row.model} x {row.layers}", str(row.batch), f"{published:.1%}", *cells)
    return drawn


def closed_forms(rows: Sequence[Row]) -> Table:
    """How far the closed form is from the simulated step, and how long planning took."""
    drawn = Table("strategy", title="The closed form against the simulated step")
    for heading in ("median", "lowest", "highest", "planning, most"):
        drawn.add_column(heading, justify="right")
    for name in STRATEGIES:
        figures = [row.figures[name] for row in rows if name in row.figures]
        errors = sorted(f.closed_form_s / f.step_s - 1 for f in figures if f.step_s and f.closed_form_s)
        if errors:
            most_s = max(f.plan_s for f in figures)
            ends = (f"{e:+.1%}" for e in (errors[len(errors) // 2], errors[0], errors[-1]))
            drawn.add_row(name, *ends, f"{most_s:.1f} s")
    return drawn


def behind(rows: Sequence[Row]) -> list[str]:
    """Where `auto` takes longer than another layout, in words; it should be nowhere."""
    found: list[str] = []
    for row in rows:
        for name in STRATEGIES[:-1]:
            ratio = row.over(name, "auto")
            if ratio is not None and ratio > 1 + 1e-6:
                workload = f"{row.fleet}, {row.model} x {row.layers}, batch {row.batch}"
                found.append(f"{workload}: auto takes {ratio:.3f} times as long as {name}")
    return found
