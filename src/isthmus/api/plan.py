"""`isthmus.plan`, `simulate`, `compare` and `verify`."""

from __future__ import annotations

import contextlib
import inspect
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict, Unpack, cast

import msgspec
from torch import Tensor, nn

from isthmus.api.given import batch_size, fleet_name, module_of
from isthmus.api.job_overrides import job_of
from isthmus.api.make_plan import HEADER_BYTES, compare_planners, make, plan_job, simulate_job, verify_plan
from isthmus.api.observer import Observer, Silent, searched
from isthmus.data import ColumnSpec, DataSpec
from isthmus.data.description import DataDescription
from isthmus.errors import UserError
from isthmus.fleet import Fleet, resolve_fleet
from isthmus.job import Job, TrainingConfig, checked, fleet_of, prepare
from isthmus.models import ModelSpec
from isthmus.models.registry import give_model
from isthmus.overrides import overridden_struct
from isthmus.plans import Plan, load_plan
from isthmus.protocol import RunSpec
from isthmus.report import Comparison
from isthmus.runtime.processes.signals import Stop
from isthmus.simulator import SimulationOptions
from isthmus.simulator import simulate as simulate_plan
from isthmus.trace import Trace
from isthmus.verification import Verdict

Inputs = Mapping[str, Tensor] | Sequence[Tensor] | Tensor
STEPS = 4


class HowToPlan(TypedDict, total=False):
    """Settings of a job for a module."""

    inputs: Inputs
    """Example inputs, of which the first dimension is the sample: by name, or in the order of the forward."""
    batch: int  # samples per optimizer step; by default 32
    planner: str  # see `isthmus planners`; by default `auto`


def plan(
    what: Job | str | Path | nn.Module | Callable[[], nn.Module],
    fleet: Fleet | str | Path | None = None,
    *,
    overrides: Mapping[str, object] = {},
    observer: Observer | None = None,
    stop: Stop | None = None,
    **how: Unpack[HowToPlan],
) -> Plan:
    """Plan which device gets which part of a model, how messages travel, and how long a step will take.

    `what` is a job (a file or a `Job`), or a module (or a call that returns one) with example `inputs`. A module whose
    forward returns no scalar
    loss is planned with the mean of what it returns. `fleet` is a `Fleet`, a built-in one's name or a TOML file; by
    default the job's, or `laptop`. Times in the plan are seconds, sizes bytes.

    UserError for what is wrong with the job or the module, FleetTooSmall where no plan fits.

    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    >>> plan = isthmus.plan(net, "laptop", inputs=torch.zeros(2, 8), batch=16, planner="even")
    >>> len(plan.used), plan.micro_batches, plan.predicted.step_s > 0
    (2, 8, True)
    """
    observer, stop = observer or Silent(), stop or Stop()
    with tempfile.TemporaryDirectory() as folder:
        if callable(what):
            job, samples = _job_of_module(module_of(what), fleet or "laptop", how, overrides, Path(folder))
            prepared = prepare(job, samples)
            problem = prepared.problem(fleet_of(job))
            return searched(observer, stop, lambda: make(prepared.job, problem), best_so_far=True)
        if how.keys() - {"planner"}:
            raise UserError(f"plan: got {', '.join(how)} for a job, expected overrides")
        job = _with_fleet(job_of(what, _and_planner(overrides, how)), fleet, Path(folder))
        return plan_job(job, observer, stop).plan


def simulate(
    what: Plan | Job | str | Path,
    fleet: Fleet | str | Path | None = None,
    *,
    steps: int = STEPS,
    overrides: Mapping[str, object] = {},
    observer: Observer | None = None,
    stop: Stop | None = None,
) -> Trace:
    """The plan on a virtual clock: the machines of a real run, with modelled durations.

    `what` is a `Plan`, which needs the fleet that it was made for, or a job, which is planned first. A trace's times
    are seconds. UserError as `plan`, and for a plan that names a device which the fleet does not have.

    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    >>> plan = isthmus.plan(net, "laptop", inputs=torch.zeros(2, 8), batch=16, planner="even")
    >>> trace = isthmus.simulate(plan, "laptop", steps=2)
    >>> sorted({span.step for span in trace.spans if span.name == "F"})
    [0, 1]
    """
    if isinstance(what, Plan):
        if fleet is None:
            raise UserError("simulate: got a plan alone, expected the fleet too that it was made for")
        found = fleet if isinstance(fleet, Fleet) else resolve_fleet(str(fleet))
        unknown = [device for device in what.devices if device not in found.names]
        if unknown:
            raise UserError(f"simulate: the plan uses {', '.join(unknown)}, which fleet {found.name!r} does not have")
        spec = RunSpec(steps=steps, micro_batches=what.micro_batches, micro_batch_size=what.micro_batch_size)
        return simulate_plan(what, found, spec, SimulationOptions(header_bytes=HEADER_BYTES))
    with tempfile.TemporaryDirectory() as folder:
        job = _with_fleet(job_of(what, overrides), fleet, Path(folder))
        job = msgspec.structs.replace(job, training=msgspec.structs.replace(job.training, steps=steps))
        return simulate_job(job, observer or Silent(), stop or Stop()).trace


