"""Checkpoints of large models: how much memory do a save, an export and a resume take?

`python benchmarks/large_models/checkpoints.py [--quick] [--json PATH]`

A Qwen3 of 0.12 and of 0.6 billion parameters (bfloat16, random values). Each part runs in a process of its own, once as
it is and once as it was before: the whole in memory. `peak` is the most resident memory (VmHWM) above that after the
imports, pages of mapped files included.

| part | now | before |
|---|---|---|
| save | a device's save comes over loopback and lands on disk | received into memory, then safetensors' `save_file` |
| export | `export_model` | the module is built and filled, then `save_pretrained` |
| resume | digests are checked, then each tensor's bytes are read as a device gets them | all tensors in memory |

Exit code 1: the coordinator's process would take more than 450 MB in a save or a resume, or an export more than its
largest tensor and 64 MiB.
"""

from __future__ import annotations

import subprocess
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
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from isthmus.api.export import export_model
from isthmus.api.folder import RunFolder
from isthmus.data import DataSpec
from isthmus.experiments import latest_checkpoint, read_tensors
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.job import Job, TrainingConfig
from isthmus.models import ModelSpec, build_model, model_on_meta, save_hugging_face
from isthmus.protocol.run_messages import ItemReported
from isthmus.runtime.messages.run import ToCoordinator
from isthmus.runtime.transport.channel import Landing, SocketChannel, dial, in_host_memory
from isthmus.runtime.transport.listener import Listener
from isthmus.training.checkpoint import CheckpointWriter, Manifest, checkpoint_files, load_checkpoint
from isthmus.training.layout import header_of, pack

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, own_status, write_figures

LATEST = Path(__file__).parent / "results" / "checkpoints.json"
QWEN3 = {"vocab_size": 151_936, "head_dim": 128, "tie_word_embeddings": True, "dtype": "bfloat16"}
SIZES = {
    "0.12 B": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 8},
    "0.6 B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
}
MOST_MIB, SLACK_MIB = 450e6 / 2**20, 64


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """One part in one process."""

    model: str
    part: str
    weights_mib: float
    largest_mib: float
    imports_mib: float
    peak_mib: float
    seconds: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    runs: tuple[Found, ...]


def make_run(folder: Path, size: str) -> None:
    """A finished run's folder: no more than one tensor is ever in memory."""
    config = Qwen3Config.from_dict({**QWEN3, **SIZES[size], "num_key_value_heads": 8})
    config.architectures = [Qwen3ForCausalLM.__name__]
    config.save_pretrained(folder / "config")
    options: dict[str, object] = {
        "path": str(folder / "config"),
        "task": "causal-lm",
        "random_weights": True,
        "dtype": "bfloat16",
    }
    model = ModelSpec(name="hf", options=options)
    data = DataSpec(kind="text", options={"files": "stdlib", "sequence_length": 64, "max_bytes": 200_000})
    job = Job(name="large", model=model, data=data, training=TrainingConfig(steps=1, batch_size=2, micro_batches=2))
    run = RunFolder(folder / "run")
    device = Device(name="here-0", region="here", flops_per_s=1e12, memory_bytes=1 << 34)
    run.begin(job, Fleet(name="one", devices=(device,), links=Links(default=Link(0.001, 1e9))), None, 0)
    writer = CheckpointWriter(run.checkpoints)
    writer.write(1, "stage-0", values_like(model_on_meta(model)))
    writer.commit(Manifest(step=1, seed=job.training.seed, batch=2))


def values_like(module: torch.nn.Module) -> dict[str, Tensor]:
    """Random values in the memory of the largest parameter, all of them."""
    shapes = {name: p.shape for name, p in module.named_parameters()}
    memory = torch.randn(max(s.numel() for s in shapes.values()), generator=torch.Generator().manual_seed(0)) / 50
    memory = memory.to(torch.bfloat16)
    return {name: memory[: shape.numel()].view(shape) for name, shape in shapes.items()}


def received(folder: Path, landing: Landing) -> None:
    """Print the port, then take one message."""
    done: list[object] = []
    listener = Listener("127.0.0.1")
    listener.start(lambda channel: done.append(channel.receive(landing=landing)))
    print(listener.port, flush=True)
    while not done:
        time.sleep(0.01)


