"""A job whose model is captured: ready to be planned, simulated and run.

Captures are kept in the user's cache folder: torch's exporter takes seconds, to import and to run.

A capture follows from the model's options, the columns and the code of the packages that made it; a pretrained
model's also from the config.json of its folder. A model of the user's own code is kept if it follows from the text of
its file; others are captured every time, those of the hub too, which may have changed there.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.machinery
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import cast

import msgspec
import torch
from torch import nn

from isthmus import graph, models
from isthmus.callbacks import find_callback
from isthmus.combinations import refused
from isthmus.copies import in_a_copy
from isthmus.cost import ParameterState, Problem, parameter_state
from isthmus.cost.problem import FLOAT32_BYTES
from isthmus.data import DataSpec
from isthmus.data.dataset import any_left_out, may_be_left_out
from isthmus.data.description import DataDescription, describe, joined_descriptions, read_description
from isthmus.data.replica_share import ReplicaShare
from isthmus.errors import InternalError, UserError, warn
from isthmus.extensions import import_object
from isthmus.fleet import Device, Fleet, Links
from isthmus.graph import Flow
from isthmus.graph.captured import Capture, Captured, Column, read_captured, write_captured
from isthmus.graph.label_means import is_even, own_mean
from isthmus.graph.metrics import Metrics
from isthmus.job.settings import Job, constraints_of
from isthmus.models import as_eager, build_model
from isthmus.models.model_folder import CONFIG
from isthmus.models.registry import ModelSpec, is_built_in, is_own_code
from isthmus.plans import LackingOperators
from isthmus.reading import parse_json
from isthmus.stores import RemoteStoreError, Store, is_url
from isthmus.training.engine_operators import EngineOperators, engine_operators
from isthmus.training.preflight import check_limits, check_optimizers, check_types

MOST_KEPT = 64  # files; the one that was written first goes first
_PACKAGES = ("torch", "transformers", "peft")


def cached_capture(job: Job, columns: Mapping[str, Column], capture: Callable[[], Captured]) -> Captured:
    """Return the cached capture, or else that of `capture`, which a copy of this process makes. A user who may not
    write there captures again."""
    code = None if any(":" in name for name in job.metrics) else _code_of(job.model)
    path_at = None if code is None else partial(_path, job, columns, code)
    for batch in (None, job.micro_batch_size):
        if path_at is not None and (found := read_captured(path_at(batch))) is not None:
            return found[0]

    def written() -> Path:
        captured, path = capture(), Path(folder) / "captured"
        if path_at is not None:
            kept = path_at(only_batch(captured))
            with contextlib.suppress(OSError):
                kept.parent.mkdir(parents=True, exist_ok=True)
                write_captured(kept, captured, job.model.name)
                _drop_surplus(kept.parent)
                return kept
        write_captured(path, captured, job.model.name)
        return path

    with tempfile.TemporaryDirectory() as folder:
        for kept_at in (path_at, None):  # another process may remove it as surplus before it is read
            path_at = kept_at
            if (found := read_captured(in_a_copy(written, Path, f"capturing {job.model.name}"))) is not None:
                return found[0]
    raise InternalError(f"the capture of {job.model.name} was removed before it was read")


def _code_of(model: ModelSpec) -> str | None:
    """A digest of what the model follows from besides its options and packages; None where that is not known."""
    if is_built_in(model) or model.name.startswith("hf:"):
        return ""
    if model.name == "hf":
        path = str(model.options.get("path", ""))
        # A copy has the threads that libraries of stores start, with which this process could not be copied any more.
        return (
            in_a_copy(partial(_config_of, path), str, f"reading {path}") if is_url(path) else _config_of(path)
        ) or None
    return digest_of_module(model.name) if is_own_code(model) else None


def _config_of(path: str) -> str:
    """A digest of a pretrained model's config; empty where there is none. UserError for a store that does not answer:
    it would not for the capture either, after another minute."""
    try:
        config = (
            Store(path).read(CONFIG, small=True) if is_url(path) else (Path(path).expanduser() / CONFIG).read_bytes()
        )
    except OSError:
        return ""
    except RemoteStoreError as e:
        raise UserError(f"hf option 'path': {e}") from None
    return hashlib.sha256(config).hexdigest() if config is not None else ""


def only_batch(captured: Captured) -> int | None:
    """The only micro-batch size at which it is valid; None where every size is."""
    return captured.train.batch or captured.eval.batch


def _defaults() -> tuple[str, str]:
    """The type and device of tensors that a model makes without naming them."""
    return str(torch.get_default_dtype()), str(torch.get_default_device())


def _path(job: Job, columns: Mapping[str, Column], code: str, batch: int | None) -> Path:
    """Return the file of a capture at a micro-batch size, or at all; `code` is a digest of the user's own, or empty."""
    asked = (job.model, dict(columns), code, batch, job.training.precision, job.metrics, _defaults(), made_by())
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = hashlib.sha256(msgspec.json.encode(asked)).hexdigest()
    return Path(base) / "isthmus" / "captures" / f"{name}.safetensors"


