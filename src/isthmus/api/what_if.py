"""`isthmus.what_if`: a job planned again under changes of its fleet and its settings; and which boundary and codecs for
this fleet: the plan with the least time to a loss that a budget allows."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from torch._subclasses.fake_tensor import FakeTensorMode

from isthmus.api.job_overrides import job_of
from isthmus.api.make_plan import fleet_for, make, steady_on, with_steady
from isthmus.api.observer import Observer, Silent, searched
from isthmus.cost import Problem, build_again, layouts_of, preference, step_price
from isthmus.cost.compression.messages import sender_of, stage_messages_of
from isthmus.cost.price import is_priced
from isthmus.errors import UserError
from isthmus.expected_loss import BOUNDARIES, MEASURED_ON, TOPK, boundary_increase, increase_of
from isthmus.fleet import Fleet, edits
from isthmus.job import Job, Prepared, prepare, prepared_again
from isthmus.job.settings import DTYPES
from isthmus.models import BoundaryOptions, build_model
from isthmus.models.residual_stream import find_stream
from isthmus.overrides import read_overrides
from isthmus.planners import SearchStopped, cut_short, scheduled
from isthmus.plans import CompressionConfig, Plan
from isthmus.report import linked_devices
from isthmus.report.comparison import BoundaryChoice, BoundaryRow, WhatIf, WhatIfRow, replica_line
from isthmus.runtime.processes.signals import Stop

EVERYTHING = "all"  # stands for the usual changes
MOST_KINDS, MOST_LINKS, MOST_REGIONS = 6, 3, 3
"""Counts of the usual changes: kinds of devices, in the fleet's order; links, the slowest first; regions in use."""
GRAMMAR = {  # the grammar of each change after the equals sign
    "device": "NAME[@REGION][*COUNT]",
    "region": "REGION",
    "without": "NAME",
    "link": "A:B*FACTOR",
    "latency": "A:B*FACTOR",
    "uplink": "REGION*FACTOR",
    "speed": "NAME*FACTOR",
    "memory": "[NAME]*FACTOR",
    "batch": "SAMPLES or *FACTOR",
    "precision": "fp32, bf16 or fp16",
}
JOINED = " + "

Edit = Callable[[Fleet], Fleet]


class Change(NamedTuple):
    text: str  # as `--what-if` takes it
    what: str  # in words
    overrides: Mapping[str, object]
    edits: tuple[Edit, ...]


AS_IT_IS = Change("", "as it is", {}, ())


class _Part(NamedTuple):
    what: str
    edit: Edit | None = None
    overrides: Mapping[str, object] = {}


def read_change(text: str, job: Job) -> Change:
    """One change, or several joined by " + ". UserError for what is none."""
    parts = [_read_part(part.strip(), job) for part in text.split(JOINED)]
    overrides = {key: value for part in parts for key, value in part.overrides.items()}
    found = tuple(part.edit for part in parts if part.edit is not None)
    return Change(text, " and ".join(part.what for part in parts), overrides, found)


def usual_changes(job: Job, fleet: Fleet, plan: Plan) -> Iterator[Change]:
    """One more of each kind of device, faster links, a region more or less, bf16, twice the batch, half the memory."""
    kinds = {msgspec.structs.replace(device, name="kind"): device.name for device in reversed(fleet.devices)}
    names = sorted(kinds.values(), key=fleet.names.index)
    texts = [f"device={name}" for name in names[:MOST_KINDS]]
    for a, b in _slowest_links(fleet, plan)[:MOST_LINKS]:
        texts += [f"link={a}:{b}*2", f"latency={a}:{b}*0.5"]
    used = list(dict.fromkeys(fleet.device(name).region for name in plan.used))
    texts += [f"uplink={name}*2" for name in used if fleet.region_info_of(name).uplink_bytes_per_s is not None]
    if len(fleet.regions) > 1:
        texts += [f"{kind}={name}" for kind in ("region", "without") for name in used[:MOST_REGIONS]]
    texts += ["precision=bf16"] * (job.training.precision == "fp32") + ["batch=*2", "memory=*0.5"]
    for text in texts:
        yield read_change(text, job)


