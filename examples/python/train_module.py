"""Train a module of your own on four machines that this one emulates. Run it: python train_module.py"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import isthmus

digits = load_digits()
data = {
    "input": torch.tensor(digits.data / 16, dtype=torch.float32),
    "target": torch.tensor(digits.target),
}
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

if __name__ == "__main__":  # devices are processes
    run = isthmus.train(
        model=model,
        loss=nn.functional.cross_entropy,
        data=data,
        fleet="three-sites",
        steps=40,
        overrides={"planner": "even"},  # by default so small a model stays on one machine: that is quicker
    )
    print(f"loss {run.losses[0].loss:.2f} -> {run.losses[-1].loss:.2f}, devices {', '.join(run.plan.used)}")
    print(f"pictures and checkpoints: {run.path}")
