"""What does loading take? The devices of a run beside accelerate and transformers, from the same files.

`python benchmarks/large_models/load.py [--size 0.12 --size 0.6] [--away] [--full]`

A Qwen3 of random bfloat16 values is saved. transformers' `from_pretrained` and accelerate's
`load_checkpoint_and_dispatch` load it, each in a process of its own, and run it forward. Three devices of this machine
load a stage each, and train with LoRA for three steps. Of each process: megabytes in use (VmRSS, of them anonymous),
at most so far (VmHWM), and pages of code; of a device what the plan says too. With `--full` all weights train, with
`--away` devices have no files, and the coordinator sends all weights. Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from isthmus.cost import build_plan
from isthmus.experiments import RunOptions, Watcher, run_plan
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.free_memory import code_bytes
from isthmus.graph import Flow, cuts
from isthmus.job import Job, prepare
from isthmus.protocol.run_messages import OpenItem
from isthmus.runtime.coordinator.host import CoordinatorHost
from isthmus.runtime.coordinator.parameter_store import WeightFiles

HERE = Path(__file__).parent
KEYS = ("VmRSS", "RssAnon", "VmHWM")
TOKENS = 32


def memory_mb(pid: int | str = "self") -> dict[str, float]:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {key: int(lines[key].split()[0]) / 1e3 for key in KEYS} | {"code": code_bytes(pid) / 1e6}


def peer(name: str, folder: str) -> None:
    """In a process of its own."""
    import accelerate  # noqa: PLC0415
    import transformers  # noqa: PLC0415
    from transformers.models.qwen3 import Qwen3ForCausalLM  # noqa: PLC0415

    def by_accelerate() -> torch.nn.Module:
        config = cast("transformers.Qwen3Config", transformers.AutoConfig.from_pretrained(folder))
        with accelerate.init_empty_weights():
            model = Qwen3ForCausalLM(config).bfloat16()
        model.tie_weights()
        return cast("Any", accelerate).load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"})

    loads: dict[str, Callable[[], torch.nn.Module]] = {
        "transformers": lambda: Qwen3ForCausalLM.from_pretrained(folder),
        "accelerate": by_accelerate,
    }
    before = memory_mb()
    model = loads[name]()
    held_mb = sum(p.nbytes for p in model.parameters()) / 1e6
    figures = {"held_mb": held_mb, "before": before, "loaded": memory_mb()}
    with torch.no_grad():
        model(input_ids=torch.arange(2 * TOKENS).reshape(2, TOKENS))
    print(json.dumps(figures | {"after a forward": memory_mb()}))


def processes() -> dict[str, int]:
    """The devices' processes."""
    found: dict[str, int] = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().replace(b"\0", b" ").decode().split()
            if words[:2] == ["isthmus", "device"] and words[2].startswith("load-"):
                found[words[2]] = int(path.parent.name)
    return found


def devices(folder: str, run: str, *, away: bool, full: bool) -> None:
    """In a process of its own, which is the coordinator."""
    text = {"files": "stdlib", "sequence_length": TOKENS, "shift_labels": False, "max_bytes": 60_000}
    tables: dict[str, object] = {
        "name": "load",
        "model": {"name": "hf", "options": {"path": folder, "task": "causal-lm"}}
        | ({} if full else {"lora": {"r": 8}}),
        "data": {"kind": "text", "options": text},
        "runtime": {"emulate": False, "timeout": "120 s"},
        "training": {"steps": 3, "batch_size": 2, "micro_batches": 2, "precision": "bf16"},
        "optimizer": [{"name": "adamw", "lr": 1e-4}],
    }
    moments: dict[str, dict[str, dict[str, float]]] = {}
    prepared, open_item = prepare(msgspec.convert(tables, Job)), CoordinatorHost.open_item

    def note(moment: str) -> None:
        for name, pid in processes().items():
            with contextlib.suppress(OSError, KeyError):  # it has ended
                moments.setdefault(name, {}).setdefault(moment, memory_mb(pid))

    def opened(host: CoordinatorHost, item: OpenItem) -> None:
        note("loaded")
        open_item(host, item)

    def look() -> None:
        while True:
            note("before")
            time.sleep(0.1)

    setattr(CoordinatorHost, "open_item", opened)  # noqa: B010
    if away:
        setattr(WeightFiles, "of", lambda *_: ())  # noqa: B010
    fleet = Fleet(
        name="three",
        devices=tuple(
            Device(name=f"load-{i}", region="here", flops_per_s=1e12, memory_bytes=1 << 34) for i in range(3)
        ),
        links=Links(default=Link(1e-4, 1e9)),
    )
    legal = cuts(Flow(prepared.captured.train))
    ends = [legal[len(legal) * part // 3].position for part in (1, 2)]
    plan = build_plan(prepared.problem(fleet), fleet.names, ends, planner="benchmark")
    steps = itertools.count(1)
    watcher = Watcher(advanced=lambda *_: note(f"step {next(steps)}"))
    threading.Thread(target=look, daemon=True).start()
    print(run_plan(prepared, plan, fleet, Path(run), RunOptions(emulate=False), watcher).outcome, flush=True)
    for stage in plan.replicas[0].stages:
        planned = {k: v / 1e6 for k, v in msgspec.structs.asdict(stage.memory).items()}
        print(json.dumps({"stage": stage.device, **planned, **moments[stage.device]}))


def in_own_process(*words: str) -> str:
    return subprocess.run([sys.executable, *words], check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", action="append", choices=("0.04", "0.12", "0.6"))
    parser.add_argument("--away", action="store_true")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--devices", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.peer:
        peer(*chosen.peer)
    elif chosen.devices:
        devices(*chosen.devices, away=chosen.away, full=chosen.full)
    else:
        for size in chosen.size or ("0.12", "0.6"):
            with tempfile.TemporaryDirectory() as folder:
                model = f"{folder}/model"
                in_own_process(str(HERE / "start.py"), "--save", size, model)
                for name in ("transformers", "accelerate"):
                    print(size, name, in_own_process(__file__, "--peer", name, model), flush=True)
                away = [*(["--away"] if chosen.away else []), *(["--full"] if chosen.full else [])]
                print(size, "devices", in_own_process(__file__, *away, "--devices", model, f"{folder}/run"), flush=True)


if __name__ == "__main__":
    main()
