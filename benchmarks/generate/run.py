"""Tokens per second of a pipeline over emulated links, for 1 and 16 requests, beside a single process.

`python benchmarks/generate/run.py [--quick]`

A GPT of eight blocks is trained for one step on four devices that are 50 ms from each other, then served: as its plan
has it, also while a device is killed, and over a chain that is planned for throughput. The bound is what the links'
latency alone allows. The single process runs the same stages' code without a link, one request at a time.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.table import Table

import isthmus
from isthmus.api.folder import RunFolder
from isthmus.api.generation import Piece, ServingChoices, generate, served_run
from isthmus.graph import Flow, Ref, partition
from isthmus.job.first_weights import prepare_served, token_input
from isthmus.protocol.generation import Sampling
from isthmus.training.generation import ServedStage, TokenChooser

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
from tests.runtime.commands import devices_of

from harness import machine, options_of, write_figures

HERE = Path(__file__).parent
LATENCY_S = 0.05
REQUESTS = 16
LAYERS, WIDTH, CONTEXT = 8, 128, 128
PROMPT = tuple(b"def main(arguments: list[str]) -> int:")
FLEET = f"""
name = "four-places"
[[device]]
name = "place"
compute = "100 GFLOPS"
memory = "2 GiB"
count = 4
[links]
intra = {{ latency = "{LATENCY_S * 1e3:g} ms", bandwidth = "100 Mbit/s" }}
"""
JOB = f"""
name = "generate"
planner = "equal-compute"
[model]
name = "gpt"
options = {{ layers = {LAYERS}, width = {WIDTH}, sequence_length = {CONTEXT} }}
[data]
kind = "text"
options = {{ files = "stdlib", sequence_length = {CONTEXT}, max_bytes = 100000 }}
[training]
steps = 1
batch_size = 8
micro_batches = 4
[[optimizer]]
name = "sgd"
lr = 0.01
"""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    devices: int
    requests: int
    tokens_per_s: float
    predicted_tokens_per_s: float | None = None
    bound_tokens_per_s: float | None = None
    """None without links."""
    pause_s: float | None = None
    """Longest time without a token of any request, where a device was killed."""


def trained(folder: Path) -> Path:
    (folder / "fleet.toml").write_text(FLEET)
    (folder / "job.toml").write_text(JOB)
    fleet = {"fleet": str(folder / "fleet.toml")}
    return isthmus.train(folder / "job.toml", run=folder / "run", overrides=fleet).path


def single_process(run: Path, tokens: int) -> Row:
    """One request, all operators in this process, with a cache."""
    folder = RunFolder.existing(run)
    served = prepare_served(folder.job(), folder.checkpoints, CONTEXT)
    flow = Flow(served.graph)
    (graph,) = partition(flow, {op.name: 0 for op in flow.operators})
    stage = ServedStage(graph, served.weights)

    def answer() -> None:
        cache, chooser = stage.cache(CONTEXT), TokenChooser(Sampling(max_tokens=tokens), 0, served.vocabulary)
        given, start, last = list(PROMPT), 0, False
        while not last:
            inputs = {Ref(token_input(flow)): torch.tensor([given])}
            token, last = chooser.choose(stage.run(cache, start, inputs, len(given))[served.graph.loss])
            start, given = start + len(given), [token]

    answer()  # warm
    began_s = time.monotonic()
    answer()
    rate = tokens / (time.monotonic() - began_s)
    return Row(what="single process", devices=1, requests=1, tokens_per_s=rate)


class Watched:
    """Times of tokens. With `kill`, the device is killed at half of them."""

    def __init__(self, expected: int, kill: str | None) -> None:
        self._half, self._kill = expected // 2, kill
        self._times_s: list[float] = []

    def __call__(self, _: Piece) -> None:
        self._times_s.append(time.monotonic())
        if self._kill is not None and len(self._times_s) == self._half:
            os.kill(devices_of(os.getpid())[self._kill], signal.SIGKILL)

    @property
    def pause_s(self) -> float:
        ordered = sorted(self._times_s)
        return max(after - before for before, after in itertools.pairwise(ordered))


def over_links(run: Path, what: str, choices: ServingChoices, tokens: int, kill: int | None = None) -> Row:
    """`kill`: which stage's device."""
    prompts = [PROMPT] * choices.at_once
    with served_run(run, choices, lambda _: None) as service:
        generate(service, prompts, Sampling(max_tokens=2))  # warm
        chain = service.statistics.chain
        watched = Watched(tokens * len(prompts), None if kill is None else chain.devices[kill])
        found = generate(service, prompts, Sampling(max_tokens=tokens), watched)
        found.check()
    devices = len(chain.devices)
    return Row(
        what=what,
        devices=devices,
        requests=choices.at_once,
        tokens_per_s=found.tokens_per_s,
        predicted_tokens_per_s=None if kill is not None else chain.tokens_per_s,
        bound_tokens_per_s=choices.at_once / devices / LATENCY_S if devices > 1 and kill is None else None,
        pause_s=None if kill is None else watched.pause_s,
    )


def main() -> None:
    torch.set_num_threads(1)
    options = options_of(__doc__, HERE / "results" / "generate.json", "16 tokens instead of 48").parse_args()
    tokens = 16 if options.quick else 48
    many, planned = ServingChoices(at_once=REQUESTS), ServingChoices(objective="throughput", at_once=REQUESTS)
    measured: list[Callable[[Path], Row]] = [
        lambda run: single_process(run, tokens),
        lambda run: over_links(run, "the run's plan", ServingChoices(at_once=1), tokens),
        lambda run: over_links(run, "the run's plan", many, tokens),
        lambda run: over_links(run, "the second device is killed", many, tokens, kill=1),
        lambda run: over_links(run, "--objective throughput", planned, tokens),
    ]
    rows = list[Row]()
    with tempfile.TemporaryDirectory() as temporary:
        run = trained(Path(temporary))
        for measure in measured:  # figures are kept after each row
            rows.append(measure(run))
            Console().print(table(rows))
            write_figures(options.json, {"machine": machine(), "tokens": tokens, "rows": rows})


def table(rows: list[Row]) -> Table:
    drawn = Table("", title=f"{LATENCY_S * 1e3:g} ms between any two devices")
    for heading in ("devices", "requests", "tokens/s", "predicted", "bound by latency", "pause"):
        drawn.add_column(heading, justify="right")
    for row in rows:
        figures = (row.tokens_per_s, row.predicted_tokens_per_s, row.bound_tokens_per_s)
        shown = ["" if figure is None else f"{figure:,.3g}" for figure in figures]
        pause = "" if row.pause_s is None else f"{row.pause_s:.2f} s"
        drawn.add_row(row.what, str(row.devices), str(row.requests), *shown, pause)
    return drawn


if __name__ == "__main__":
    main()
