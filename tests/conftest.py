"""One torch thread everywhere, as in device processes: the number of threads changes the order of sums.

Quick tests run first. What hypothesis draws is said in `examples.py`.
"""

# ruff: noqa: E402
import gc

gc.disable()  # until all tests are collected: half a million objects of modules stay

import compileall
import functools
import importlib.metadata
import logging
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import typer
from _pytest.assertion import rewrite

import isthmus
import isthmus_testing
from isthmus import copies
from isthmus.api import make_plan
from isthmus.job import prepared
from isthmus.runtime.launchers import local
from isthmus.runtime.processes import device_processes
from tests.captures import kept
from tests.interpreters import PLANNING_WORK, copied

from . import examples, tiers

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start: the workers of the suite have two cores
if not any(importlib.metadata.distributions(name="isthmus-testing")):  # pytest's `pythonpath` is for this process alone
    sources = str(Path(isthmus_testing.__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (sources, os.environ.get("PYTHONPATH"))))
# A suite that was started in the background may have inherited that Ctrl-C is ignored, and would pass that on.
signal.signal(signal.SIGINT, signal.default_int_handler)
logging.getLogger("torch").setLevel(logging.WARNING)
# pytest gives a logger that does not propagate handlers of its own, and for these torch draws up a stack per record.
logging.getLogger("torch.__trace").propagate = True

LONG = ("sync", "planners", "graph", "training", "federated", "faults", "fleet_service", "runtime")
"""Folders whose files take minutes: they come last, one that ends with short files at the very end, so that no worker
waits long for another. Before all others come those with tests that fork."""


@pytest.hookimpl(tryfirst=True)  # before hypothesis' plugin loads the profile that it is told
def pytest_configure(config: pytest.Config) -> None:
    examples.register(config)
    worker = getattr(config, "workerinput", None)
    if worker is None:
        # With PYTHONDONTWRITEBYTECODE each process that a test starts would compile all modules anew.
        for package in (isthmus, isthmus_testing):
            compileall.compile_dir(Path(package.__file__).parent, quiet=2)
    elif config.getoption("assertmode") == "rewrite":
        _rewrite_asserts(config, int(worker["workerid"].removeprefix("gw")), worker["workercount"])


def _rewrite_asserts(config: pytest.Config, number: int, workers: int) -> None:
    """Of a share of the files, for the other workers too: each would take ten seconds to rewrite all."""
    for file in sorted(Path(__file__).parent.rglob("test_*.py"))[number::workers]:
        kept = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(file, kept) is None:
            kept.parent.mkdir(exist_ok=True)
            source, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, kept)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", help="run one part of the tests: 3/12 is every twelfth from the third on")


@pytest.hookimpl(trylast=True)  # once `-m` has left out what it does not name: parts are equal
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers.skip_long(items)
    if others := tiers.keep_part(config.getoption("part"), items):
        config.hook.pytest_deselected(items=others)
    forking = {item.path for item in items if item.get_closest_marker("forks")}
    items.sort(key=lambda item: (item.path not in forking, _place(item.path.parent.name)))


def _place(folder: str) -> int:
    return LONG.index(folder) if folder in LONG else -1


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that forks in a process of its own where an earlier one has used JAX: a copy of its threads' locks may
    be held for ever. Files with such tests come first, so that no worker of the suite has used it; to import it starts
    no thread."""
    if pyfuncitem.get_closest_marker("forks") is None or not _jax_has_threads():
        return None
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    done = subprocess.run(command, cwd=pyfuncitem.config.rootpath, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return True


def _jax_has_threads() -> bool:
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """No later collection of garbage goes through what modules made either."""
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each reason to skip: pytest's own has one for each place."""
    skipped = terminalreporter.getreports("skipped")
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count} skipped: {reason}")


@pytest.fixture(autouse=True, scope="session")
def _what_is_dear_is_kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The interpreter that others are copied from, captured models in a cache folder of all workers, and bounds."""
    folder = tmp_path_factory.getbasetemp()
    session = folder.parent if hasattr(request.config, "workerinput") else folder
    with pytest.MonkeyPatch.context() as patch, copied():
        patch.setenv("XDG_CACHE_HOME", str(session / "cache"))
        patch.setattr(prepared, "cached_capture", kept(prepared.cached_capture))
        patch.setattr(prepared, "MOST_KEPT", 1000)  # the suite has more models than a user
        for module in (device_processes, local):  # for commands that are called in this process
            patch.setattr(module, "fork_early", lambda *_, **__: None)
        patch.setattr(make_plan, "PLANNING_WORK", PLANNING_WORK)
        # For commands that are called in this process: what packages offer, and the options of all commands.
        patch.setattr(importlib.metadata, "entry_points", functools.cache(importlib.metadata.entry_points))
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        patch.setattr(copies, "can_copy", lambda: False)  # as in a worker, which has threads; commands are copied
        patch.setattr(gc, "unfreeze", lambda: None)  # as it ends a fork of executors, which would undo the freeze
        yield


@pytest.fixture(autouse=True, scope="module")
def _environment() -> Iterator[None]:
    """Libraries set variables when they are first imported: an interpreter with another environment is no copy."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True, scope="module")
def _what_a_file_leaves_is_collected_once() -> Iterator[None]:
    """A stage that is prepared in this process collects garbage, and so do others: not again through all that earlier
    files imported and kept, which takes fifty milliseconds each time."""
    gc.collect()
    gc.freeze()
    yield
