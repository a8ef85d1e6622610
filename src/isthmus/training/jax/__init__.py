"""Stages computed by JAX: a table of operators, and a program that runs stretches of them as one compiled function.

Parameters, sums of gradients, optimizers, random numbers and evaluation stay torch's, so checkpoints, recovery and
dropout do not depend on who computes. JAX is imported by `start` alone.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from isthmus.accelerators import Accelerator

ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


def prepare_process(accelerator: Accelerator) -> None:
    """What JAX reads from the environment when it is imported: it shares cores and memory with torch."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if accelerator.device.type == "cpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flags = os.environ.get("XLA_FLAGS", "")
    if torch.get_num_threads() == 1 and ONE_THREAD not in flags:  # a process prepares for each of its stages
        os.environ["XLA_FLAGS"] = f"{flags} {ONE_THREAD}".strip()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache / "isthmus" / "jax"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
