"""Rows of the fault table about the disk that checkpoints go to."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from pathlib import Path

from isthmus.errors import UserError
from isthmus.training.checkpoint import newest_checkpoint, read_tensors
from tests.faults.process_rows import STEPS, Found
from tests.faults.real import job, run


def full_disk(seed: int, folder: Path) -> Found:
    """A file system that fills up along the run: the run ends, says why, and what was saved before is whole."""
    home = folder / f"disk-{seed}"
    home.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", home], capture_output=True, text=True)
    if mounted.returncode:
        return Found([], 0, "", remark=f"not tried: {mounted.stderr.strip()}")
    filler, step = home / "filler", random.Random(seed).randint(4, STEPS - 6)

    def fill() -> None:
        with filler.open("wb") as file:
            try:
                while True:
                    file.write(bytes(4096))
                    file.flush()
            except OSError:
                pass

    try:
        run(home / "run", job(save_every=2), spares=0, act=(step, fill))
    except UserError as e:
        said = "cannot be written" in str(e)
        newest = newest_checkpoint(home / "run" / "checkpoints")
        whole = newest is not None and bool(read_tensors(newest))
        return Found([], 0, "" if said and whole else f"{e}; newest {newest}")
    else:
        return Found([], 0, "the run did not notice")
    finally:
        subprocess.run(["umount", home], check=True)


ROWS: dict[str, Callable[[int, Path], Found]] = {"disk full": full_disk}
