"""Checks a machine before it joins: Python, libraries, ports and folders."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from isthmus.errors import UserError
from isthmus.extensions import EXTRAS, import_extra, to_install
from isthmus.units import format_size

LEAST_PYTHON = (3, 11)


class Finding(msgspec.Struct, frozen=True):
    hop: str
    """A hop of this machine: Python, system, a library, accelerators, port or folder. Or one of the way to the
    coordinator: state, ticket, name (DNS), port, TLS, fleet, clock, membership or version."""
    good: bool
    detail: str
    remedy: str = ""


def examine_machine(folders: dict[str, Path], port: int) -> list[Finding]:
    """All that is found; `folders` are those that will be written to, by what they are for. Nothing is left behind."""
    return [
        _python(),
        _system(),
        *_libraries(),
        *_accelerators(),
        *_ports(port),
        *(_folder(what, path) for what, path in folders.items()),
    ]


def _python() -> Finding:
    least = ".".join(map(str, LEAST_PYTHON))
    return Finding("Python", sys.version_info >= LEAST_PYTHON, platform.python_version(), f"install Python {least}")


def _system() -> Finding:
    remedy = "`plan` and `simulate` work here; for all else take Linux (on Windows, WSL)"
    return Finding("system", platform.system() == "Linux", f"{platform.system()} {platform.release()}", remedy)


def _libraries() -> Iterator[Finding]:
    for module, extra in EXTRAS.items():
        if module == "sympy":  # torch brings it
            continue
        if extra != "train":  # some jobs need it
            detail = "there" if _is_there(module) else f"not there: some jobs need it: {to_install(module)}"
            yield Finding(module, True, detail)
            continue
        try:
            library = import_extra(module, "Isthmus")
        except UserError as e:
            yield Finding(module, False, "cannot be imported", str(e))
        else:
            yield Finding(module, True, str(getattr(library, "__version__", "there")))


def _is_there(module: str) -> bool:
    """Found, not imported: that takes seconds for some."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _accelerators() -> Iterator[Finding]:
    """Yield a finding of the accelerators that torch sees: none of them is a fault."""
    try:
        library = importlib.import_module("isthmus.accelerators")  # by name, as it needs torch
    except ImportError:
        return
    names: tuple[str, ...] = library.accelerator_names()
    if not names:
        yield Finding("accelerators", True, "none: stages compute on the CPU")
        return
    each: list[str] = []
    for name in names:
        found = library.open_accelerator(name)
        each.append(f"{found.name} ({name}), {format_size(found.memory().free)} free")
    more = "; `isthmus join` takes the first, `--devices all` each" if len(each) > 1 else ""
    yield Finding("accelerators", True, ", ".join(each) + more)


def _ports(port: int) -> Iterator[Finding]:
    for wanted in (0, port):
        what = "any" if not wanted else f"{wanted}, which `isthmus serve` takes"
        try:
            with socket.socket() as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(("127.0.0.1", wanted))
        except OSError as e:
            another = "; `isthmus serve --port` takes another" if wanted else ""  # devices do not need it
            detail = f"{what}: {e.strerror or e}{another}"
            yield Finding("port", bool(wanted), detail, "let this user listen on 127.0.0.1")
        else:
            yield Finding("port", True, f"{what}: can be bound")


def _folder(what: str, path: Path) -> Finding:
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as e:
        return Finding("folder", False, f"{what}: {path}: {e.strerror or e}", f"make {there} a folder you may write to")
    return Finding("folder", True, f"{what}: {path} can be written")
