"""What a feature map tells of an image, and what noise on it buys.

`python benchmarks/reconstruction/run.py [--quick] [--json PATH]`

A small CNN on scikit-learn's digits, cut behind its first or its second convolution: a device that holds the digits
computes what is before the cut, another one the rest. It is trained over two processes, as any job; then the other
device attacks what it was sent: it tries to see the holder's training images. See README.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch
from inversion import Attacker, Seen
from rich.console import Console
from rich.table import Table
from split_digits import (
    BATCH,
    BOUNDARIES,
    EPOCHS,
    HELD_OUT,
    Digits,
    Messages,
    body,
    fleet,
    parted,
    planned,
    public_clip,
)
from torch import nn

from isthmus.data import DataSpec, load_dataset
from isthmus.disclosure import ActivationNoise
from isthmus.experiments import RunOptions, Watcher, check_outcome, latest_checkpoint, load_checkpoint, run_plan
from isthmus.job import Prepared
from isthmus.plans import Plan
from isthmus.training.local_privacy import epsilon_of, squared_mu

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import write_figures

LATEST = Path(__file__).parent / "results" / "latest.json"
DELTA = 1e-5
MULTIPLIERS = (0.02, 0.05, 0.2, 1.0)
NEXT_TO_NOTHING = 1e-9
DECODER_DRAWS = 8
"""Messages that the attacker makes of each of its images, with noise drawn anew, to train its decoder on."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    boundary: str
    values: int
    """Numbers per sample that cross."""
    setting: str
    sigma: float
    """Of the noise on each number; in units of the clip it is the noise multiplier."""
    epsilon_per_epoch: float | None
    epsilon: float | None
    """After all epochs."""
    accuracy: float
    """Of the trained model on held-out digits, with the noise where there is one."""
    linear: Seen
    decoder: Seen
    """Of one message."""
    averaged: Seen
    """The decoder's, of the mean of all that were sent of an image, one per epoch."""


class Results(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    machine: str
    epochs: int
    rows: tuple[Row, ...]


def trained(prepared: Prepared, plan: Plan, folder: Path) -> nn.Module:
    check_outcome(run_plan(prepared, plan, fleet(), folder, RunOptions(emulate=False), Watcher()))
    module = prepared.build()
    load_checkpoint(module, latest_checkpoint(folder / "checkpoints"))
    return module.eval()


def attacked(
    data: DataSpec, digits: Digits, boundary: str, noise: ActivationNoise | None, epochs: int, folder: Path
) -> tuple[float, Messages, dict[str, Seen]]:
    """Accuracy of the trained model, how messages are made, and what the attacker sees."""
    prepared, plan = planned(data, boundary, noise, epochs)
    module = trained(prepared, plan, folder)
    messages = Messages(prepared, plan, dict(module.state_dict()))

    heldout = load_dataset(data, "heldout").batch(range(HELD_OUT), ["pixel_values", "labels"])
    with torch.no_grad():
        features = body(module)[BOUNDARIES[boundary][1] :](messages.of(heldout["pixel_values"])[0]).mean((2, 3))
        right = module.get_submodule("head")(features).argmax(1) == heldout["labels"][: len(features)]

    noisy = noise is not None and noise.noise_multiplier != NEXT_TO_NOTHING
    draws, repeats = (DECODER_DRAWS, epochs) if noisy else (1, 1)
    theirs = messages.of(digits.victims, repeats).flatten(2)
    own = messages.of(digits.attackers, draws * repeats).flatten(2).unflatten(0, (draws, repeats))
    count = own.shape[2]
    attacker = Attacker(digits.attackers[:count].flatten(1), digits.attackers_labels[:count])
    images, labels = digits.victims[: theirs.shape[1]].flatten(1), digits.victims_labels[: theirs.shape[1]]
    found = {
        "linear": attacker.linear(own[0, 0], theirs[0]),
        "decoder": attacker.decoder(own[:, 0], theirs[0]),
        "averaged": attacker.decoder(own.mean(1), theirs.mean(0)),
    }
    return float(right.float().mean()), messages, {k: attacker.judged(v, images, labels) for k, v in found.items()}


def settings(clip: float) -> dict[str, ActivationNoise | None]:
    def noise(multiplier: float) -> ActivationNoise:
        return ActivationNoise(clip=clip, noise_multiplier=multiplier, delta=DELTA, labels="public")

    return {"as it is": None, "clipped": noise(NEXT_TO_NOTHING), **{f"noise {m:g}": noise(m) for m in MULTIPLIERS}}


def measured(quick: bool, console: Console) -> Results:
    rows: list[Row] = []
    epochs = 2 if quick else EPOCHS
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data, digits = parted(folder)
        for boundary in BOUNDARIES:
            for name, noise in settings(public_clip(digits, boundary)).items():
                began_s = time.monotonic()
                run = folder / f"{boundary}-{name}".replace(" ", "-")
                accuracy, messages, seen = attacked(data, digits, boundary, noise, epochs, run)
                multiplier = noise.noise_multiplier if noise is not None else None
                counted = multiplier if multiplier != NEXT_TO_NOTHING else None
                rows.append(
                    Row(
                        boundary=boundary,
                        values=messages.of(digits.victims[:BATCH]).flatten(2).shape[2],
                        setting=name,
                        sigma=messages.released.evaluation.deviation if messages.released and counted else 0.0,
                        epsilon_per_epoch=epsilon_of(squared_mu(counted), DELTA) if counted else None,
                        epsilon=epsilon_of(squared_mu(counted, epochs), DELTA) if counted else None,
                        accuracy=accuracy,
                        **seen,
                    )
                )
                console.print(f"{boundary}, {name}: {time.monotonic() - began_s:.0f} s", highlight=False)
    machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return Results(when=when, machine=machine, epochs=epochs, rows=tuple(rows))


def table(results: Results) -> Table:
    shown = Table(
        "cut behind",
        "messages",
        "epsilon per epoch",
        f"after {results.epochs}",
        "model's accuracy",
        "linear: error",
        "decoder: error",
        "PSNR",
        "digits told",
        "averaged: error",
        "digits told",
        title="What the device behind the cut sees of training images",
    )
    for row in results.rows:
        spent = [f"{e:.3g}" if e is not None else "none" for e in (row.epsilon_per_epoch, row.epsilon)]
        shown.add_row(
            f"{row.boundary} ({row.values})",
            row.setting,
            *spent,
            f"{row.accuracy:.1%}",
            f"{row.linear.error:.2f}",
            f"{row.decoder.error:.2f}",
            f"{row.decoder.psnr_db:.1f} dB",
            f"{row.decoder.accuracy:.0%}",
            f"{row.averaged.error:.2f}",
            f"{row.averaged.accuracy:.0%}",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two epochs")
    parser.add_argument("--json", type=Path, default=None, help=f"where figures go; {LATEST} without --quick")
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = measured(given.quick, Console(stderr=True))
    Console(width=None if sys.stdout.isatty() else 170).print(table(results))
    path = given.json or (None if given.quick else LATEST)
    if path is not None:
        write_figures(path, results)


if __name__ == "__main__":
    main()