@functools.cache
def made_by() -> tuple[str, ...]:
    """Versions of the packages that a capture depends on; a digest of our own code, which changes between versions."""
    digest = hashlib.sha256()
    for package in (graph, models):
        for file in sorted(Path(path) for root in package.__path__ for path in Path(root).glob("*.py")):
            digest.update(file.read_bytes())
    return (digest.hexdigest(), *map(_version, _PACKAGES))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _drop_surplus(folder: Path) -> None:
    kept = sorted(folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
    for file in kept[:-MOST_KEPT]:
        file.unlink(missing_ok=True)


_IMPORTED = frozenset(  # such a file may import these and nothing else: they read no files, no environment and no clock
    {"__future__", "collections", "dataclasses", "enum", "functools", "itertools", "math", "torch", "typing"}
)
_REFUSED = frozenset(
    {"__builtins__", "__dict__", "__import__", "accelerator", "backends", "builtins", "compile", "cuda", "distributed"}
    | {"eval", "exec", "from_file", "get_num_threads", "getattr", "globals", "hub", "initial_seed", "input"}
    | {"is_available", "load", "load_library", "load_state_dict_from_url", "load_url", "model_zoo", "mps", "open", "os"}
    | {"pathlib", "serialization", "sys", "vars", "version", "xpu"}
)
"""Names by which the file could depend on something else: on other files, on the machine or on what is typed."""


def digest_of_module(name: str) -> str | None:
    """A digest of the file behind `module:callable`; None unless what it builds follows from that file alone.

    None too for a module that this process has imported: its file may have been edited since. The module is not
    imported here.
    """
    module, _, attribute = name.partition(":")
    if not attribute or "." in module or module in sys.modules:
        return None
    spec = importlib.machinery.PathFinder.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py") or spec.submodule_search_locations:
        return None
    try:
        text = Path(spec.origin).read_bytes()
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError):
        return None
    return hashlib.sha256(text).hexdigest() if all(map(_is_closed, ast.walk(tree))) else None


def _is_closed(node: ast.AST) -> bool:
    """Return whether this part of a module reads nothing from outside it."""
    match node:
        case ast.Import(names=names):
            return all(_is_allowed(alias.name) for alias in names)
        case ast.ImportFrom(module=module, level=level, names=names):
            return not level and _is_allowed(module or "") and all(alias.name not in _REFUSED for alias in names)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name not in _REFUSED
        case _:
            return True