def send_save(port: int, values: dict[str, Tensor]) -> None:
    channel: SocketChannel = dial("127.0.0.1", port, "coordinator", 60.0)
    headers = tuple(header_of(name, t) for name, t in values.items())
    body = ItemReported(item=0, epoch=0)
    channel.send(ToCoordinator(run="run", body=body, tensors=headers), [pack(t) for t in values.values()])
    channel.receive()  # until the other side has ended


def save(folder: Path) -> None:
    writer = CheckpointWriter(folder / "saved")

    def land(message: object, fill: Callable[[memoryview], None]) -> list[Tensor]:
        assert isinstance(message, ToCoordinator)
        writer.keep(1, "stage-0", writer.land(message.tensors, fill))
        return []

    received(folder, land)


def save_before(folder: Path) -> None:
    def land(message: object, fill: Callable[[memoryview], None]) -> list[Tensor]:
        assert isinstance(message, ToCoordinator)
        tensors = in_host_memory(message, fill)
        save_file({h.name: t for h, t in zip(message.tensors, tensors, strict=True)}, folder / "before.safetensors")
        return tensors

    received(folder, land)


def export_before(folder: Path) -> None:
    run = RunFolder(folder / "run")
    module = build_model(run.job().model)
    load_checkpoint(module, latest_checkpoint(run.checkpoints))
    save_hugging_face(module, folder / "before")


def resume(folder: Path) -> None:
    for stored in checkpoint_files(latest_checkpoint(folder / "run" / "checkpoints")).values():
        for _ in stored.pieces():
            pass


PARTS: dict[str, Callable[[Path], object]] = {
    "save": save,
    "save before": save_before,
    "export": lambda folder: export_model(folder / "run", folder / "exported"),
    "export before": export_before,
    "resume": resume,
    "resume before": lambda folder: read_tensors(latest_checkpoint(folder / "run" / "checkpoints")),
}


def child(part: str, folder: Path) -> None:
    imports, began_s = own_status("VmRSS"), time.monotonic()
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is what is resident now
    PARTS[part](folder)
    figures = {"imports": imports, "peak": own_status("VmHWM") - imports, "seconds": time.monotonic() - began_s}
    print(msgspec.json.encode(figures).decode(), flush=True)


def measured(size: str, part: str, folder: Path, values: dict[str, Tensor]) -> Found:
    command = [sys.executable, __file__, "--part", part, "--folder", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None, "a pipe"
        if part.startswith("save"):
            send_save(int(process.stdout.readline()), values)
        figures = msgspec.json.decode(process.stdout.read().splitlines()[-1], type=dict[str, float])
    sizes = [t.nbytes / 2**20 for t in values.values()]
    return Found(
        model=size,
        part=part,
        weights_mib=sum(sizes),
        largest_mib=max(sizes),
        imports_mib=figures["imports"] / 2**20,
        peak_mib=figures["peak"] / 2**20,
        seconds=figures["seconds"],
    )


def is_bounded(found: Found) -> bool:
    if found.part == "export":
        return found.peak_mib <= found.largest_mib + SLACK_MIB
    return found.part.endswith("before") or found.imports_mib + found.peak_mib <= MOST_MIB


def main() -> None:
    parser = options_of(__doc__, LATEST, quick="0.12 B alone")
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.part:
        child(options.part, options.folder)
        return
    found: list[Found] = []
    for size in list(SIZES)[: 1 if options.quick else None]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make_run(folder, size)
            values = values_like(model_on_meta(RunFolder(folder / "run").job().model))
            found += [measured(size, part, folder, values) for part in PARTS]
    table = Table("model", "part", "weights MiB", "imports MiB", "peak MiB", "seconds")
    for f in found:
        numbers = (f.weights_mib, f.imports_mib, f.peak_mib)
        table.add_row(f.model, f.part, *(f"{n:.0f}" for n in numbers), f"{f.seconds:.1f}")
    Console().print(table)
    write_figures(options.json, Report(when=datetime.now(UTC).isoformat(), host=machine(), runs=tuple(found)))
    sys.exit(0 if all(map(is_bounded, found)) else 1)


if __name__ == "__main__":
    main()
