"""Additions to the core: optional libraries, third-party entries, and options checked against a struct."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import TypeVar

import msgspec

from isthmus.errors import UserError, check_choice, plain_types, unknown_name

Options = TypeVar("Options", bound=msgspec.Struct)


EXTRAS = {  # the extra of ours that installs each importable module. torch brings sympy along
    "torch": "train",
    "sympy": "train",
    "safetensors": "train",
    "sklearn": "train",
    "cryptography": "train",
    "setproctitle": "train",
    "fsspec": "train",
    "blake3": "train",
    "xxhash": "train",
    "dp_accounting": "privacy",
    "transformers": "hf",
    "tokenizers": "hf",
    "datasets": "hf",
    "peft": "lora",
    "accelerate": "hf",
    "lightning": "lightning",
    "huggingface_hub": "hf",
    "PIL": "vision",
    "pyarrow": "stream",
    "torchvision": "vision",
    "jax": "jax",
    "ray": "ray",
    "submitit": "slurm",
    "kubernetes": "kubernetes",
    "s3fs": "s3",
    "gcsfs": "gs",
    "starlette": "dashboard",
    "sse_starlette": "dashboard",
    "uvicorn": "dashboard",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
    "sqlalchemy": "mlflow",
    "alembic": "mlflow",
    "prometheus_client": "prometheus",
}
TESTING = "isthmus_testing"
"""The package of the distribution in `testing/`, which has what only tests and benchmarks need."""
POSIX = frozenset({"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"})
"""Modules of the standard library that Windows has not."""


def to_install(module: str) -> str:
    """Return the command that installs an optional library. No release is published yet, so it is run in a checkout."""
    package = module.partition(".")[0]
    what = "./testing" if package == TESTING else f"'.[{EXTRAS[package]}]'"
    return f"pip install {what} in a checkout of isthmus"


def what_is_missing(owner: str, error: ModuleNotFoundError) -> str | None:
    """Return the advice that lets `owner` import what it could not; None for a module that is neither a library of an
    extra, nor of our tests, nor one that the system lacks."""
    module = (error.name or "").partition(".")[0]
    if module in EXTRAS or module == TESTING:
        return f"{owner} needs {module}: {to_install(module)}"
    if module in POSIX:
        return f"{owner} needs Linux: Python has no {module} here; on Windows use WSL"
    return None


def import_extra(module: str, owner: str = "this") -> ModuleType:
    """Imports an optional library on first use, so that nothing here needs it to be installed.

    Raises `UserError` with the command that installs it; `owner` is what needs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = what_is_missing(owner, error) if isinstance(error, ModuleNotFoundError) else None
        broken = f"{module} cannot be imported ({error}): {to_install(module)}"
        raise UserError(missing or broken) from error


def third_party(group: str) -> dict[str, EntryPoint]:
    """The entry points that installed packages registered under `group`, by name."""
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=group)}


def load_third_party(entry: EntryPoint) -> object:
    """Load an entry point. Any failure is the other package's, so it becomes a `UserError`."""
    try:
        return entry.load()
    except Exception as error:
        raise UserError(f"{entry.group} entry {entry.name!r} ({entry.value}) cannot be loaded: {error}") from error


def import_object(owner: str, name: str) -> object:
    """Return the object that `package.module:name` names; dots after the colon go into classes. `owner` is for
    messages.

    The module is the user's own and may raise anything while it is imported: that becomes a `UserError` too.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise UserError(f"{owner} {name!r}: expected 'package.module:callable'")
    try:
        found: object = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UserError(f"{owner} {name!r}: cannot import {module_name}: {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UserError(f"{owner} {name!r}: {module_name} has no {attribute!r}")
        found = getattr(found, part)
    return found


@contextlib.contextmanager
def modules_of(folders: Sequence[str]) -> Generator[None]:
    """Meanwhile Python looks for modules in these folders first. What was imported from them, or from the current
    folder, is forgotten afterwards: the next job may have other modules of the same names, or has changed these."""
    before, path = set(sys.modules), list(sys.path)
    own = [os.path.join(os.path.abspath(folder), "") for folder in (*folders, os.getcwd())]
    sys.path[:0] = folders
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - before:
            if _lies_in(own, name):
                del sys.modules[name]


def _lies_in(folders: Sequence[str], name: str) -> bool:
    """Return whether a module is the user's own of one of these folders: neither ours nor installed, as an environment
    in such a folder has them."""
    file = getattr(sys.modules[name], "__file__", None) or ""
    installed = file.startswith((sys.prefix, sys.base_prefix)) or "site-packages" in file
    return name.partition(".")[0] not in ("isthmus", TESTING) and not installed and file.startswith(tuple(folders))


def read_options(owner: str, options: Mapping[str, object], struct: type[Options]) -> Options:
    """`options` as a checked `struct`. Raises `UserError` that names the wrong option and its owner."""
    valid = {field.encode_name: field.type for field in msgspec.structs.fields(struct)}
    for key, value in options.items():
        if key not in valid:
            raise unknown_name(f"{owner} option", key, valid)
        check_choice(f"{owner} option {key!r}:", value, valid[key])
    try:
        return msgspec.convert(dict(options), struct)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        where = f" option {path.rstrip('`')!r}" if path else ""
        raise UserError(f"{owner}{where}: {plain_types(reason)}") from error


def takes(call: Callable[..., object], name: str) -> bool:
    """Return whether a callable can be given an argument of this name; true where that cannot be known."""
    try:
        parameters = inspect.signature(call).parameters
    except ValueError:
        return True
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def check_options(what: str, call: Callable[..., object], options: Mapping[str, object], ours: set[str]) -> None:
    """UserError, which calls an option `what`, for those that the callable has not, or that are `ours` to give."""
    known = inspect.signature(call).parameters.keys() - ours
    for key in options:
        if key not in known:
            raise unknown_name(what, key, known)


def check_arguments(owner: str, name: str, call: Callable[..., object], options: Mapping[str, object]) -> None:
    """UserError, which begins with the owner and the name, for options that a user's callable does not take."""
    try:
        signature = inspect.signature(call)
    except ValueError:  # some built-in callables show no signature: calling them is the only check
        return
    for key in options:
        if not takes(call, key):
            raise unknown_name(f"{name} option", key, signature.parameters)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise UserError(f"{owner} {name!r}: {error}") from error
