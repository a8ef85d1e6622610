"""The start of a pretrained run: what is in memory, and what passes through the coordinator before the first step?

`python benchmarks/large_models/start.py [--size 0.12 --size 0.6] [--away] [--command [--random] [--before COMMIT]]`

A Qwen3 of random bfloat16 values is saved and trained with LoRA over three devices of this machine, for one step. The
coordinator is a process of its own; peaks are VmHWM of its /proc status and of its devices'. With `--away` devices do
not find the files: all weights come from the coordinator. Linux.

With `--command` it is `isthmus train` that runs, and is looked at from outside twenty times a second: its most resident
memory, how much of it was anonymous at most, its own and its ended children's CPU seconds until the first step, and the
time until then. Twice, the second time with the captures that the first has left. `--random` draws the weights;
`--before` runs the first with a commit's code.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
import transformers

from isthmus.cost import build_plan
from isthmus.experiments import RunOptions, Watcher, run_plan
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.graph import Flow, cuts
from isthmus.job import Job, prepare
from isthmus.protocol.run_messages import OpenItem, PlaceWeights
from isthmus.runtime.coordinator.host import CoordinatorHost
from isthmus.runtime.coordinator.parameter_store import WeightFiles
from isthmus.runtime.transport.channel import SocketChannel

SIZES: dict[str, dict[str, int]] = {
    "0.04": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4},
    "0.12": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 8},
    "0.6": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
}


def save(size: str, folder: Path, *, random: bool) -> None:
    """Write the model, or its config alone where the run draws the weights."""
    given: dict[str, Any] = {**SIZES[size], "vocab_size": 151936, "tie_word_embeddings": True, "dtype": "bfloat16"}
    given |= {
        "num_key_value_heads": given["num_attention_heads"] // 2,
        "head_dim": 128 if size in ("0.6", "1.7") else 64,
    }
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**given)
    (config if random else transformers.Qwen3ForCausalLM(config)).save_pretrained(folder)


def status_kb(pid: int) -> int:
    """The most memory that a process had at once."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmHWM")).split()[1])


def devices_kb() -> dict[str, int]:
    found: dict[str, int] = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode().strip()
            if words.startswith("isthmus device"):
                found[words] = status_kb(int(path.parent.name))
        except (OSError, StopIteration):
            continue
    return found


JOB = """
name = "start"
fleet = "{folder}/fleet.toml"
[model]
name = "hf"
[model.options]
path = "{folder}/model"
task = "causal-lm"
dtype = "bfloat16"
random_weights = {random}
[model.lora]
r = 8
[data]
kind = "text"
[data.options]
files = "stdlib"
sequence_length = 32
shift_labels = false
max_bytes = 60_000
[runtime]
emulate = false
timeout = "300 s"
[training]
steps = 1
batch_size = 2
micro_batches = 2
precision = "bf16"
[[optimizer]]
name = "adamw"
lr = 1e-4
"""
FLEET = """
name = "three"
[[device]]
name = "d"
region = "here"
compute = "1 TFLOPS"
memory = "16 GiB"
count = 3
[links]
intra = { latency = "100 us", bandwidth = "1 Gbit/s" }
"""


def command(source: Path, folder: Path, turns: int, *, random: bool) -> Iterator[dict[str, float]]:
    """`isthmus train` of this source, with no captures and then with its own."""
    (folder / "fleet.toml").write_text(FLEET)
    (folder / "job.toml").write_text(JOB.format(folder=folder, random=str(random).lower()))
    with tempfile.TemporaryDirectory() as kept:
        for turn in range(turns):
            environment = {**os.environ, "PYTHONPATH": f"{source}/src", "XDG_CACHE_HOME": kept, "OMP_NUM_THREADS": "1"}
            given = ["train", f"{folder}/job.toml", "--run", f"{kept}/run-{turn}"]
            began_s = time.monotonic()
            process = subprocess.Popen(
                [sys.executable, "-m", "isthmus", *given],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,  # where the steps are
                text=True,
            )
            found = dict.fromkeys(("peak_mb", "anonymous_mb", "cpu_s", "first_step_s"), 0.0)
            looking = threading.Thread(target=look, args=(process, found))
            looking.start()
            for line in process.stdout or ():
                if line.startswith("step 1/1"):
                    found["first_step_s"] = time.monotonic() - began_s
            looking.join()
            assert not process.wait() and found["first_step_s"], "the run failed"
            yield {name: round(figure, 1) for name, figure in found.items()}


def look(process: subprocess.Popen[str], found: dict[str, float]) -> None:
    while process.poll() is None:
        try:
            text = Path(f"/proc/{process.pid}/status").read_text()
            values = dict(line.split(":", 1) for line in text.splitlines())
            found["peak_mb"] = max(found["peak_mb"], int(values["VmHWM"].split()[0]) / 1e3)
            found["anonymous_mb"] = max(found["anonymous_mb"], int(values["RssAnon"].split()[0]) / 1e3)
            if not found["first_step_s"]:
                ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:15]
                found["cpu_s"] = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        except (OSError, KeyError):
            pass
        time.sleep(0.05)