def _slowest_links(fleet: Fleet, plan: Plan) -> list[tuple[str, str]]:
    """Pairs of regions between which the plan sends."""
    slowest = dict[tuple[str, str], float]()
    for a, b in linked_devices(plan):
        x, y = sorted((fleet.device(a).region, fleet.device(b).region))
        seconds = max(fleet.link(a, b).transfer_s(edits.PROBED_BYTES), fleet.link(b, a).transfer_s(edits.PROBED_BYTES))
        slowest[x, y] = max(seconds, slowest.get((x, y), 0.0))
    return sorted(slowest, key=lambda pair: -slowest[pair])


def _read_part(text: str, job: Job) -> _Part:
    kind, equals, value = text.partition("=")
    kind, value = kind.strip(), value.strip()
    if kind in _READ and equals:
        return _READ[kind](value, job)
    if kind.split(".")[0] in Job.__struct_fields__ and equals:
        return _Part(text, overrides=read_overrides([text], "--what-if"))
    known = [EVERYTHING, *(f"{name}={form}" for name, form in GRAMMAR.items())]
    raise UserError(f"--what-if: got {text!r}, expected {'; '.join(known)}; or KEY=VALUE of the job")


def _wrong(kind: str, value: str) -> UserError:
    return UserError(f"--what-if: {kind}: got {value!r}, expected {kind}={GRAMMAR[kind]}")


def _scaled(kind: str, value: str) -> tuple[str, float]:
    """Return the text before the star, and the factor after it."""
    name, star, text = value.rpartition("*")
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not star or not 0 < factor < 1e6:
        raise _wrong(kind, value)
    return name.strip(), factor


def _times(factor: float) -> str:
    return {2.0: "twice", 0.5: "half"}.get(factor, f"{factor:g} times")


def _device(value: str, job: Job) -> _Part:
    found = re.fullmatch(r"([^@*]+)(?:@([^@*]+))?(?:\*([1-9][0-9]{0,3}))?", value)
    if found is None:
        raise _wrong("device", value)
    name, region, count = found[1], found[2], int(found[3] or 1)
    devices = "1 more device" if count == 1 else f"{count} more devices"
    where = f" in {region}" if region else ""
    edit = partial(edits.with_another_device, name=name, region=region, count=count)
    return _Part(f"{devices} like {name}{where}", edit)


def _region(value: str, job: Job) -> _Part:
    return _Part(f"another region like {value}", partial(edits.with_another_region, region=value))


def _without(value: str, job: Job) -> _Part:
    return _Part(f"without {value}", partial(edits.without, name=value))


def _link(value: str, job: Job, kind: str = "link") -> _Part:
    ends, factor = _scaled(kind, value)
    a, colon, b = (end.strip() for end in ends.partition(":"))
    if not (a and colon and b):
        raise _wrong(kind, value)
    what = "bandwidth" if kind == "link" else "latency"
    where = f"inside {a}" if a == b else f"between {a} and {b}"
    return _Part(f"{_times(factor)} the {what} {where}", partial(edits.with_links, a=a, b=b, **{what: factor}))


def _uplink(value: str, job: Job) -> _Part:
    region, factor = _scaled("uplink", value)
    return _Part(f"{_times(factor)} the uplink of {region}", partial(edits.with_uplink, region=region, factor=factor))


def _speed(value: str, job: Job) -> _Part:
    name, factor = _scaled("speed", value)
    return _Part(f"{name} {_times(factor)} as fast", lambda fleet: edits.with_speed(fleet, fleet.located(name), factor))


def _memory(value: str, job: Job) -> _Part:
    name, factor = _scaled("memory", value)
    what = f"{_times(factor)} the memory {f'on {name}' if name else 'everywhere'}"
    return _Part(
        what,
        lambda fleet: edits.with_memory_scaled(fleet, fleet.located(name) if name else fleet.names, factor),
    )


