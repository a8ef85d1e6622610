"""In workers of a launch: the example's training in every mode, saving on the way.

What was saved first is copied to the second folder, and `dream` goes on from it until worker 1 is killed, as with a
machine that goes away: the launcher then stops the other one and gives up. A plan depends on times that were measured,
so both runs must go on from the save that holds it.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "torchrun"))
sys.path.insert(0, str(Path(__file__).parent))

from resumed import train  # pyright: ignore[reportMissingImports]
from small import MEETING  # pyright: ignore[reportMissingImports]

KILLED_AFTER = Path("dream") / "step-000024"


def to_the_end(folder: Path) -> None:
    """From what the folder holds of each mode, if anything."""
    for mode in MEETING:
        train(folder / mode, mode, 24, 8)
    dist.barrier()


def main(whole: Path, killed: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    to_the_end(whole)
    if dist.get_rank() == 0:
        for mode in MEETING:
            shutil.copytree(whole / mode / "step-000008", killed / mode / "step-000008")
    dist.barrier()
    if dist.get_rank() == 1:
        threading.Thread(target=_kill_this, args=(killed / KILLED_AFTER,), daemon=True).start()
    train(killed / "dream", "dream", 1_000_000, 8)


def _kill_this(saved: Path) -> None:
    """In the middle of whatever step follows."""
    while not saved.exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
