"""Executors of this machine that are emulated: as the job slows them down, or as devices of its fleet."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from isthmus.copies import asked
from isthmus.data.clients import ClientData
from isthmus.federated.client_costs import ClientCosts, client_costs
from isthmus.federated.emulated_speed import DevicePacer, Pacer
from isthmus.federated.executor_fleet import transfer_s
from isthmus.federated.job import FederatedJob, emulation


def counted_costs(job: FederatedJob, data: ClientData) -> ClientCosts:
    """Return the same as `client_costs`, in a copy of this process: a process that has trained cannot be copied any
    more."""
    return asked(lambda: client_costs(job, data), ClientCosts)


def pacers(job: FederatedJob, data: ClientData, executors: int) -> Callable[[int], Pacer]:
    """Executor's number -> its pacer. UserError for devices of the fleet that are too small, or FLOPs that cannot be
    counted."""
    fleet = job.executor_fleet(executors)
    if fleet is None:
        return lambda number: Pacer(emulation(job, number).clock())
    costs = counted_costs(job, data)
    fleet.check_memory(costs.memory_bytes)

    def pacer(number: int) -> Pacer:
        flops_per_s = fleet.flops_per_s(number)

        def client_s(samples: int, pass_: int) -> float:
            return costs.passes[pass_].flops * job.local.used(samples) / flops_per_s

        return DevicePacer(
            client_s,
            emulation(job, number),
            receive_s=partial(transfer_s, fleet.incoming(number)),
            send_s=partial(transfer_s, fleet.outgoing(number)),
        )

    return pacer