def _batch(value: str, job: Job) -> _Part:
    """Micro-batches keep their size, so that a larger batch is cut into more of them."""
    before = job.training.batch_size
    factor = _scaled("batch", value)[1] if value.startswith("*") else None
    given_batch = float(value) if value.isdecimal() else 0.0
    batch = given_batch if factor is None else factor * before
    if batch < 1 or batch % 1:
        raise _wrong("batch", value)
    if job.training.micro_batches is None:  # the number is the default's again
        what = f"{_times(factor)} the batch" if factor is not None else f"batches of {int(batch)}"
        return _Part(what, overrides={"training.batch_size": int(batch)})
    counts = [int(count * batch / before) for count in job.counts]
    if any(count * before != old * batch for count, old in zip(counts, job.counts, strict=True)):
        raise UserError(f"--what-if: batch: got {int(batch)}, expected a multiple of {before // min(job.counts)}")
    overrides: dict[str, object] = {"training.batch_size": int(batch), "training.micro_batches": counts[0]}
    if job.plan.micro_batches:
        overrides["plan.micro_batches"] = counts
    what = f"{_times(factor)} the batch" if factor is not None else f"batches of {int(batch)}"
    return _Part(f"{what}, in {' or '.join(map(str, counts))} micro-batches", overrides=overrides)


def _precision(value: str, job: Job) -> _Part:
    if value not in DTYPES:
        raise _wrong("precision", value)
    return _Part(f"computed in {value}", overrides={"training.precision": value})


_READ: Mapping[str, Callable[[str, Job], _Part]] = {
    "device": _device,
    "region": _region,
    "without": _without,
    "link": _link,
    "latency": partial(_link, kind="latency"),
    "uplink": _uplink,
    "speed": _speed,
    "memory": _memory,
    "batch": _batch,
    "precision": _precision,
}


ROUNDING = 1e-9  # share of a gain below which it is none


class _Asked(NamedTuple):
    change: Change
    job: Job
    fleet: Fleet


def what_if(
    job: Job | str | Path,
    changes: str | Sequence[str] = EVERYTHING,
    *,
    overrides: Mapping[str, object] = {},
    observer: Observer | None = None,
    stop: Stop | None = None,
) -> WhatIf:
    """The job's plan as it is and under each change: step time, samples per second, price, and what a purchase gains.

    `changes` are written as for `isthmus plan --what-if`: "device=cloud-0", "link=cloud:office*2", "batch=*2";
    "all" stands for the usual ones. UserError for a change that cannot be read or made; a change under which the job
    has no plan has its reason in its row.

    >>> found = isthmus.what_if(job_file, ["device=laptop-0", "memory=*0.5"], overrides={"planner": "even"})
    >>> [row.what for row in found.rows]
    ['as it is', '1 more device like laptop-0', 'half the memory everywhere']
    """
    texts = [changes] if isinstance(changes, str) else list(changes)
    return plan_changes(job_of(job, overrides), texts, observer or Silent(), stop or Stop())


def plan_changes(job: Job, texts: Sequence[str], observer: Observer, stop: Stop) -> WhatIf:
    """Plan changes as `what_if` does. Where planning is interrupted: the rows till then."""
    given = [_asked(read_change(text, job), job) for text in texts if text != EVERYTHING]  # capturing takes longer
    fleet, prepared = fleet_for(job), prepare(job)

    def rows() -> tuple[list[WhatIfRow], int]:
        plan = _planned(prepared, fleet)
        now = _row(AS_IT_IS, plan, fleet)
        found, asked = [now], list(given)
        for change in usual_changes(job, fleet, plan) if EVERYTHING in texts else ():
            try:
                asked.insert(len(asked) - len(given), _asked(change, job))
            except UserError as e:  # as bf16 beside settings of another precision
                found.append(WhatIfRow(change=change.text, what=change.what, refused=str(e)))
        for number, one in enumerate(asked):
            if cut_short():
                return found, len(asked) - number
            try:
                found.append(_changed(one, prepared, fleet, plan, now))
            except SearchStopped:
                return found, len(asked) - number
        return found, 0

    found, left_out = searched(observer, stop, rows, best_so_far=True)
    return WhatIf(model=job.model.name, fleet=fleet.name, rows=tuple(found), left_out=left_out)


