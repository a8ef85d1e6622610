"""`isthmus.what_if`: a job planned again under changes of its fleet and its settings."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from isthmus.api.job_overrides import job_of
from isthmus.api.make_plan import fleet_for, make, steady_on, with_steady
from isthmus.api.observer import Observer, Silent, searched
from isthmus.cost import build_again, layouts_of, preference, step_price
from isthmus.cost.price import is_priced
from isthmus.errors import UserError
from isthmus.fleet import Fleet, edits
from isthmus.job import Job, Prepared, prepare, prepared_again
from isthmus.job.settings import DTYPES
from isthmus.overrides import read_overrides
from isthmus.planners import SearchStopped, cut_short, scheduled
from isthmus.plans import Plan
from isthmus.report import linked_devices
from isthmus.report.what_if_table import WhatIf, WhatIfRow
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
