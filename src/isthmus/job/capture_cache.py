"""Captures, kept in the user's cache folder: torch's exporter takes seconds, to import and to run.

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

import msgspec
import torch

from isthmus import graph, models
from isthmus.copies import in_a_copy
from isthmus.errors import InternalError
from isthmus.graph.captured import Captured, Column, read_captured, write_captured
from isthmus.job.settings import Job
from isthmus.models.model_folder import CONFIG
from isthmus.models.registry import ModelSpec, is_built_in, is_own_code
from isthmus.stores import RemoteStoreError, Store, is_url

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
    """A digest of a pretrained model's config; empty where there is none."""
    try:
        config = (
            Store(path).read(CONFIG, small=True) if is_url(path) else (Path(path).expanduser() / CONFIG).read_bytes()
        )
    except (OSError, RemoteStoreError):
        return ""
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