def _asked(change: Change, job: Job) -> _Asked:
    """UserError for a change that cannot be made."""
    try:
        changed = job_of(job, change.overrides)
        fleet = fleet_for(changed)
        for edit in change.edits:
            fleet = edit(fleet)
    except UserError as e:
        raise type(e)(f"--what-if {change.text}: {e}") from None
    return _Asked(change, changed, fleet)


def _planned(prepared: Prepared, fleet: Fleet) -> Plan:
    """Without a proof: what changes by how much is asked, and not how good each plan is."""
    return make(prepared.job, prepared.problem(fleet), proving=None)


def _changed(asked: _Asked, before: Prepared, fleet: Fleet, today: Plan, now: WhatIfRow) -> WhatIfRow:
    bought = _price_per_hour(asked.fleet) - _price_per_hour(fleet)
    try:
        prepared = prepared_again(before, asked.job)
        plan = _better(prepared, asked, _planned(prepared, asked.fleet), today)
    except UserError as e:
        return WhatIfRow(change=asked.change.text, what=asked.change.what, refused=str(e), bought_per_hour=bought)
    row = _row(asked.change, plan, asked.fleet)
    assert row.samples_per_s is not None and now.samples_per_s is not None
    gained = row.samples_per_s - now.samples_per_s
    gained = 0.0 if abs(gained) < ROUNDING * now.samples_per_s else gained
    return msgspec.structs.replace(
        row, bought_per_hour=bought, gained_per_price=gained / bought if bought > 0 else None
    )


def _better(prepared: Prepared, asked: _Asked, plan: Plan, today: Plan) -> Plan:
    """The plan, or today's on the changed fleet where that is better: a faster link then never makes a step longer."""
    if asked.change.overrides:
        return plan
    problem = prepared.problem(asked.fleet)
    found = [(problem.cut_into(plan.micro_batches), plan)]
    with contextlib.suppress(UserError):  # a device is gone, or has too little memory
        cut = problem.cut_into(today.micro_batches)
        again = scheduled(cut, build_again(cut, layouts_of(today), today))
        found.append((cut, with_steady(again, steady_on(prepared, again, asked.fleet))))
    return min(found, key=lambda pair: preference(*pair, pair[1].predicted.expected_s))[1]


def _row(change: Change, plan: Plan, fleet: Fleet) -> WhatIfRow:
    batch, step_s = plan.micro_batches * plan.micro_batch_size, plan.predicted.expected_s
    return WhatIfRow(
        change=change.text,
        what=change.what,
        step_s=step_s,
        samples_per_s=batch / step_s,
        price_per_1000_samples=1000 / batch * step_price(plan, fleet, step_s).total if is_priced(fleet) else None,
        devices=len(plan.used),
    )


def _price_per_hour(fleet: Fleet) -> float:
    return sum(device.price_per_hour for device in fleet.devices)


def plan_boundaries(job: Job, budget: float, observer: Observer, stop: Stop) -> BoundaryChoice:
    """The job planned without a boundary, with each subspace that was measured, and with bottlenecks on the links that
    hold the pipeline up; codecs by `just-enough` within what each leaves of the budget.

    UserError for a budget below 0, and for a job that has no plan without a boundary either.
    """
    if not 0 <= budget < math.inf:
        raise UserError(f"--loss-budget: got {budget:g}, expected a share of at least 0, as 0.02")
    job = msgspec.structs.replace(_bounded(job, None), compression=None)
    fleet = fleet_for(job)

    def rows() -> list[BoundaryRow]:
        prepared = prepare(job)
        problem = prepared.problem(fleet)
        dense = make(prepared.job, problem, proving=None)
        found = [_boundary_row(prepared, fleet, "none", None, 0.0, budget)]
        try:
            blocks = _block_ends(job, problem)
        except UserError as refusal:
            return [*found, BoundaryRow(name="subspace, residual", settings="", refused=str(refusal))]
        bounded = _subspaces(), _bottlenecks(problem, dense, blocks)
        return found + [_boundary_row(prepared, fleet, *one, budget) for some in bounded for one in some]

    found = searched(observer, stop, rows, best_so_far=True)
    ordered = sorted(found, key=lambda row: row.time_to_loss_s)
    return BoundaryChoice(
        model=job.model.name, fleet=fleet.name, budget=budget, measured_on=MEASURED_ON, rows=tuple(ordered)
    )


