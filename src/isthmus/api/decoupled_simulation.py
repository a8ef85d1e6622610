"""Decoupled replicas of a job, simulated: how fast they are together, and what faults cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from isthmus.api.decoupled import (
    batch_seconds,
    busiest_link,
    fragment_bytes,
    replica_models,
    replica_plans,
    step_text,
    with_period,
)
from isthmus.api.forecast import StruckRun
from isthmus.cost import Price, is_priced, step_price
from isthmus.cost.price import GB, SECONDS_PER_HOUR
from isthmus.errors import UserError
from isthmus.fleet import Fleet
from isthmus.graph import OpGraph
from isthmus.job import Job, fleet_of, prepare
from isthmus.plans import Plan
from isthmus.runtime.decoupled.groups import replica_groups
from isthmus.runtime.decoupled.merged_run import merge_rules, merged_fragments
from isthmus.runtime.decoupled.run import check_decoupled
from isthmus.simulator import Fault
from isthmus.simulator.merging import FragmentBytes, MergingSimulation, ReplicaModel, SimulatedReplicas
from isthmus.simulator.run import check_faults
from isthmus.trace import Trace
from isthmus.units import format_duration


class DecoupledForecast(StruckRun, frozen=True, kw_only=True):
    """A simulated run beside its devices that are never disturbed."""

    run: SimulatedReplicas
    full_speed: float  # samples per second of all devices, none of which ever waits or fails
    plans: Mapping[str, Plan]  # the first plan of each replica
    step_s: Mapping[str, float]  # seconds of each replica's step on that plan, as simulated
    period: int  # batches in which every fragment is merged once
    note: str  # why, where that was planned; else empty

    def notes(self) -> Iterable[tuple[float, str]]:
        return self.run.notes

    @property
    def goodput(self) -> float:
        """Samples per second whose steps are in the result, over the full speed."""
        return self.run.useful_samples / (self.run.seconds * self.full_speed) if self.run.seconds else 0.0

    @property
    def trace(self) -> Trace:
        return Trace(source="simulator", run="decoupled", spans=tuple(self.run.spans))

    @property
    def steps(self) -> dict[str, int]:
        return dict(sorted(Counter(name for _, name, _ in self.run.steps).items()))

    def lines(self) -> list[str]:
        run = self.run
        steps = ", ".join(f"{name} {count}" for name, count in self.steps.items())
        return [
            *(step_text(name, plan, self.step_s[name]) for name, plan in self.plans.items()),
            *([self.note] if self.note else []),
            *self.struck_lines(),
            f"steps: {steps}",
            f"{len(run.merges)} merges; {run.late} contributions came too late, and counted in a later one",
            f"devices computed {100 * run.used:.1f} % of the time that they were there",
            f"{run.useful_samples:,.0f} samples merged, {100 * self.goodput:.1f} % of what is possible without faults",
            self.concluded(format_duration(run.seconds)),
        ]

    def summary(self) -> dict[str, object]:
        run = self.run
        return self.ended() | {
            "goodput": self.goodput,
            "used": run.used,
            "useful_samples": run.useful_samples,
            "replicas": {
                name: {"devices": list(plan.used), "step_s": self.step_s[name]} for name, plan in self.plans.items()
            },
            "steps": self.steps,
            "period": self.period,
            "merges": len(run.merges),
            "late_contributions": run.late,
        }


class PlannedReplicas(NamedTuple):
    job: Job  # with its period, where that was planned
    fleet: Fleet
    graph: OpGraph
    plans: Mapping[str, Plan]
    models: Sequence[ReplicaModel]
    sizes: FragmentBytes
    note: str  # why the period is as it is, where that was planned; else empty

    def summary(self) -> dict[str, object]:
        """Return the summary as JSON has it: the plan documents by replica."""
        found: dict[str, object] = {"period": self.job.sync.every, "samples_per_s": self.samples_per_s}
        priced = {"price_per_1000_batches": 1000 * self.price.total} if is_priced(self.fleet) else {}
        return {**found, **priced, "replicas": self.plans}

    @property
    def samples_per_s(self) -> float:
        """The speed of all replicas together, none of which ever waits."""
        return self.job.training.batch_size / batch_seconds(self.job, self.models)

    @property
    def price(self) -> Price:
        """The price of a batch: the devices of all replicas, and the bytes that leave priced regions."""
        batch_s, egress = batch_seconds(self.job, self.models), 0.0
        devices = [name for plan in self.plans.values() for name in plan.used]
        merger = self.fleet.device(self.fleet.names[0]).region
        for model in self.models:
            plan = self.plans[model.name]
            egress += batch_s / model.step_s * step_price(plan, self.fleet).egress
            region = self.fleet.device((model.devices or (model.name,))[0]).region
            for source, carried in ((region, self.sizes.delta), (merger, self.sizes.change)):
                per_gb = self.fleet.region_info_of(source).egress_price_per_gb if region != merger else 0.0
                egress += per_gb * sum(carried) / GB / self.job.sync.every
        per_hour = sum(self.fleet.device(name).price_per_hour for name in devices)
        return Price(devices=batch_s / SECONDS_PER_HOUR * per_hour, egress=egress)

    def lines(self) -> list[str]:
        """Return how fast they are together, when they merge, and what that costs, in words."""
        fragments, every = self.job.sync.decoupled.fragments, self.job.sync.every
        what = "The weights are" if fragments == 1 else f"Each of {fragments} fragments of the weights is"
        batch_s, link = batch_seconds(self.job, self.models), busiest_link(self.job, self.models, self.sizes)
        price = self.price
        found = [
            f"All replicas together: {self.samples_per_s:.4g} samples/s, a batch in {format_duration(batch_s)}.",
            self.note or f"{what} merged once in {every} batches of all replicas.",
        ]
        if link and not self.note:
            found.append(f"Busiest link: {link}.")
        if is_priced(self.fleet):
            found.append(
                f"1,000 batches cost {1000 * price.total:.4g} in the fleet's unit: {1000 * price.devices:.4g} for "
                f"devices, {1000 * price.egress:.4g} for bytes that leave priced sites."
            )
        return found

    def devices(self, replica: str) -> Fleet:
        return self.fleet.subset(replica_groups(self.job, self.fleet)[replica])


def plan_replicas(job: Job) -> PlannedReplicas:
    """UserError for a job that cannot run like this."""
    fleet = fleet_of(job)
    check_decoupled(job, fleet)
    prepared = prepare(job, least=len(replica_groups(job, fleet)))
    plans = replica_plans(prepared, fleet)
    models = replica_models(prepared, fleet, plans)
    sizes = fragment_bytes(job, merged_fragments(job))
    job, note = with_period(job, models, sizes)
    return PlannedReplicas(job, fleet, prepared.captured.train, plans, models, sizes, note)


def simulate_decoupled(job: Job, faults: Sequence[Fault] = ()) -> DecoupledForecast:
    """The job's whole run. UserError for a job that cannot run like this, or a fault that the fleet cannot have."""
    fleet = fleet_of(job)
    check_faults(tuple(faults), fleet)
    if {fault.device for fault in faults if fault.kind == "join"} >= set(fleet.names):
        raise UserError("--join: got all devices, expected one that is there from the start")
    planned = plan_replicas(job)
    job, models = planned.job, planned.models
    training = job.training
    run = MergingSimulation(
        merge_rules(job),
        models,
        planned.sizes,
        faults,
        seed=training.seed,
        merger=fleet.names[0],
        save_samples=training.save_every * training.batch_size,
    ).run()
    return DecoupledForecast(
        run=run,
        faults=tuple(faults),
        full_speed=sum(model.samples / model.step_s for model in models),
        plans=planned.plans,
        step_s={model.name: model.step_s for model in models},
        period=job.sync.every,
        note=planned.note,
    )