def _is_allowed(module: str) -> bool:
    first, *others = module.split(".")
    return first in _IMPORTED and _REFUSED.isdisjoint(others)


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A job whose model is captured on its data's columns. No weight is allocated yet."""

    job: Job  # with its number of micro-batches
    captured: Captured
    samples: DataDescription  # the description of the data, which need not have been read here
    origin: str  # a digest of all that it was captured from
    replica: ReplicaShare | None = None  # the share of one of several replicas that have a plan each
    shared: DataSpec | None = None  # the data of all replicas, which the whole job evaluates on; None: the job's
    computes: Mapping[str, EngineOperators] = {}
    """Engines that devices described; those of others follow from the fleet and this installation."""

    def build(self) -> nn.Module:
        with contextlib.redirect_stdout(sys.stderr):
            return build_model(self.job.model)

    @property
    def trains_in_half(self) -> bool:
        """Return whether a trained parameter computes in bfloat16 or float16, and so has a float32 copy: by the job's
        precision, or as the model's own weights are."""
        trained = (
            o.outputs[0].dtype for o in self.captured.train.ops if o.kind == "parameter" and any(o.requires_grad)
        )
        return any(dtype in ("bfloat16", "float16") for dtype in trained)

    @property
    def flow(self) -> Flow:
        return Flow(self.captured.train, columns_first=bool(self.job.plan.holders))

    def cut_into(self, micro_batches: int) -> Prepared:
        return msgspec.structs.replace(self, job=self.job.cut_into(micro_batches))

    @property
    def eval_micro_batches(self) -> int:
        """Whole micro-batches of an evaluation."""
        size, samples = self.job.micro_batch_size, min(self.job.training.eval_samples, self.samples.heldout)
        return min(samples // size, self.samples.heldout_batches(size))

    @property
    def eval_rest(self) -> int:
        """Samples of an evaluation beyond those; none of several holders' data, none where what leaves of each sample
        is counted, and none of a loss whose mean weighs samples unlike: these are evaluated in whole micro-batches
        alone."""
        rest = min(self.job.training.eval_samples, self.samples.heldout) % self.job.micro_batch_size
        if not rest or self.job.plan.feeders or self.job.privacy is not None:
            return 0
        return rest if is_even(self.captured.train, uneven=any_left_out(self.samples.columns)) else 0

    @property
    def eval_notes(self) -> list[str]:
        """A line where an evaluation leaves held-out samples out."""
        asked = min(self.job.training.eval_samples, self.samples.heldout)
        left_out = asked - self.eval_micro_batches * self.job.micro_batch_size - self.eval_rest
        if not self.job.evaluates or left_out <= 0:
            return []
        why = f"they fill no micro-batch of {self.job.micro_batch_size}, and the mean over fewer may be another"
        return [f"evaluations leave out {left_out} of {asked} held-out samples: {why}"]

    @property
    def schemas(self) -> dict[str, str]:
        """Schemas of the operators of both graphs."""
        return self.captured.eval.schemas | self.captured.train.schemas

    def lacking(self, fleet: Fleet) -> tuple[LackingOperators, ...]:
        """Devices that have not all operators of the model, with those."""
        found = {name: engine.lacks(self.schemas) for name, engine in self.other_engines(fleet).items()}
        return tuple(LackingOperators(device=name, operators=lacked) for name, lacked in found.items() if lacked)

    def other_engines(self, fleet: Fleet) -> dict[str, EngineOperators]:
        """Engines of devices that may not have all operators: torch has them here."""
        others = (d for d in fleet.devices if d.name in self.computes or d.engine != "torch")
        return {d.name: self.computes.get(d.name) or engine_operators(d.engine) for d in others}

    def alone(self) -> Problem:
        """The problem of one unknown device without terms, for the sizes of stages on any device."""
        anything = Device(name="any", region="anywhere", flops_per_s=1.0, memory_bytes=1)
        return Problem(
            flow=Flow(self.captured.train),
            fleet=Fleet(name="any", devices=(anything,), links=Links()),
            micro_batch_size=self.job.micro_batch_size,
            micro_batches=1,
            state=_state(self.job, narrow=self.trains_in_half),
        )

    def problem(self, fleet: Fleet) -> Problem:
        """Return the problem for a planner. UserError where nothing is to be planned."""
        if self.job.sync.mode == "decoupled":
            raise refused("one plan", "decoupled", "one")
        return Problem(
            flow=self.flow,
            fleet=fleet,
            micro_batch_size=self.job.micro_batch_size,
            micro_batches=self.job.micro_batches,
            schedule=self.job.schedule,
            sync=self.job.sync,
            state=_state(self.job, narrow=self.trains_in_half),
            constraints=constraints_of(self.job, fleet, self.samples.holders, self.lacking(fleet)),
            recompute=self.job.plan.recompute,
        )


def prepared_again(before: Prepared, job: Job) -> Prepared:
    """Return the same as `prepare`. The model is captured again only if something that a capture depends on has
    changed."""
    if not _is_of(before.origin, job):
        return prepare(job)
    cut = _checked(job, before.captured, before.samples)
    return msgspec.structs.replace(before, job=cut) if _is_at(before.captured, cut) else prepare(job)


class _About(msgspec.Struct, frozen=True):
    """Beside a capture on disk."""

    origin: str
    samples: DataDescription


def prepare(
    job: Job, samples: DataDescription | None = None, *, least: int = 1, field: str = "training.micro_batches"
) -> Prepared:
    """Build the model under fake tensors and capture it on batches made from what the data are like: `samples`, or the
    job's description file, or the data themselves, which are opened only where neither is given.

    A job that says no number of micro-batches gets its default, or `least` where the loss may be another with each.
    `field` is what the user calls that number.

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
    if field == "training.micro_batches":  # a client may have less than a batch of its own
        _check_batch(job, samples)
    columns = {name: Column(c.dtype, c.shape, may_be_left_out(c)) for name, c in samples.columns.items()}
    captured = cached_capture(job, columns, lambda: _captured(job, columns))
    job = _checked(job, captured, samples, least=least, field=field)
    if not _is_at(captured, job):
        captured = cached_capture(job, columns, lambda: _captured(job, columns))
    return Prepared(job=job, captured=captured, samples=samples, origin=_origin(job))


def _check_batch(job: Job, samples: DataDescription) -> None:
    """UserError for a step that would use samples twice."""
    if job.training.batch_size > samples.train:
        what = (
            f"got {job.training.batch_size}, expected at most {samples.train}: the data have no more training samples"
        )
        raise UserError(f"training.batch_size: {what}")


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
        size, metrics = job.micro_batch_size, Metrics(job.metrics)
        sums = metrics.sums if metrics.counted else None
        return capture(build, columns, name=job.model.name, batch=size, dtype=job.training.dtype, metrics=sums)


def described_here(job: Job) -> DataDescription:
    """The description of this machine's own data, which are opened for it. Raises UserError for data that cannot be
    read."""
    if not job.plan.feeders:
        return describe(job.used_data, heldout=job.evaluates)
    return joined_descriptions(
        {name: describe(job.used_data.at(name), heldout=job.evaluates) for name in job.plan.feeders}
    )


def described_in(job: Job) -> DataDescription:
    """The description file that the job names. UserError for one that is not of its data."""
    return read_description(Path(job.data.description), job.used_data, heldout=job.evaluates)


def _checked(
    job: Job, captured: Captured, samples: DataDescription, *, least: int = 1, field: str = "training.micro_batches"
) -> Job:
    """The job with its number of micro-batches."""
    train, columns = captured.train, samples.columns
    check_optimizers(job.optimizer, train)
    check_types(train)
    check_limits(train, {name: c.limit for name, c in columns.items() if c.limit is not None})
    if not is_even(train, uneven=any_left_out(columns)):
        job = _cut_for_own_mean(job, least, field)
    return job.cut_into(job.micro_batches)


def _cut_for_own_mean(job: Job, least: int, field: str) -> Job:
    """The job, of a loss that may be another with each number of micro-batches. UserError for several numbers."""
    if len(set(job.counts)) > 1:
        raise UserError(
            f"plan.micro_batches: got {list(job.counts)}, expected one number: the model's loss is a mean of "
            "its own, which may be another with each. A loss that is returned as (loss_sum, count) is the same with all"
        )
    count = job.micro_batches
    if job.training.micro_batches is None and not job.plan.feeders:  # those take turns with micro-batches
        if count > least:
            warn(
                "the model's loss is a mean of its own, which may be another with each number of micro-batches: by "
                f"default that is {least} here, not {count}. For more return (loss_sum, count), or set {field}"
            )
        return job.cut_into(least)
    if count > least:
        warn(own_mean(count, "plan.micro_batches" if job.plan.micro_batches else field))
    return job


def _is_at(captured: Captured, job: Job) -> bool:
    """Return whether it is valid for the job's micro-batches."""
    return only_batch(captured) in (None, job.micro_batch_size)


def _is_of(origin: str, job: Job) -> bool:
    """Return whether it was captured for the job, with any number of micro-batches that this may get."""
    found = (job.micro_batches,) if job.training.micro_batches else (job.micro_batches, 1)
    return origin in [_origin(job.cut_into(count)) for count in found]


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
        about = parse_json(text, _About, "")
    except UserError:  # of another version
        return None
    if not _is_of(about.origin, job):
        return None
    job = _checked(job, captured, about.samples)
    return (
        Prepared(job=job, captured=captured, samples=about.samples, origin=about.origin)
        if _is_at(captured, job)
        else None
    )


def _origin(job: Job) -> str:
    document = (
        job.model,
        job.used_data,
        job.plan.feeders,
        job.evaluates,
        job.metrics,
        job.micro_batch_size,
        job.training.precision,
        made_by(),  # what another version captured may be what this one refuses
    )
    return hashlib.sha256(msgspec.json.encode(document)).hexdigest()


def _state(job: Job, *, narrow: bool) -> ParameterState:
    """The largest per-parameter state among the job's optimizers: a stage may hold parameters of any of them."""
    states = [parameter_state(o.name, momentum=o.momentum > 0, narrow=narrow) for o in job.optimizer]
    largest = max(states, key=lambda s: s.optimizer_bytes)
    outer = job.sync.outer
    kept_bytes = 0 if outer is None else FLOAT32_BYTES * (2 if outer.momentum else 1)
    if job.schedule == "delayed":
        kept_bytes += FLOAT32_BYTES // 2 if narrow else FLOAT32_BYTES  # the version before the last update
    return msgspec.structs.replace(largest, optimizer_bytes=largest.optimizer_bytes + kept_bytes)
