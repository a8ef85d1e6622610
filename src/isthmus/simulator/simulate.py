"""A plan on a virtual clock: its trace, and what its machines say at the end."""

from __future__ import annotations

from collections.abc import Iterable

from isthmus.errors import UserError, unknown_name
from isthmus.fleet import Fleet
from isthmus.plans import Plan
from isthmus.protocol.work import RunSpec
from isthmus.simulator.options import Fault, SimulationOptions
from isthmus.simulator.run import RunSimulation, SimulatedRun
from isthmus.trace import Trace


def simulate(plan: Plan, fleet: Fleet, spec: RunSpec, options: SimulationOptions | None = None) -> Trace:
    """The trace of a run of `plan` on `fleet`. See `simulate_run`."""
    return simulate_run(plan, fleet, spec, options).trace


def simulate_run(plan: Plan, fleet: Fleet, spec: RunSpec, options: SimulationOptions | None = None) -> SimulatedRun:
    """Run the plan's replicas on a virtual clock. The same arguments give the same result.

    Times in the trace are seconds since the coordinator opened the first item; joining and placing take none.
    Raises `UserError` for a plan that does not fit the fleet, or whose replicas share out another number of
    micro-batches than the run has; `InternalError` if the machines wait for each other.
    """
    options = options or SimulationOptions()
    if len(plan.replicas) > 1 and spec.micro_batches != plan.micro_batches:
        raise UserError(
            f"simulation: micro_batches: got {spec.micro_batches}, expected {plan.micro_batches}, "
            f"which the plan shares out to its {len(plan.replicas)} replicas"
        )
    check_faults(options.faults, fleet)
    return RunSimulation(plan, fleet, spec, options).run()


def check_faults(faults: Iterable[Fault], fleet: Fleet) -> None:
    """UserError for a fault of a device that the fleet does not have."""
    for fault in faults:
        for name in filter(None, (fault.device, fault.other)):
            if name not in fleet.names:
                raise unknown_name(f"device in {fault.option}", name, fleet.names)