def train(model: Path, folder: Path, *, away: bool) -> None:
    """In a process of its own, which is the coordinator."""
    text = {"files": "stdlib", "sequence_length": 32, "shift_labels": False, "max_bytes": 60_000}
    tables: dict[str, object] = {
        "name": "start",
        "model": {"name": "hf", "options": {"path": str(model), "task": "causal-lm"}, "lora": {"r": 8}},
        "data": {"kind": "text", "options": text},
        "runtime": {"emulate": False, "timeout": "120 s"},
        "training": {"steps": 1, "batch_size": 2, "micro_batches": 2, "precision": "bf16"},
        "optimizer": [{"name": "adamw", "lr": 1e-4}],
    }
    began_s, sent, figures = time.monotonic(), [0], dict[str, object]()
    send, open_item, order = SocketChannel.send, CoordinatorHost.open_item, cast("Any", CoordinatorHost)._send_with

    def counted(*arguments: object) -> int:
        size = send(*arguments)  # pyright: ignore
        sent[0] += size
        return size

    def opened(host: CoordinatorHost, item: OpenItem) -> None:
        if not figures:
            figures.update(bytes=sent[0], first_step_s=time.monotonic() - began_s)
        open_item(host, item)

    def placed(
        host: CoordinatorHost, device: str, body: object, weights: dict[str, object], peers: object = ()
    ) -> None:
        lora = sum(t.nbytes for name, t in weights.items() if "lora_" in name)  # pyright: ignore
        base[0] += sum(t.nbytes for t in weights.values()) - lora if isinstance(body, PlaceWeights) else 0  # pyright: ignore
        order(host, device, body, weights, peers)  # pyright: ignore

    base = [0]
    setattr(SocketChannel, "send", counted)  # noqa: B010
    setattr(CoordinatorHost, "open_item", opened)  # noqa: B010
    setattr(CoordinatorHost, "_send_with", placed)  # noqa: B010
    if away:
        setattr(WeightFiles, "of", lambda *_: ())  # noqa: B010
    prepared = prepare(msgspec.convert(tables, Job))
    planned_kb = status_kb(int(Path("/proc/self").resolve().name))
    devices = tuple(Device(name=f"d{i}", region="here", flops_per_s=1e12, memory_bytes=1 << 34) for i in range(3))
    fleet = Fleet(name="three", devices=devices, links=Links(default=Link(1e-4, 1e9)))
    legal = cuts(Flow(prepared.captured.train))
    ends = [legal[len(legal) * part // 3].position for part in (1, 2)]
    plan = build_plan(prepared.problem(fleet), fleet.names, ends, planner="benchmark")
    of_devices: dict[str, int] = {}
    watcher = Watcher(advanced=lambda *_: of_devices.update(devices_kb()))
    outcome = run_plan(prepared, plan, fleet, folder, RunOptions(emulate=False), watcher)
    figures |= {"outcome": outcome.outcome, "base_bytes": base[0], "after_planning_mb": planned_kb / 1e3}
    figures |= {"coordinator_mb": status_kb(int(Path("/proc/self").resolve().name)) / 1e3}
    figures |= {"devices_mb": {name: kb / 1e3 for name, kb in of_devices.items()}}
    print(json.dumps(figures))


def compared(size: str, folder: Path, before: Sequence[str], *, random: bool) -> None:
    """Print a line per source and turn."""
    root = Path(__file__).parents[2]
    for commit in ("", *before):
        source = folder / commit if commit else root
        if commit:
            subprocess.run(["git", "-C", root, "worktree", "add", "-q", "--detach", source, commit], check=True)
        for figures in command(source, folder, 1 if commit else 2, random=random):
            print(size, commit or "here", "random" if random else "file", json.dumps(figures), flush=True)
        if commit:
            subprocess.run(["git", "-C", root, "worktree", "remove", "--force", source], check=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", action="append", choices=SIZES)
    parser.add_argument("--away", action="store_true")
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--save", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--command", action="store_true")
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--before", action="append", default=[], metavar="COMMIT")
    chosen = parser.parse_args()
    if chosen.train:
        train(Path(chosen.train[0]), Path(chosen.train[1]), away=chosen.away)
    elif chosen.save:
        save(chosen.save[0], Path(chosen.save[1]), random=chosen.random)
    else:
        for size in chosen.size or ["0.12", "0.6", "1.7"]:
            with tempfile.TemporaryDirectory() as folder:
                here = [sys.executable, __file__]
                saved = [*here, *(["--random"] if chosen.random else []), "--save", size, f"{folder}/model"]
                subprocess.run(saved, check=True, capture_output=True)
                if chosen.command:
                    compared(size, Path(folder), chosen.before, random=chosen.random)
                    continue
                again = [*here, *(["--away"] if chosen.away else []), "--train", f"{folder}/model", f"{folder}/run"]
                print(size, subprocess.run(again, check=True, capture_output=True, text=True).stdout, flush=True)


if __name__ == "__main__":
    main()