def compare(
    job: Job | str | Path,
    planners: str | Sequence[str] = "all",
    *,
    overrides: Mapping[str, object] = {},
    observer: Observer | None = None,
    stop: Stop | None = None,
) -> Comparison:
    """The plans of several planners side by side, best first, each simulated; a planner that finds none has its reason
    in its row. UserError for an unknown planner, and where none finds a plan.

    >>> found = isthmus.compare(job_file, ["even", "chain"])
    >>> sorted(row.planner for row in found.rows)
    ['chain', 'even']
    """
    names = planners if isinstance(planners, str) else ",".join(planners)
    found, refusals = compare_planners(job_of(job, overrides), names, observer or Silent(), stop or Stop())
    if len(refusals) == len(found.rows):
        raise refusals[0]
    return found


def verify(plan: Plan | str | Path, job: Job | str | Path, *, overrides: Mapping[str, object] = {}) -> Verdict:
    """Every figure of a plan computed again, by code that planners do not share, and its bound searched anew.
    UserError for what is no plan document, or for another job's plan.

    >>> verdict = isthmus.verify(isthmus.plan(job_file, planner="even"), job_file)
    >>> verdict.differences
    ()
    """
    return verify_plan(job_of(job, overrides), plan if isinstance(plan, Plan) else load_plan(Path(plan)))


class _Mean(nn.Module):
    """A scalar for what has no loss yet: gradients flow through all of it."""

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.module = module
        self._names = names

    def forward(self, **columns: Tensor) -> Tensor:
        return _mean_of(self.module(*(columns[name] for name in self._names)))


class _MeanByName(_Mean):
    def forward(self, **columns: Tensor) -> Tensor:
        return _mean_of(self.module(**columns))


def _mean_of(found: object) -> Tensor:
    if isinstance(found, Tensor):
        return found if found.ndim == 0 else found.float().mean()
    if isinstance(found, Mapping):
        values = cast("Mapping[str, object]", found)
        return _mean_of(values["loss"] if values.get("loss") is not None else list(values.values()))
    if isinstance(found, list | tuple):
        parts = [value for value in cast("Sequence[object]", found) if isinstance(value, Tensor)]
        means = [_mean_of(part) for part in parts if part.is_floating_point()]
        if means:
            return sum(means[1:], means[0])
    raise UserError(f"plan: forward returned {type(found).__name__}, expected tensors, a mapping or a sequence of them")


def _job_of_module(
    module: nn.Module, fleet: Fleet | str | Path, how: HowToPlan, overrides: Mapping[str, object], folder: Path
) -> tuple[Job, DataDescription]:
    inputs, batch = how.get("inputs"), how.get("batch", 32)
    if inputs is None:
        raise UserError("plan: inputs: missing, expected example inputs of the module")
    if isinstance(inputs, Mapping):
        named, wrapped = dict(inputs), _MeanByName(module, tuple(inputs))
    elif not isinstance(inputs, Tensor | Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UserError(f"plan: inputs: got {inputs!r:.80}, expected tensors, or a mapping of them by name")
    else:
        parts = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        named = dict(zip(_names(module, len(parts)), parts, strict=True))
        wrapped = _Mean(module, tuple(named))
    if scalars := [name for name, tensor in named.items() if tensor.ndim == 0]:
        raise UserError(f"plan: inputs: {', '.join(scalars)}: got a scalar, expected a first dimension of samples")
    columns = {
        name: ColumnSpec(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape[1:]))
        for name, tensor in named.items()
    }
    name = type(module).__name__.lower()
    job = Job(
        name=name,
        model=ModelSpec(name=give_model(wrapped)),
        data=DataSpec(kind="npz", options={"path": "inputs"}),
        fleet=fleet_name(fleet, folder),
        planner=how.get("planner", "auto"),
        training=TrainingConfig(batch_size=batch_size(batch)),
    )
    job = checked(overridden_struct(job, overrides, "plan"))
    return job, DataDescription(columns=columns, train=job.training.batch_size)


def _names(module: nn.Module, count: int) -> list[str]:
    """Return the names of the forward's parameters; numbers where it takes any."""
    with contextlib.suppress(ValueError, TypeError):
        parameters = inspect.signature(module.forward).parameters.values()
        names = [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
        if len(names) >= count:
            return names[:count]
    return [f"input_{number}" for number in range(count)]


def _with_fleet(job: Job, fleet: Fleet | str | Path | None, folder: Path) -> Job:
    return job if fleet is None else msgspec.structs.replace(job, fleet=fleet_name(fleet, folder))


def _and_planner(overrides: Mapping[str, object], how: HowToPlan) -> Mapping[str, object]:
    planner = how.get("planner")
    return overrides if planner is None else {**overrides, "planner": planner}
