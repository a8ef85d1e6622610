"""The process that device processes are forked from: it has imported what they need.

A fresh interpreter imports torch for two seconds of a core; a copy of one that has done so takes milliseconds, and
shares its memory. Nothing is computed here, as torch would start threads.
"""

from __future__ import annotations

import importlib
import os

import torch

from isthmus.runtime import device_process
from isthmus.runtime.processes.fork_server import SpawnRequest, serve_forks
from isthmus.training.engine_operators import engine_operators

FIRST_BACKWARD = "torch.fx.experimental.symbolic_shapes"
"""Torch imports this at the first backward from given gradients: it imports sympy, which takes a third of a second in
every copy."""

importlib.import_module(FIRST_BACKWARD)
engine_operators("torch")  # hundreds of schemas, which every copy would look up before its first stage


def main() -> None:
    """Until the launcher at the other end of standard input is gone."""
    # A copy of a command has imported torch with the command's environment.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    serve_forks(_work, "isthmus fork server")


def _work(request: SpawnRequest) -> None:
    os.environ["ISTHMUS_RUN"] = request.run
    device_process.main(request.arguments)


if __name__ == "__main__":
    main()
