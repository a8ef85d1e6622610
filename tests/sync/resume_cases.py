"""Run by torchrun: the example's training in every mode, saving on the way. `resume_cases.py WHOLE KILLED`.

What was saved first is copied to the second folder, and `dream` goes on from it until somebody stops it. A plan
depends on times that were measured, so both runs must go on from the save that holds it.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from isthmus.sync import mode_names

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "torchrun"))

from resumed import train  # pyright: ignore[reportMissingImports]


def to_the_end(folder: Path) -> None:
    """From what the folder holds of each mode, if anything."""
    for mode in mode_names():
        train(folder / mode, mode, 24, 8)
    dist.barrier()


def main(whole: Path, killed: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    to_the_end(whole)
    if dist.get_rank() == 0:
        for mode in mode_names():
            shutil.copytree(whole / mode / "step-000008", killed / mode / "step-000008")
    dist.barrier()
    train(killed / "dream", "dream", 1_000_000, 8)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