def _subspaces() -> Iterator[tuple[str, BoundaryOptions, float]]:
    for rate, increase in BOUNDARIES["subspace"].items():
        yield f"subspace, rate {rate:g}", BoundaryOptions(method="subspace", rate=rate), increase


def _bottlenecks(
    problem: Problem, dense: Plan, blocks: Mapping[str, int]
) -> Iterator[tuple[str, BoundaryOptions, float]]:
    """One behind the block next to each cut whose link takes longer than the slowest device, with the least rate that
    was measured and makes up for it."""
    after: dict[str, float] = {}
    measured = BOUNDARIES["residual"]
    for replica in dense.replicas if measured else ():
        sender = sender_of(problem, replica)
        for message in stage_messages_of(problem, sender):
            needed = message.wire_s(problem, None) / sender.slowest_s
            if needed > 1:
                cut = replica.stages[replica.edges[message.edge].source].last
                block = min(blocks, key=lambda name: abs(blocks[name] - cut))
                rate = min((r for r in measured if r >= needed), default=max(measured))
                after[block] = max(rate, after.get(block, 0.0))
    if after:
        increase = boundary_increase("residual", after.values())
        yield "residual, on slow links", BoundaryOptions(method="residual", after=after), increase


def _block_ends(job: Job, problem: Problem) -> dict[str, int]:
    """The last operator of each block but the last. UserError for a model without a residual stream, and for one whose
    weights are there before it is trained."""
    try:
        _bounded(job, BoundaryOptions(method="subspace"))
    except ValueError as refusal:
        raise UserError(f"model.{refusal}") from None
    with FakeTensorMode():
        blocks = find_stream(build_model(job.model)).blocks
    modules = [op.module for op in problem.flow.operators]
    return {b: max(k for k, m in enumerate(modules) if m == b or m.startswith(f"{b}.")) for b in blocks[:-1]}


def _bounded(job: Job, boundary: BoundaryOptions | None) -> Job:
    return msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, boundary=boundary))


def _boundary_row(
    dense: Prepared, fleet: Fleet, name: str, boundary: BoundaryOptions | None, increase: float, budget: float
) -> BoundaryRow:
    if increase > budget:
        refusal = f"{increase:.2%} of the loss is expected, more than the budget"
        return BoundaryRow(name=name, settings="", refused=refusal)
    packed = CompressionConfig(method="just-enough", ratio=max(TOPK), loss_budget=budget - increase)
    settings = f"{_toml(boundary)}{_packing_toml(packed)}"
    job = msgspec.structs.replace(_bounded(dense.job, boundary), compression=packed)
    try:
        plan = make(job, prepared_again(dense, job).problem(fleet), proving=None)
    except UserError as refusal:
        return BoundaryRow(name=name, settings=settings, refused=str(refusal))
    return BoundaryRow(
        name=name,
        settings=settings,
        step_s=plan.predicted.expected_s,
        bottleneck=plan.predicted.bottleneck,
        replicas=tuple(map(replica_line, plan.replicas)),
        increase=increase + increase_of(plan.replicas),
    )


def _toml(boundary: BoundaryOptions | None) -> str:
    if boundary is None:
        return ""
    if boundary.method == "subspace":
        return f'[model.boundary]\nmethod = "subspace"\nrate = {boundary.rate:g}\n'
    after = ", ".join(f'"{block}" = {rate:g}' for block, rate in boundary.rates.items())
    return f'[model.boundary]\nmethod = "residual"\nafter = {{{after}}}\n'


def _packing_toml(packed: CompressionConfig) -> str:
    return (
        f'[compression]\nmethod = "{packed.method}"\nratio = {packed.ratio:g}\nloss_budget = {packed.loss_budget:g}\n'
    )
