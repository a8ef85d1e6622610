"""The Trainer of transformers with the callback beside the same loop with `isthmus.sync`, on each of two workers.

`trainer_cases.py FOLDER`: torchrun's launcher forks the workers, so that transformers is imported once.
"""

from __future__ import annotations

import gc
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch._dynamo  # an optimizer's first step imports it
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers import Trainer, TrainingArguments

import isthmus.sync
from isthmus.errors import UserError
from isthmus.sync import Options
from isthmus.sync.hugging_face import SyncCallback

STEPS, BATCH = 12, 4


class Net(nn.Module):
    """Keeps the batches that it was trained on, and their losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 3)
        )
        self.batches: list[tuple[Tensor, Tensor]] = []
        self.losses: list[float] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = nn.functional.cross_entropy(self.layers(x), labels)
        if self.training:
            self.batches.append((x, labels))
            self.losses.append(loss.item())
        return {"loss": loss}


class Data(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        drawn = torch.Generator().manual_seed(1)
        self._x = torch.randn(256, 8, generator=drawn)
        self._labels = torch.randint(3, (256,), generator=drawn)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        return {"x": self._x[item], "labels": self._labels[item]}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained(
    folder: Path, callbacks: Sequence[SyncCallback], *, clip: float, accumulate: int = 1
) -> tuple[Net, dict[str, Tensor]]:
    model = Net()
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        max_grad_norm=clip,
        gradient_accumulation_steps=accumulate,
        lr_scheduler_type="linear",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        dataloader_pin_memory=False,
    )
    optimizer = optimizer_of(model)
    linear = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    Trainer(model, arguments, train_dataset=Data(), optimizers=(optimizer, linear), callbacks=list(callbacks)).train()
    return model, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def by_hand(
    batches: Sequence[tuple[Tensor, Tensor]], mode: str, options: Options, *, clip: float, accumulate: int = 1
) -> Net:
    """The loop that docs/sync.md shows."""
    model = Net()
    optimizer = optimizer_of(model)
    sync = isthmus.sync.attach(model, optimizer, mode=mode, period=3, options=options)
    linear = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    for step in range(STEPS):
        parts = batches[step * accumulate : (step + 1) * accumulate]
        with sync.no_sync():
            for x, labels in parts[:-1]:
                (model(x, labels)["loss"] / accumulate).backward()
        (model(*parts[-1])["loss"] / accumulate).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        sync.step()
        linear.step()
        optimizer.zero_grad()
    sync.close()
    return model


def work(folder: Path) -> None:
    torch.set_num_threads(1)
    fine = Options(smallest_layer_bytes=0)
    found: dict[str, object] = {}
    dist.init_process_group("gloo")
    sync = isthmus.sync.attach(first := Net(), optimizer_of(first), mode="partial", period=3, options=fine)
    planned = Options(smallest_layer_bytes=0, plan=sync.statistics().plan)
    sync.close()
    cases = {
        "dream with a plan": ("dream", planned, 0.0, 1),
        "dream with a plan, two backward passes": ("dream", planned, 0.0, 2),
        "local, clipped": ("local", fine, 0.5, 1),
        "every step, clipped, two backward passes": ("every-step", fine, 0.5, 2),
    }
    for name, (mode, options, clip, accumulate) in cases.items():
        callback = SyncCallback(mode=mode, period=3, options=options)
        made, state = trained(folder, [callback], clip=clip, accumulate=accumulate)
        other = by_hand(made.batches, mode, options, clip=clip, accumulate=accumulate)
        assert callback.sync is not None and callback.sync.steps == STEPS
        same = all(torch.equal(tensor, other.state_dict()[key]) for key, tensor in state.items())
        found[name] = made.losses == other.losses and same
    callback = SyncCallback(mode="dream", period=3, options=Options(smallest_layer_bytes=0, drift=1e9))
    made, _ = trained(folder, [callback], clip=0.0)
    assert callback.sync is not None
    found["plans of dream"] = callback.sync.statistics().plans
    found["all finite"] = all(map(math.isfinite, made.losses))
    plain, _ = trained(folder, [], clip=0.0)
    found["apart from DistributedDataParallel"] = plain.losses != made.losses
    try:
        trained(folder, [SyncCallback(mode="dream", period=3)], clip=1.0)
    except UserError as e:
        found["clipped"] = str(e)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path) -> None:
    gc.freeze()  # collecting in a worker would copy every page of what was imported
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        max_restarts=0,
        start_method="fork",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        run_id="trainer",
    )
    elastic_launch(config, work)(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
