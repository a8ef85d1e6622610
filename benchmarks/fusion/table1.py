"""FusionLLM's Table 1: GPUs beside each other to train GPT-3 (175B), by our count of FLOPs and bytes.

`python benchmarks/fusion/table1.py [--json PATH]`

Two layers of our GPT are captured at GPT-3's width in bfloat16, without weights, and repeated. GPU days are FLOPs over
the card's peak, as the paper has them: no card reaches it. The number of GPUs to load the model is that of parts that
pass a cut: an attention, an MLP, the embedding and the head are whole. To train adds gradients and Adam's state as the
cost model counts them, and what one micro-batch of one sequence keeps where layers compute their forward twice.
Ends with 1 where a figure differs from the paper's by more than the README explains.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from isthmus.cost import parameter_state

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "dtfm"))
from gpt3 import TOKENS, Part, Shape, model_flops, parts_of

from harness import options_of, write_figures

LATEST = Path(__file__).parent / "results" / "table-1.json"
GPT3 = Shape("GPT3-175B", 96, 12288, 96)
TRAINED_TOKENS = 300e9
"""Brown et al. 2020, table 2.1."""
PAPER_FLOPS = 3.14e23
DAY_S = 24 * 3600


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the paper's table."""

    name: str
    dollars: int
    tflops: float
    memory_gb: int
    days: int
    to_load: int


CARDS = (
    Card(name="H100", dollars=37_799, tflops=756, memory_gb=80, days=4807, to_load=9),
    Card(name="A100", dollars=6780, tflops=311.84, memory_gb=80, days=23_308, to_load=9),
    Card(name="RTX 4090", dollars=1699, tflops=165.16, memory_gb=24, days=22_004, to_load=30),
    Card(name="RTX 4080", dollars=989, tflops=97.5, memory_gb=16, days=37_274, to_load=44),
    Card(name="RTX 3080", dollars=679, tflops=59.5, memory_gb=10, days=61_079, to_load=70),
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    card: Card
    days: float
    load_fp32: int | None
    """GPUs that hold all weights; None where a part does not fit."""
    load_bf16: int | None
    train: int | None
    dollars_to_train_in_a_day: float
    """Price of so many GPUs as train it in one day at their peak."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    parameters: int
    flops: float
    rows: list[Row]

    @property
    def good(self) -> bool:
        """The FLOPs within 5 %; the days within 5 % but for the A100, whose row in the paper is of half its speed; and
        GPUs to load in fp32 at least as many as weights alone need."""
        near = abs(self.flops / PAPER_FLOPS - 1) < 0.05
        days = all(abs(row.days / row.card.days - 1) < 0.05 for row in self.rows if row.card.name != "A100")
        return near and days and all((row.load_fp32 or 999) >= row.card.to_load for row in self.rows)


def packed(sizes: Sequence[int], memory_bytes: float) -> int | None:
    """The least number of devices that hold consecutive parts of these sizes; None where one is too large."""
    if max(sizes) > memory_bytes:
        return None
    devices, free = 1, memory_bytes
    for size in sizes:
        if size > free:
            devices, free = devices + 1, memory_bytes
        free -= size
    return devices


def row(card: Card, parts: Sequence[Part], flops: float) -> Row:
    state, memory_bytes = parameter_state("adamw", narrow=True), card.memory_gb * 1e9
    each = 2 + state.master_bytes + state.gradient_bytes + state.optimizer_bytes
    days = flops / (card.tflops * 1e12) / DAY_S
    return Row(
        card=card,
        days=days,
        load_fp32=packed([4 * part.parameters for part in parts], memory_bytes),
        load_bf16=packed([2 * part.parameters for part in parts], memory_bytes),
        train=packed([each * part.parameters + part.kept_bytes.at(1) for part in parts], memory_bytes),
        dollars_to_train_in_a_day=days * card.dollars,
    )


def main() -> int:
    options = options_of(__doc__, LATEST).parse_args()
    parts = parts_of(GPT3, checkpointed=True)
    flops = model_flops(GPT3) * TRAINED_TOKENS / TOKENS
    found = Report(
        when=datetime.now(UTC).strftime("%Y-%m-%d"),
        parameters=sum(part.parameters for part in parts),
        flops=flops,
        rows=[row(card, parts, flops) for card in CARDS],
    )
    write_figures(options.json, found)
    drawn = Table(
        "GPU", "days, paper", "days", "load, paper", "load fp32", "load bf16", "train", "M$ to train in a day"
    )
    for r in found.rows:
        counts = [str(n or "does not fit") for n in (r.load_fp32, r.load_bf16, r.train)]
        price = f"{r.dollars_to_train_in_a_day / 1e6:.1f} M$"
        drawn.add_row(r.card.name, str(r.card.days), f"{r.days:.0f}", str(r.card.to_load), *counts, price)
    Console(width=120).print(drawn)
    print(f"{found.parameters / 1e9:.1f} billion parameters, {found.flops:.3g} FLOPs (paper: {PAPER_FLOPS:.3g})")
    return 0 if found.good else 1


if __name__ == "__main__":
    sys.exit(main())
