"""An ordinary script for torchrun: a small convolutional net on the handwritten digits, with DistributedDataParallel.

torchrun --standalone --nproc-per-node 2 examples/torchrun/ddp.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH = 100, 32


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pixels, targets = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(targets)
    drawn = torch.Generator().manual_seed(dist.get_rank())

    model = net()
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        batch = torch.randint(1500, (BATCH,), generator=drawn)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 19 and dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    with torch.no_grad():
        right = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
    print(f"worker {dist.get_rank()}: {right:.1%} of the held-out digits")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
