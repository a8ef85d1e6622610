"""A job whose model is captured: ready to be planned, simulated and run."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import msgspec
import torch
from torch import nn

from isthmus.callbacks import find_callback
from isthmus.cost import ParameterState, Problem, parameter_state
from isthmus.cost.problem import FLOAT32_BYTES
from isthmus.data.description import DataDescription, describe, joined_descriptions, read_description
from isthmus.errors import UserError
from isthmus.extensions import import_object
from isthmus.fleet import Device, Fleet, Links
from isthmus.graph import Flow
from isthmus.graph.captured import Capture, Captured, Column, read_captured, write_captured
from isthmus.job.capture_cache import cached_capture
from isthmus.job.loading import constraints_of
from isthmus.job.settings import Job
from isthmus.models import as_eager, build_model
from isthmus.plans import LackingOperators
from isthmus.training.engine_operators import EngineOperators, engine_operators
from isthmus.training.preflight import check_limits, check_optimizers, check_types


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A job whose model is captured on its data's columns. No weight is allocated yet."""

    job: Job
    captured: Captured
    samples: DataDescription
    """What is known of the data; nobody need have read them here."""
    origin: str
    """A digest of all that it was captured from."""
    computes: Mapping[str, EngineOperators] = {}
    """What devices said of their engines; of others it is known from the fleet and this installation."""

    def build(self) -> nn.Module:
        with contextlib.redirect_stdout(sys.stderr):
            return build_model(self.job.model)

    @property
    def flow(self) -> Flow:
        return Flow(self.captured.train, columns_first=bool(self.job.plan.holders))

    def cut_into(self, micro_batches: int) -> Prepared:
        return msgspec.structs.replace(self, job=self.job.cut_into(micro_batches))

    @property
    def schemas(self) -> dict[str, str]:
        """Of the operators of both graphs."""
        return self.captured.eval.schemas | self.captured.train.schemas

    def lacking(self, fleet: Fleet) -> tuple[LackingOperators, ...]:
        """Devices that have not all operators of the model, with those."""
        found = {name: engine.lacks(self.schemas) for name, engine in self.other_engines(fleet).items()}
        return tuple(LackingOperators(device=name, operators=lacked) for name, lacked in found.items() if lacked)

    def other_engines(self, fleet: Fleet) -> dict[str, EngineOperators]:
        """Of devices that may not have all operators: torch has them here."""
        others = (d for d in fleet.devices if d.name in self.computes or d.engine != "torch")
        return {d.name: self.computes.get(d.name) or engine_operators(d.engine) for d in others}

    def alone(self) -> Problem:
        """What stages are made of, whatever devices there are: on one that nothing is known of, and without terms."""
        anything = Device(name="any", region="anywhere", flops_per_s=1.0, memory_bytes=1)
        return Problem(
            flow=Flow(self.captured.train),
            fleet=Fleet(name="any", devices=(anything,), links=Links()),
            micro_batch_size=self.job.micro_batch_size,
            micro_batches=1,
            state=_state(self.job),
        )

    def problem(self, fleet: Fleet) -> Problem:
        """What a planner is asked. UserError where nothing is to be planned."""
        if self.job.sync.mode == "decoupled":
            raise UserError(
                "sync.mode: got 'decoupled', expected another for a plan: `isthmus simulate` plans each replica"
            )
        t = self.job.training
        return Problem(
            flow=self.flow,
            fleet=fleet,
            micro_batch_size=self.job.micro_batch_size,
            micro_batches=t.micro_batches,
            schedule=self.job.schedule,
            sync=self.job.sync,
            state=_state(self.job),
            constraints=constraints_of(self.job, fleet, self.samples.holders, self.lacking(fleet)),
            recompute=self.job.plan.recompute,
        )


def prepared_again(before: Prepared, job: Job) -> Prepared:
    """As `prepare`. The model is captured again only if something that a capture depends on has changed."""
    if before.origin != _origin(job):
        return prepare(job)
    return _checked(msgspec.structs.replace(before, job=job))


class _About(msgspec.Struct, frozen=True):
    """Beside a capture on disk."""

    origin: str
    samples: DataDescription


