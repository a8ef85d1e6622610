"""The Trainer of Lightning with the strategy beside the same loop with `isthmus.sync`, on each of two workers.

`torchrun --standalone --nproc-per-node 2 lightning_cases.py FOLDER`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lightning
import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader
from trainer_cases import BATCH, STEPS, Data, Net, by_hand, optimizer_of  # pyright: ignore[reportMissingImports]

import isthmus.sync
from isthmus.plans.sync import SyncPlan
from isthmus.sync import Options
from isthmus.sync.lightning import SyncStrategy


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
        return self.net(**batch)["loss"]

    def configure_optimizers(self) -> object:
        optimizer = optimizer_of(self)
        linear = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": linear, "interval": "step"}}


def trained(folder: Path, strategy: SyncStrategy, *, clip: float, accumulate: int) -> Net:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=STEPS,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip or None,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(Data(), batch_size=BATCH, shuffle=True))
    return module.net


def _inside(plan: SyncPlan) -> SyncPlan:
    """Of the module in which the net is `net`."""
    text = msgspec.json.encode(plan).decode()
    return msgspec.json.decode(text.replace('"layers.', '"net.layers.'), type=SyncPlan)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    fine = Options(smallest_layer_bytes=0)
    sync = isthmus.sync.attach(first := Net(), optimizer_of(first), mode="partial", period=3, options=fine)
    plan = sync.statistics().plan
    sync.close()
    assert plan is not None
    found: dict[str, bool] = {}
    for name, mode, clip, accumulate in (
        ("dream with a plan", "dream", 0.0, 1),
        ("dream with a plan, two backward passes", "dream", 0.0, 2),
        ("local, clipped", "local", 0.5, 1),
        ("every step, clipped, two backward passes", "every-step", 0.5, 2),
    ):
        inside = Options(smallest_layer_bytes=0, plan=_inside(plan)) if mode == "dream" else fine
        made = trained(folder, SyncStrategy(mode=mode, period=3, options=inside), clip=clip, accumulate=accumulate)
        outside = Options(smallest_layer_bytes=0, plan=plan) if mode == "dream" else fine
        other = by_hand(made.batches, mode, outside, clip=clip, accumulate=accumulate)
        state = other.state_dict()
        same = all(torch.equal(tensor, state[key]) for key, tensor in made.state_dict().items())
        found[name] = made.losses == other.losses and same
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
