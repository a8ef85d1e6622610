"""Weights from an S3 store: bytes, requests and memory of each stage's device, beside the tensors' own.

`python benchmarks/large_models/sources.py [--size 0.12]`

A Qwen3 of random bfloat16 values is put into an S3 server (moto), whose answers are counted. It is planned with LoRA in
three stages from its URL; then each stage is read as a device reads it, in a process of its own. Peak is VmHWM above
that before the reading. Linux.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from start import SIZES, status_kb

from isthmus.graph import Flow, assign, cuts, partition
from isthmus.job import Job, prepare
from isthmus.job.first_weights import first_weights
from isthmus.protocol.run_messages import WeightFile
from isthmus.runtime.coordinator.parameter_store import WeightFiles
from isthmus.runtime.device.own_files import own_weights
from isthmus.stores import Store

Served = list[tuple[str, int]]


def serve() -> tuple[str, Served]:
    """An S3 server of this process: its address, and method and bytes of each answer for weights."""
    moto: Any = importlib.import_module("moto.server")
    serving: Any = importlib.import_module("werkzeug.serving")
    served: Served = []
    app = moto.DomainDispatcherApplication(moto.create_backend_app)

    def counted(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        def started(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            if environ["PATH_INFO"].endswith(".safetensors"):
                length = next((value for name, value in headers if name.lower() == "content-length"), "0")
                served.append((environ["REQUEST_METHOD"], int(length)))
            return start_response(status, headers, *rest)

        return app(environ, started)

    importlib.import_module("logging").getLogger("werkzeug").setLevel("ERROR")
    server = serving.make_server("127.0.0.1", 0, counted, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}", served


def read(path: Path) -> None:
    """As a device, in a process of its own."""
    files = msgspec.json.decode(path.read_bytes(), type=tuple[WeightFile, ...])
    here = int(Path("/proc/self").resolve().name)
    before, began_s = status_kb(here), time.monotonic()
    found, lacking = own_weights(files)
    assert not lacking, lacking
    figures = {"seconds": time.monotonic() - began_s, "peak_mb": (status_kb(here) - before) / 1e3}
    print(json.dumps({"bytes": sum(t.nbytes for t in found.values()), "tensors": len(found), **figures}))


def got(served: Served) -> dict[str, int]:
    return {"got": sum(n for method, n in served if method == "GET"), "requests": len(served)}


def measure(size: str, folder: Path) -> None:
    address, served = serve()
    os.environ |= {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    os.environ |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    importlib.import_module("fsspec").filesystem("s3").mkdir("bucket")
    for path in folder.iterdir():
        Store("s3://bucket/model").upload(path, path.name)
    tables: dict[str, object] = {
        "name": "sources",
        "model": {"name": "hf", "options": {"path": "s3://bucket/model", "task": "causal-lm"}, "lora": {"r": 8}},
        "data": {"kind": "text", "options": {"files": "stdlib", "sequence_length": 32, "max_bytes": 60_000}},
        "training": {"steps": 1, "batch_size": 2, "micro_batches": 2, "precision": "bf16"},
        "optimizer": [{"name": "adamw", "lr": 1e-4}],
    }
    served.clear()
    prepared = prepare(msgspec.convert(tables, Job))
    values = first_weights(prepared).values
    print(size, "coordinator", json.dumps(got(served)), flush=True)
    flow = Flow(prepared.captured.train)
    legal = cuts(flow)
    ends = [legal[len(legal) * part // 3].position for part in (1, 2)]
    for stage in partition(flow, assign(flow, ends)):
        names = {op.target for op in stage.variables()}
        own = WeightFiles("s3://bucket/model").of({name: t for name, t in values.items() if name in names})
        asked = folder.parent / "asked.json"
        asked.write_bytes(msgspec.json.encode(own))
        served.clear()
        command = [sys.executable, __file__, "--read", str(asked)]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        print(size, "stage", json.dumps({**json.loads(found), **got(served)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", action="append", choices=SIZES)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.read:
        read(chosen.read)
        return
    for size in chosen.size or ["0.12"]:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made) / "model"
            saved = [sys.executable, str(Path(__file__).with_name("start.py")), "--save", size, str(folder)]
            subprocess.run(saved, check=True, capture_output=True)
            measure(size, folder)


if __name__ == "__main__":
    main()
