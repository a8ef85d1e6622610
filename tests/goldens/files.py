"""Golden files, and what they were computed with."""

from __future__ import annotations

import json
from pathlib import Path

import torch

FOLDER = Path(__file__).parent


def read(name: str) -> dict[str, object]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def write(name: str, found: object) -> None:
    (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def kernels() -> str:
    """Two machines that agree here have the same bits of sums and products; others agree to rounding. Libraries of
    matrix products choose by the model of the processor, and not by its instruction set alone."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {model}"