def prepare(job: Job, samples: DataDescription | None = None) -> Prepared:
    """Build the model under fake tensors and capture it on batches made from what the data are like: `samples`, or the
    job's description file, or the data themselves, which are opened only where neither is given.

    Raises UserError for whatever is wrong with them, with how they fit together and the optimizers, or with a callback.
    """
    for config in job.callback:
        find_callback(config)
    if samples is None and job.data.description:
        samples = described_in(job)
    elif samples is None:
        try:
            samples = described_here(job)
        except UserError as e:
            elsewhere = "; of data that are elsewhere, data.description names what `isthmus describe-data` wrote there"
            raise type(e)(f"{e}{elsewhere if job.plan.holders else ''}") from e
    columns = {name: Column(c.dtype, c.shape) for name, c in samples.columns.items()}
    captured = cached_capture(job, columns, lambda: _captured(job, columns))
    return _checked(Prepared(job=job, captured=captured, samples=samples, origin=_origin(job)))


def _captured(job: Job, columns: Mapping[str, Column]) -> Captured:
    # Imported when it is needed: torch.export takes seconds, and who goes on with a run has its graphs.
    capture = cast("Capture", import_object("isthmus", "isthmus.graph.capture:capture"))
    with contextlib.ExitStack() as stack:

        def build() -> nn.Module:
            module = build_model(job.model)
            stack.enter_context(as_eager(columns))  # only now is the module's library imported
            return module

        # stdout is data, and the user's constructor or forward may print.
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        return capture(build, columns, name=job.model.name, batch=job.micro_batch_size, dtype=job.training.dtype)


def described_here(job: Job) -> DataDescription:
    """The description of this machine's own data, which are opened for it. Raises UserError for data that cannot be
    read."""
    if not job.plan.feeders:
        return describe(job.data, heldout=job.evaluates)
    return joined_descriptions({name: describe(job.data.at(name), heldout=job.evaluates) for name in job.plan.feeders})


def described_in(job: Job) -> DataDescription:
    """The description file that the job names. UserError for one that is not of its data."""
    return read_description(Path(job.data.description), job.data, heldout=job.evaluates)


def _checked(prepared: Prepared) -> Prepared:
    train, columns = prepared.captured.train, prepared.samples.columns
    check_optimizers(prepared.job.optimizer, train)
    check_types(train)
    check_limits(train, {name: c.limit for name, c in columns.items() if c.limit is not None})
    return prepared


def keep_prepared(prepared: Prepared, path: Path) -> None:
    """For a restart in the middle of a run: it reads the graphs that devices have, and captures nothing."""
    about = _About(origin=prepared.origin, samples=prepared.samples)
    write_captured(path, prepared.captured, msgspec.json.encode(about).decode())


def kept_prepared(job: Job, path: Path) -> Prepared | None:
    """A result of `prepare` that was kept for the same model, data and sizes; None if there is none. Raises UserError
    for optimizers that do not fit."""
    found = read_captured(path)
    if found is None:
        return None
    captured, text = found
    try:
        about = msgspec.json.decode(text, type=_About)
    except ValueError:  # of another version
        return None
    if about.origin != _origin(job):
        return None
    return _checked(Prepared(job=job, captured=captured, samples=about.samples, origin=about.origin))


def _origin(job: Job) -> str:
    document = (
        job.model,
        job.data,
        job.plan.feeders,
        job.evaluates,
        job.micro_batch_size,
        job.training.precision,
        str(torch.__version__),
    )
    return hashlib.sha256(msgspec.json.encode(document)).hexdigest()


def _state(job: Job) -> ParameterState:
    """The largest per-parameter state among the job's optimizers: a stage may hold parameters of any of them."""
    narrow = job.training.precision != "fp32"
    states = [parameter_state(o.name, momentum=o.momentum > 0, narrow=narrow) for o in job.optimizer]
    largest = max(states, key=lambda s: s.optimizer_bytes)
    outer = job.sync.outer
    kept_bytes = 0 if outer is None else FLOAT32_BYTES * (2 if outer.momentum else 1)
    if job.schedule == "delayed":
        kept_bytes += FLOAT32_BYTES // 2 if narrow else FLOAT32_BYTES  # the version before the last update
    return msgspec.structs.replace(largest, optimizer_bytes=largest.optimizer_bytes + kept_bytes)
