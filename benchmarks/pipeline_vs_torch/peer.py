"""One stage of torch.distributed.pipelining: Schedule1F1B on Gloo. `python peer.py '<PeerPlace as JSON>'`.

The stages run the same modules as the plain model. What can be given is given: shapes are inferred once, in a first
step that is not counted, and no outputs are merged.
"""

from __future__ import annotations

import datetime
import os
import sys
import time

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F
from workload import LEARNING_RATE, Figures, PeerPlace, Workload

from isthmus.data import SampleOrder, load_dataset
from isthmus.models import GPT, build_model


class Part(nn.Module):
    """The blocks of one stage, with the embedding before the first and the head after the last."""

    def __init__(self, whole: GPT, workload: Workload, stage: int) -> None:
        super().__init__()
        first, end = workload.first_block(stage), workload.first_block(stage + 1)
        self.embeds, self.predicts = stage == 0, stage == workload.stages - 1
        if self.embeds:
            self.token, self.position = whole.token, whole.position
        self.blocks = nn.ModuleList(list(whole.blocks)[first:end])
        if self.predicts:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, hidden: Tensor) -> Tensor:
        if self.embeds:
            hidden = self.token(hidden) + self.position.weight[: hidden.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden)) if self.predicts else hidden


class CountingStage(PipelineStage):
    """Counts the tensor bytes that it sends."""

    sent_bytes = 0

    def _count(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        self.sent_bytes += sum(o.tensor.nbytes for o in operations)
        return operations

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._count(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._count(super().get_bwd_send_ops(bwd_chunk_id))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train(place: PeerPlace) -> Figures:
    workload, stage = place.workload, place.stage
    torch.manual_seed(workload.seed)
    whole = build_model(workload.model)
    assert isinstance(whole, GPT)
    part = Part(whole, workload, stage)
    data = load_dataset(workload.data.training_alone(), "train")
    order = SampleOrder(len(data), workload.seed)
    counting = CountingStage(part, stage, workload.stages, torch.device("cpu"))
    schedule = Schedule1F1B(counting, workload.micro_batches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(part.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    marks: list[float] = []
    losses: list[float] = []
    dist.barrier()
    for step in range(workload.steps):
        marks.append(time.monotonic())
        indices = order.indices(step * workload.batch_size, workload.batch_size)
        told: list[Tensor] = []
        optimizer.zero_grad()
        inputs = (data.batch(indices, ["input_ids"])["input_ids"],) if part.embeds else ()
        target = data.batch(indices, ["labels"])["labels"] if part.predicts else None
        schedule.step(*inputs, target=target, losses=told, return_outputs=False)
        optimizer.step()
        if part.predicts:
            losses.append(sum(float(loss.detach()) for loss in told) / len(told))
    marks.append(time.monotonic())
    dist.barrier()
    return Figures(marks_s=marks, losses=losses, step_payload_bytes=counting.sent_bytes / workload.steps)


def main() -> None:
    place = msgspec.json.decode(sys.argv[1], type=PeerPlace)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = place.interface
    store = dist.FileStore(place.store, place.workload.stages)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=place.stage,
        world_size=place.workload.stages,
        timeout=datetime.timedelta(seconds=300),
    )
    try:
        print(msgspec.json.encode(train(place)).decode())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
