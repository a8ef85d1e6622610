"""Runs a pair, calibrates where its kind asks for it, and predicts it."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from coordinate import Ran, Run
from host import Load, wait_for_quiet
from pairs import Pair, Shares

from isthmus.cost import build_plan
from isthmus.experiments import ProcessPlace, run_spec
from isthmus.fleet import Fleet, Link, Route, corrected
from isthmus.graph import cuts
from isthmus.job import Job, Prepared, prepare
from isthmus.plans import Plan
from isthmus.simulator import Overheads, SimulationOptions, simulate
from isthmus.trace import Trace, steady_step_s, step_times
from isthmus_testing.calibration import Calibration, Warmup, calibrate
from isthmus_testing.lab import COORDINATOR, Lab, measure

QUIET_CORES = 0.15
"""A run while others used more of the host than this is repeated."""
LATE_SHARE = 0.02
"""An emulated run whose tasklets overran by more than this is repeated."""
PROBE_S = 2.0
SEEDS = range(9)
"""Of the simulations whose median is the prediction, where durations scatter."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    steps: int
    warmup_steps: int
    tries: int
    """Runs of a plan until one was undisturbed; if none was, the least disturbed counts."""
    timeout_s: float
    """How long to wait for a quiet host before each run."""
    folder: Path


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One run, and what else the host did."""

    trace: Trace
    late_share: float
    others_cores: float
    """Cores that other processes used meanwhile."""

    @property
    def disturbed(self) -> bool:
        return self.others_cores > QUIET_CORES or self.late_share > LATE_SHARE


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A pair's row. Errors are relative to the measured step."""

    when: str
    kind: str
    pair: str
    slow: float
    stages: int
    measured_s: float
    steps_s: tuple[float, ...]
    simulated_s: float
    closed_form_s: float
    eq3_s: float
    bottleneck: str
    late_share: float
    others_cores: float
    """Cores that other processes used meanwhile: the largest over the pair's runs."""

    @property
    def key(self) -> str:
        return f"{self.kind}: {self.pair}"

    @property
    def error(self) -> float:
        return self.simulated_s / self.measured_s - 1

    @property
    def closed_form_error(self) -> float:
        return self.closed_form_s / self.measured_s - 1

    @property
    def eq3_error(self) -> float:
        return self.eq3_s / self.measured_s - 1


def boundaries(prepared: Prepared, fleet: Fleet, shares: Shares) -> list[int]:
    """The legal cuts nearest to these shares of the FLOPs."""
    problem = prepared.problem(fleet)
    legal = [cut.position for cut in cuts(prepared.flow)]
    done, found = 0, list[int]()
    for share in shares[:-1]:
        done += share
        wanted = problem.cumulative_flops[-1] * done / sum(shares)
        later = [p for p in legal if not found or p > found[-1]]
        found.append(min(later, key=lambda p: abs(problem.cumulative_flops[p] - wanted)))
    return found


def plan_of(prepared: Prepared, fleet: Fleet, shares: Shares) -> Plan:
    """Of a job whose labels stay, the first device has the last stage too, beside its share."""
    problem, names, inner = prepared.problem(fleet), fleet.names, boundaries(prepared, fleet, shares)
    if problem.last_start is not None:
        names, inner = (*names, names[0]), [*inner, problem.last_start]
    return build_plan(problem, names, inner, planner="shares of FLOPs")


def run_plan(job: Job, plan: Plan, fleet: Fleet, lab: Lab | None, settings: Settings) -> Measured:
    """Run until undisturbed, at most `settings.tries` times."""
    found: list[Measured] = []
    while len(found) < settings.tries and not (found and not found[-1].disturbed):
        wait_for_quiet(QUIET_CORES, settings.timeout_s)
        load = Load()
        ran = _conduct(_run(job, plan, fleet, lab), lab)
        trace = Trace(source="runtime", run="prediction", spans=ran.spans)
        elapsed_s = max(span.end_s for span in ran.spans)
        late_share = max(ran.late_s.values()) / elapsed_s if lab is None else 0.0
        found.append(Measured(trace=trace, late_share=late_share, others_cores=load.cores))
    return min(found, key=lambda m: (m.late_share > LATE_SHARE, m.others_cores))


def _run(job: Job, plan: Plan, fleet: Fleet, lab: Lab | None) -> Run:
    if lab is None:
        return Run(job=job, fleet=fleet, plan=plan)
    places = {
        n: ProcessPlace(prefix=_inside(lab.command(n)), host=lab.addresses[n], trusted_network=True)
        for n in fleet.names
    }
    return Run(job=job, fleet=fleet, plan=plan, places=places, host=lab.addresses[COORDINATOR])


def _inside(words: list[str]) -> tuple[str, ...]:
    """The coordinating process is in the lab's user namespace already, where there is one: it changes the network
    only."""
    return tuple(w for w in words if not w.startswith(("--user=", "--preserve-credentials")))


def _conduct(run: Run, lab: Lab | None) -> Ran:
    prefix = lab.command(COORDINATOR) if lab is not None else []
    program = [*prefix, sys.executable, str(Path(__file__).with_name("coordinate.py"))]
    done = subprocess.run(program, input=msgspec.json.encode(run), stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout, type=Ran)


