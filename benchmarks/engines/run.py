"""A stage's forward and backward by JAX against torch on this machine's CPU, and how long JAX compiles it.

`python benchmarks/engines/run.py [--quick] [--threads N]`

Each model is one stage. Both engines compute the same micro-batch in turn, the quickest of several passes counts. Every
stage is measured twice, each time in a process of its own: the second finds the compiled code of the first on disk.
Seconds are the process's CPU time, of all its threads: other programs do not count.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from isthmus.data import ColumnSpec
from isthmus.graph import Ref
from isthmus.models import ModelSpec, build_model
from isthmus.training.engine import EngineConfig, TorchEngine
from isthmus.training.jax import compute_by_jax

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests" / "training")]
from in_process import (  # pyright: ignore[reportMissingImports]  # the stages of a cut model in one process
    Pipeline,
    batches,
    capture_of,
    weights_of,
)

from harness import machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "latest.json"
PASSES = 9
SIZE = 4
"""Samples of a micro-batch."""
TOKENS, VOCABULARY = 64, 512
TEXT = {name: ColumnSpec(dtype="int64", shape=(TOKENS,), limit=VOCABULARY) for name in ("input_ids", "labels")}
PHOTOS = {"pixel_values": ColumnSpec(dtype="float32", shape=(3, 64, 64)), "labels": ColumnSpec(dtype="int64", limit=4)}
DIGITS = {"pixel_values": ColumnSpec(dtype="float32", shape=(1, 32, 32)), "labels": ColumnSpec(dtype="int64", limit=10)}
BERT = {
    "input_ids": ColumnSpec(dtype="int64", shape=(TOKENS,), limit=VOCABULARY),
    "attention_mask": ColumnSpec(dtype="int64", shape=(TOKENS,), limit=2),
    "token_type_ids": ColumnSpec(dtype="int64", shape=(TOKENS,), limit=2),
    "labels": ColumnSpec(dtype="int64", limit=3),
}
WIDE = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": VOCABULARY}
MODELS: dict[str, tuple[ModelSpec, dict[str, ColumnSpec]]] = {
    "GPT, 4 layers of width 256": (
        ModelSpec(
            name="gpt",
            options={"vocab_size": VOCABULARY, "sequence_length": TOKENS, "width": 256, "layers": 4, "heads": 4},
        ),
        TEXT,
    ),
    "BERT, 4 layers of width 256": (
        ModelSpec(
            name="hf-bert-classifier",
            options={
                **WIDE,
                "intermediate_size": 1024,
                "num_labels": 3,
                "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
            },
        ),
        BERT,
    ),
    "Llama, 4 layers of width 256": (
        ModelSpec(name="hf-llama", options={**WIDE, "intermediate_size": 1024, "num_key_value_heads": 2}),
        TEXT,
    ),
    "ResNet, 8 blocks": (
        ModelSpec(
            name="hf-resnet",
            options={
                "embedding_size": 32,
                "hidden_sizes": [32, 64, 128, 256],
                "depths": [2, 2, 2, 2],
                "layer_type": "basic",
                "num_labels": 4,
            },
        ),
        PHOTOS,
    ),
    "U-Net, width 32": (ModelSpec(name="unet", options={"width": 32, "depth": 2}), DIGITS),
}


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """By one process."""

    torch_s: float
    jax_s: float
    """Per micro-batch."""
    compile_s: float
    note: str
    """What a device says of it."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    operators: int
    first: Timed
    second: Timed

    @property
    def torch_s(self) -> float:
        return min(self.first.torch_s, self.second.torch_s)

    @property
    def jax_s(self) -> float:
        return min(self.first.jax_s, self.second.jax_s)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    threads: int
    torch: str
    rows: tuple[Row, ...]


def stage_of(name: str) -> tuple[TorchEngine, dict[Ref, torch.Tensor]]:
    """The whole model, and a micro-batch."""
    spec, columns = MODELS[name]

    def build() -> torch.nn.Module:
        return build_model(spec)

    captured = capture_of(build, columns)
    pipeline = Pipeline(captured, [], weights_of(build, captured), EngineConfig(micro_batch_size=SIZE))
    (data,) = batches(columns, 1, SIZE)
    return pipeline.engines[0], {Ref(pipeline.placeholders[key]): value for key, value in data.items()}


def measured(name: str, passes: int) -> Timed:
    engine, batch = stage_of(name)
    started_s = time.process_time()
    note = compute_by_jax(engine, batch)
    compile_s = time.process_time() - started_s
    programs = {"torch": engine.eager, "jax": engine.program}
    taken = dict.fromkeys(programs, float("inf"))
    for _ in range(passes):
        for which, program in programs.items():
            started_s = time.process_time()
            engine.try_out(program, batch)
            taken[which] = min(taken[which], time.process_time() - started_s)
    return Timed(torch_s=taken["torch"], jax_s=taken["jax"], compile_s=compile_s, note=note)


def in_a_process(name: str, passes: int, threads: int, cache: str) -> Timed:
    """With its compiled code in the folder `cache`."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "JAX_COMPILATION_CACHE_DIR": cache}
    arguments = [sys.executable, __file__, "--one", name, "--passes", str(passes), "--threads", str(threads)]
    done = subprocess.run(arguments, env=environment, check=True, capture_output=True)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Timed)


def row(name: str, passes: int, threads: int) -> Row:
    with tempfile.TemporaryDirectory() as cache:
        first, second = (in_a_process(name, passes, threads, cache) for _ in range(2))
    return Row(model=name, operators=len(stage_of(name)[0].eager.steps), first=first, second=second)


def table(found: Report) -> Table:
    drawn = Table("model", title=f"A micro-batch of {SIZE} forward and backward, {found.threads} thread(s)")
    for heading in ("operators", "torch", "JAX", "JAX / torch", "compiled in", "with kept code"):
        drawn.add_column(heading, justify="right")
    for r in found.rows:
        drawn.add_row(
            r.model,
            str(r.operators),
            f"{r.torch_s * 1e3:.1f} ms",
            f"{r.jax_s * 1e3:.1f} ms",
            f"{r.jax_s / r.torch_s:.2f}",
            f"{r.first.compile_s:.1f} s",
            f"{r.second.compile_s:.1f} s",
        )
    return drawn


def main() -> None:
    parser = options_of(__doc__, LATEST, quick="GPT alone, three passes")
    parser.add_argument("--threads", type=int, default=1, help="of each engine")
    parser.add_argument("--one", metavar="MODEL", help="measure one in this process and print JSON")
    parser.add_argument("--passes", type=int, default=PASSES, help="of each engine; the quickest counts")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one is not None:
        print(msgspec.json.encode(measured(options.one, options.passes)).decode())
        return
    names = list(MODELS)[:1] if options.quick else list(MODELS)
    rows, now = list[Row](), datetime.now(UTC).isoformat(timespec="seconds")
    for name in names:  # figures are kept after each model: all take minutes
        rows.append(row(name, 3 if options.quick else options.passes, options.threads))
        report = Report(
            when=now, host=machine(), threads=options.threads, torch=str(torch.__version__), rows=tuple(rows)
        )
        Console().print(table(report))
        write_figures(options.json, report)


if __name__ == "__main__":
    main()
