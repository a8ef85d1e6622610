"""Rows of the fault table about the disk that checkpoints go to: `isthmus train`, and then `--resume`."""

from __future__ import annotations

import gc
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from torch import Tensor

from isthmus.api.folder import RunFolder
from isthmus.training.checkpoint import newest_checkpoint
from tests.faults.rows import Found, Row, differing
from tests.runtime.commands import Done, isthmus, write_job
from tests.runtime.jobs import final_weights

STEPS, SAVE_EVERY = 12, 3
DISK_BYTES = 2_000_000


@cache
def undisturbed(folder: Path) -> tuple[Path, Path, Mapping[str, Tensor]]:
    """The job, its run with all checkpoints, its weights."""
    home = folder / "undisturbed-disk"
    home.mkdir()
    job = write_job(home, steps=STEPS)
    job.write_text(job.read_text().replace("keep_checkpoints = 3", "keep_checkpoints = 4"))
    done = isthmus("train", job, "--run", home / "run")
    assert done.code == 0, done
    return job, home / "run", final_weights(home / "run")


def resumed(done: Done, run: Path, expected: Mapping[str, Tensor]) -> str:
    """What is wrong with a run that was resumed."""
    if done.code != 0:
        return f"exit code {done.code}: {done.err}"
    told = [point.step for point in RunFolder(run).losses() if point.split == "train"]
    if told != list(range(1, STEPS + 1)):
        return f"steps were told in this order: {told}"
    return differing(final_weights(run), expected, bitwise=True)


def torn(seed: int, folder: Path) -> Found:
    """A file of the newest checkpoint is cut, flipped in one bit, emptied or lost, as a disk may do that was not
    flushed: the one before is taken, and what was passed over is named."""
    draw = random.Random(seed)
    job, whole, expected = undisturbed(folder)
    run, newest = folder / f"torn-{seed}", draw.choice((6, 9))
    shutil.copytree(whole, run)
    for path in (run / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > newest:
            shutil.rmtree(path)
    checkpoint = run / "checkpoints" / f"step-{newest:06d}"
    file = draw.choice(sorted(checkpoint.iterdir()))
    data, how = bytearray(file.read_bytes()), draw.choice(("cut", "flipped", "flipped", "emptied", "lost"))
    place = draw.randrange(len(data))
    match how:
        case "cut":
            file.write_bytes(data[:place])
        case "flipped":
            data[place] ^= 1 << draw.randrange(8)
            file.write_bytes(data)
        case "emptied":
            file.write_bytes(bytes(len(data)))
        case _:
            file.unlink()
    since_s = time.monotonic()
    done = isthmus("train", job, "--run", run, "--resume")
    seconds, where = time.monotonic() - since_s, f"{file.name} {how} at byte {place}"
    if "Traceback" in done.err or "internal" in done.err:
        return Found(wrong=f"{where}: {done.err}")
    named = checkpoint.name in done.err or (file.name == "manifest.json" and how == "lost")  # then it was never saved
    before = f"after step {newest - SAVE_EVERY}" in done.err
    wrong = resumed(done, run, expected) if named and before else f"not noticed, or not told: {done.err}"
    return Found(wrong=wrong and f"{where}: {wrong}", note="the one before", seconds=(seconds,), redone=SAVE_EVERY)


def full_disk(seed: int, folder: Path) -> Found:
    """A file system that fills up along the run: the run ends and says why; with room again, it goes on."""
    draw, home = random.Random(seed), folder / f"disk-{seed}"
    step, left_bytes = draw.randint(1, STEPS - 2), draw.choice((0, 0, 4096, 20_000, 60_000))
    job, _, expected = undisturbed(folder)
    home.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", home], capture_output=True, text=True
    )
    if mounted.returncode:
        return Found(note=f"not tried: {mounted.stderr.strip()}")
    filler, run, over = home / "filler", RunFolder(home / "run"), threading.Event()

    def fill() -> None:
        while not over.wait(0.002):
            if max((point.step for point in run.losses()), default=0) >= step:
                break
        with filler.open("wb", buffering=0) as file:
            try:
                while not over.is_set():
                    file.write(bytes(4096))
            except OSError:
                file.truncate(max(0, file.tell() - left_bytes))

    filling = threading.Thread(target=fill, daemon=True)
    filling.start()
    try:
        done = isthmus("train", job, "--run", run.path)
        over.set()
        filling.join(60)
        if done.code == 0 and left_bytes:
            wrong = differing(final_weights(run.path), expected, bitwise=True)
            return Found(wrong=wrong, note="there was room enough")
        said = done.code == 2 and "No space left" in done.err and "Traceback" not in done.err
        if not said:
            return Found(wrong=f"exit code {done.code}, {left_bytes} bytes left at step {step}: {done.err}")
        reached = newest_checkpoint(run.checkpoints)
        filler.unlink()
        since_s = time.monotonic()
        wrong = resumed(isthmus("train", job, "--run", run.path, "--resume"), run.path, expected)
        where = reached.name if reached is not None else "the start"
        return Found(seconds=(time.monotonic() - since_s,), wrong=wrong and f"resumed from {where}: {wrong}")
    finally:
        over.set()
        filling.join(60)
        _unmount(home)


def _unmount(home: Path) -> None:
    """Device processes that were killed may take a while to be gone where there is much to do."""
    until_s = time.monotonic() + 30
    gc.collect()  # the command ran in this process, and has mapped the checkpoint that it went on from
    while (done := subprocess.run(["umount", home], capture_output=True, text=True)).returncode:
        assert time.monotonic() < until_s, done.stderr.strip()
        time.sleep(0.2)


ROWS = (
    Row(name="torn", description="torn checkpoint, then resumed", once=torn, limit_s=700),
    Row(name="full-disk", description="disk full, then resumed", once=full_disk, limit_s=700),
)
