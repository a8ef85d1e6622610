"""`isthmus.what_if`: a job planned again under changes of its fleet and its settings."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from isthmus.api.job_overrides import job_of
from isthmus.api.make_plan import fleet_for, make
from isthmus.api.observer import Observer, Silent
from isthmus.api.search import searched
from isthmus.api.what_if_changes import AS_IT_IS, EVERYTHING, Change, read_change, usual_changes
from isthmus.cost import build_again, layouts_of, preference, step_price
from isthmus.cost.price import is_priced
from isthmus.errors import UserError
from isthmus.fleet import Fleet
from isthmus.job import Job, Prepared, prepare, prepared_again
from isthmus.planners import SearchStopped, cut_short, least, scheduled
from isthmus.plans import Plan
from isthmus.report.what_if_table import WhatIf, WhatIfRow
from isthmus.runtime.processes.signals import Stop

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
    return make(prepared.job, prepared.problem(fleet), bound=least)


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
        found.append((cut, scheduled(cut, build_again(cut, layouts_of(today), today))))
    return min(found, key=lambda pair: preference(*pair))[1]


def _row(change: Change, plan: Plan, fleet: Fleet) -> WhatIfRow:
    batch, step_s = plan.micro_batches * plan.micro_batch_size, plan.predicted.step_s
    return WhatIfRow(
        change=change.text,
        what=change.what,
        step_s=step_s,
        samples_per_s=batch / step_s,
        price_per_1000_samples=1000 / batch * step_price(plan, fleet).total if is_priced(fleet) else None,
        devices=len(plan.used),
    )


def _price_per_hour(fleet: Fleet) -> float:
    return sum(device.price_per_hour for device in fleet.devices)