class Emulation:
    """Predicts and measures emulated pairs. What the fleet does not say of this host comes from one run of another
    plan: the lanes' own delays, the updates, and how much equal tasklets scatter. In a plan of equal stages the scatter
    decides which of two tasklets is ready first."""

    def __init__(self, pair: Pair, shares: Shares, settings: Settings) -> None:
        prepared = prepare(pair.job(settings.warmup_steps, settings.folder))
        plan = plan_of(prepared, pair.fleet, shares)
        measured = run_plan(prepared.job, plan, pair.fleet, None, settings)
        self._calibration = calibrate([Warmup(plan, measured.trace)])
        durations = self._calibration.durations(plan)
        updates = [seconds for (_, work), seconds in durations.items() if work == "update"]
        self._update_s = sum(updates) / len(updates)
        self._scatter = scatter(measured.trace)
        self._settings = settings

    def result(self, pair: Pair) -> Result:
        prepared, fleet = prepare(pair.job(self._settings.steps, self._settings.folder)), pair.fleet
        plan = plan_of(prepared, fleet, pair.shares)
        options = SimulationOptions(
            overheads=_overheads(self._calibration),
            header_bytes=self._calibration.header_bytes,
            update_s=self._update_s,
            jitter=self._scatter,
        )
        each = (msgspec.structs.replace(options, seed=seed) for seed in SEEDS)
        simulated_s = statistics.median(steady_step_s(simulate(plan, fleet, run_spec(prepared), o)) for o in each)
        measured = run_plan(prepared.job, plan, fleet, None, self._settings)
        return _result(pair, plan, simulated_s, measured, measured.others_cores)


def scatter(trace: Trace) -> float:
    """Relative standard deviation of equal tasklets, read off their quartiles: the median over devices and kinds.
    The first step is left out, as in the calibration."""
    seconds: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for span in trace.spans:
        if span.name in ("F", "B") and span.step > 0:
            seconds[span.device, span.name].append(span.end_s - span.start_s)
    quartiles = (statistics.quantiles(each, n=4) for each in seconds.values())
    return statistics.median((high - low) / (1.349 * middle) for low, middle, high in quartiles)


def network_result(pair: Pair, settings: Settings) -> Result:
    """Links from probes, speeds from runs with other cuts, then the prediction, and only then the run."""
    prepared, fleet = prepare(pair.job(settings.steps, settings.folder)), pair.fleet
    others_cores = 0.0
    with Lab(fleet) as lab:
        probed = probe(lab, fleet)
        warmups: list[Warmup] = []
        for shares in pair.warmups:
            job = pair.job(settings.warmup_steps, settings.folder)
            plan = plan_of(prepared, fleet, shares)
            ran = run_plan(job, plan, fleet, lab, settings)
            others_cores = max(others_cores, ran.others_cores)
            warmups.append(Warmup(plan, ran.trace))
        calibration = calibrate(warmups)
        plan = plan_of(prepared, fleet, pair.shares)
        options = SimulationOptions(
            overheads=_overheads(calibration),
            header_bytes=calibration.header_bytes,
            durations=calibration.durations(plan),
        )
        simulated_s = steady_step_s(simulate(plan, probed, run_spec(prepared), options))
        measured = run_plan(prepared.job, plan, fleet, lab, settings)
    # The closed form and Eq. 3 get the same links and, as FusionLLM has it, one factor per device.
    problem = prepared.problem(corrected(probed, calibration.flops_per_s(plan), {}))
    scaled = build_plan(problem, fleet.names, plan.boundaries(), planner=plan.planner)
    return _result(pair, scaled, simulated_s, measured, max(others_cores, measured.others_cores))


def probe(lab: Lab, fleet: Fleet) -> Fleet:
    """The fleet with the links that neighbours use as they were measured."""
    routes: list[Route] = []
    for a, b in itertools.pairwise(fleet.names):
        for source, target in ((a, b), (b, a)):
            found = measure(lab, source, target, PROBE_S)
            routes.append(Route(source, target, Link(found.delay_s, found.payload_bytes_per_s)))
    links = msgspec.structs.replace(fleet.links, devices=tuple(routes))
    return msgspec.structs.replace(fleet, links=links)


def _overheads(calibration: Calibration) -> Overheads:
    return Overheads(tasklet_s=calibration.tasklet_s, handover_s=calibration.handover_s)


def _result(pair: Pair, plan: Plan, simulated_s: float, measured: Measured, others_cores: float) -> Result:
    return Result(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        kind=pair.kind,
        pair=pair.name,
        slow=pair.slow,
        stages=len(plan.stages),
        measured_s=steady_step_s(measured.trace),
        steps_s=tuple(s for _, s in sorted(step_times(measured.trace).items())),
        simulated_s=simulated_s,
        closed_form_s=plan.predicted.step_s,
        eq3_s=plan.predicted.eq3_step_s,
        bottleneck=plan.predicted.bottleneck,
        late_share=measured.late_share,
        others_cores=others_cores,
    )
