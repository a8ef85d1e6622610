"""One worker: every mode of a case, one after the other. `python worker.py '<Place as JSON>'`."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable, Sequence

import msgspec
import torch
import torch.distributed as dist
from stretch import stretch, work_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workload import PERIOD, Case, ModeFigures, Place, Told, loss_of, model_of

import isthmus.sync
from isthmus.sync import Options, SyncStatistics
from isthmus.sync.profile import worker_profile
from isthmus.sync.scheduled import JOINED
from isthmus_testing.sync_modes import SyncChoices, SyncedLayer, SyncedModel, simulate_sync

ALONE = "no averaging"


def slow_model(case: Case) -> nn.Module:
    model = model_of(case.kind)
    stretch(model, work_of(model, lambda: loss_of(case.kind, model)), case.compute_s)
    return model


def timed(
    case: Case, module: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], object], *, settle: int
) -> float:
    """Mean seconds per step, after `settle` of them."""
    started_s = 0.0
    for number in range(settle + case.measured_steps):
        if number == settle:
            dist.barrier()
            started_s = time.perf_counter()
        optimizer.zero_grad()
        loss_of(case.kind, module).backward()
        step()
    return (time.perf_counter() - started_s) / case.measured_steps


def with_ddp(case: Case) -> ModeFigures:
    module = slow_model(case)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    wrapped = DistributedDataParallel(module)
    return ModeFigures(mode="torch DDP", step_s=timed(case, wrapped, optimizer, optimizer.step, settle=2))


def without(case: Case) -> ModeFigures:
    module = slow_model(case)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    return ModeFigures(mode=ALONE, step_s=timed(case, module, optimizer, optimizer.step, settle=2))


AHEAD = ("partial", "dream")
"""Modes whose averages reach into the next forward. The paper's does not."""


def with_sync(case: Case, mode: str) -> tuple[ModeFigures, SyncStatistics]:
    module = slow_model(case)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    # `dream`'s plan is to be that of the first probe, whatever the machine's other work does.
    options = Options(overlap=mode == "partial", forward_overlap=mode in AHEAD, drift=1e9 if mode == "dream" else None)
    sync = isthmus.sync.attach(module, optimizer, mode=mode, period=PERIOD, options=options)
    settle = {"dream": 4 + PERIOD, "dreamddp": 4 + PERIOD, "asc-wfbp": 5, "every-step": 1, "s-sgd": 1}.get(mode, PERIOD)
    step_s = timed(case, module, optimizer, sync.step, settle=settle)
    statistics = sync.statistics()
    sync.close()
    return ModeFigures(mode=mode, step_s=step_s, sent_bytes_per_step=statistics.sent_bytes / sync.steps), statistics


def synced_model(statistics: SyncStatistics, compute_s: float, units: Sequence[str]) -> SyncedModel:
    """What the simulator is told: the layers' times and the link as `dream` measured them, and a step's computation.

    `units`: what is averaged as one, in backward order, named as in a plan.
    """
    times, link = statistics.times, statistics.link
    assert times is not None and link is not None
    profile = worker_profile("worker", times, [unit.split(JOINED) for unit in units], [0.0] * len(units))
    layers: list[SyncedLayer] = []
    for unit, forward_s, backward_s in zip(units, profile.forward_s[::-1], profile.backward_s[::-1], strict=True):
        size_bytes = sum(statistics.layer_bytes[member] for member in unit.split(JOINED))
        layers.append(
            SyncedLayer(
                name=unit,
                forward_s=forward_s,
                backward_s=backward_s,
                average_s=link.average_s(size_bytes),
                size_bytes=size_bytes,
            )
        )
    rest_s = max(0.0, compute_s - sum(layer.forward_s + layer.backward_s for layer in layers))
    return SyncedModel(forward_s=rest_s, layers=tuple(layers), latency_s=link.latency_s, period=PERIOD)


def measure(case: Case) -> Told:
    before = without(case)
    others: list[tuple[ModeFigures, SyncStatistics | None]] = []
    others += [(with_ddp(case), None)] * ("torch DDP" in case.modes)
    others += [with_sync(case, mode) for mode in case.modes if mode != "torch DDP"]
    # Before and after, as the machine may have become slower or faster meanwhile.
    alone = msgspec.structs.replace(before, step_s=(before.step_s + without(case).step_s) / 2)
    found = [(alone, None), *others]
    statistics = {figures.mode: told for figures, told in found if told is not None}
    dream = statistics["dream"]
    assert dream.plan is not None and dream.link is not None
    assert dream.times is not None
    sizes = dream.layer_bytes
    fine = synced_model(dream, alone.step_s, dream.times.layers)
    planned = synced_model(dream, alone.step_s, dream.plan.layers[::-1])
    modes: list[ModeFigures] = []
    for figures, told in found:
        if told is not None:
            model = planned if figures.mode == "dream" else fine
            choices = SyncChoices(plan=told.plan, forward_overlap=figures.mode in AHEAD)
            predicted_s = simulate_sync(figures.mode, model, choices)
            figures = msgspec.structs.replace(figures, predicted_s=predicted_s)
        modes.append(figures)
    return Told(
        modes=modes,
        size_bytes=sum(sizes.values()),
        layers=len(sizes),
        plan=dream.plan,
        probed_latency_s=dream.link.latency_s,
        probed_byte_s=dream.link.byte_s,
        model=planned,
    )


def main() -> None:
    place = msgspec.json.decode(sys.argv[1], type=Place)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = place.interface
    workers = place.case.workers
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(place.store, workers),
        rank=place.rank,
        world_size=workers,
        timeout=datetime.timedelta(seconds=300),
    )
    told = measure(place.case)
    if place.rank == 0:
        print(msgspec.json.encode(told).decode(), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
