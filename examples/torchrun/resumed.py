"""Training that can be killed at any step and goes on where it was, in the middle of a period too.

torchrun --standalone --nproc-per-node 2 examples/torchrun/resumed.py --folder runs/digits --steps 60

Started again with the same folder it goes on. Every worker keeps a file of its own: replicas differ within a period.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from ddp import net
from sklearn.datasets import load_digits
from torch import nn

import isthmus.sync


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--mode", default="dream", choices=sorted({*isthmus.sync.mode_names()} - {"decoupled"}))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(options.folder, options.mode, options.steps, options.save_every)
    dist.destroy_process_group()


def train(folder: Path, mode: str, steps: int, save_every: int) -> nn.Module:
    pixels, targets = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(targets)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sync = isthmus.sync.attach(model, optimizer, mode=mode, period=5)
    latest = common_step(folder)
    if latest:
        isthmus.sync.load_worker(file_of(folder, latest), model, optimizer, sync)
    while sync.steps < steps:
        # A batch is a function of the step: a data loader would have to save its place.
        drawn = torch.Generator().manual_seed(1000 * sync.steps + dist.get_rank())
        batch = torch.randint(1500, (32,), generator=drawn)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        sync.step()
        if sync.steps % save_every == 0 or sync.steps == steps:
            isthmus.sync.save_worker(file_of(folder, sync.steps), model, optimizer, sync)
    print(f"worker {dist.get_rank()}: from step {latest} to {sync.steps}", flush=True)
    sync.close()
    return model


def file_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}" / f"worker-{dist.get_rank()}.safetensors"


def common_step(folder: Path) -> int:
    """The newest step that every worker has saved; 0 without any. Some may have been killed before they could."""
    for place in sorted(folder.glob("step-*"), reverse=True):
        if len(list(place.glob("*.safetensors"))) == dist.get_world_size():
            return int(place.name.removeprefix("step-"))
    return 0


if __name__ == "__main__":
    main()
