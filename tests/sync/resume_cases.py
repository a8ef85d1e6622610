"""Run by torchrun: the example's training in every mode, saving on the way. `resume_cases.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from isthmus.sync import mode_names

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "torchrun"))

from resumed import train  # pyright: ignore[reportMissingImports]

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for mode in mode_names():
        train(Path(sys.argv[1]) / mode, mode, 24, 8)
    dist.destroy_process_group()
