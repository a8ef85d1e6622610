"""Changes of a job and its fleet, as `isthmus plan --what-if` takes them, and the usual ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import msgspec

from isthmus.errors import UserError
from isthmus.fleet import Fleet, edits
from isthmus.job import Job
from isthmus.job.settings import DTYPES
from isthmus.overrides import read_overrides
from isthmus.plans import Plan
from isthmus.report import linked_devices

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
