"""What benchmarks and examples import exists, and is public: no other test starts all of them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.public import PUBLIC_PACKAGES

ROOT = Path(__file__).parent.parent
SCRIPTS = [
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "benchmarks/*.py", "examples/*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
]
FOLDERS = sorted({str(script.parent.relative_to(ROOT)) for script in SCRIPTS})
OWN = {script.stem for script in SCRIPTS} | {script.parent.name for script in SCRIPTS}
"""Modules by name: a benchmark imports others of its folder, and a few of a folder beside it."""
OWN |= {module.stem for module in (ROOT / "tests" / "training").glob("*.py")}
PEERS = {"flwr", "torchft", "torchvision", "diloco", "hivemind", "pfl"}
"""Libraries that a benchmark compares with and installs for itself."""
COMPONENTS = {
    "adaptation": ("isthmus.protocol.drift",),  # when a change of speed is believed
    "audit": ("isthmus.training.digests",),  # hashes alone
    "auto": (
        "isthmus.api.make_plan",
        "isthmus.cost",
        "isthmus.graph",
        "isthmus.verification",
    ),  # every plan, by brute force
    "cohort": ("isthmus.planners.cohort",),
    "compression": ("isthmus.training.compression",),
    "compression_convergence": ("isthmus.runtime.coordinator.stages", "isthmus.training"),  # stages in one process
    "decoupled": (
        "isthmus.api",
        "isthmus.graph.outputs",
        "isthmus.protocol",
        "isthmus.runtime.coordinator.backend",
        "isthmus.runtime.decoupled",
        "isthmus.runtime.processes",
        "isthmus.simulator.merging",
        "isthmus.training",
    ),  # what replicas compute on the virtual clock, one that is stopped, and a script
    "delayed": ("isthmus.protocol",),  # a run's length on the virtual clock
    "dream": ("isthmus.planners.sync",),
    "dtfm": ("isthmus.cost.blocks", "isthmus.planners"),
    "engines": ("isthmus.training",),  # a stage alone
    "everything": ("isthmus.api", "isthmus.runtime.decoupled"),  # hours on the virtual clock, and spans of devices
    "families": ("isthmus.training",),  # each cut of a model, in one process
    "federated": ("isthmus.data.femnist", "isthmus.protocol.federated_participation", "isthmus.rng"),  # peers' clients
    "federated_deployment": ("isthmus.runtime.service.fleet_state",),  # tickets for thousands of sites
    "federated_memory": ("isthmus.federated",),  # sizes of states
    "federated_scheduling": (
        "isthmus.federated",
        "isthmus.programs",
        "isthmus.protocol",
        "isthmus.runtime.federated",
        "isthmus.simulator",
    ),
    "fusion": ("isthmus.planners",),
    "generate": (
        "isthmus.api",
        "isthmus.job.first_weights",
        "isthmus.protocol",
        "isthmus.training",
    ),  # stages in one process
    "gpu": ("isthmus.cost.stage_costs", "isthmus.runtime.coordinator.stage_assignments"),  # bytes of states
    "joiner": ("isthmus.programs.pipeline", "isthmus.runtime"),  # a device that is held back, frame by frame
    "large_models": (
        "isthmus.api",
        "isthmus.free_memory",
        "isthmus.job.first_weights",
        "isthmus.protocol",
        "isthmus.run_files",
        "isthmus.runtime",
        "isthmus.stores",
        "isthmus.training",
    ),  # which way a state goes; one part of a checkpoint; weights by ranges
    "launchers": ("isthmus.runtime.launchers", "isthmus.runtime.service"),  # agents without a run
    "mixed": (
        "isthmus.api",
        "isthmus.expected_loss",
        "isthmus.report",
    ),  # what `plan` shows
    "nat": ("isthmus.protocol", "isthmus.runtime", "isthmus.training.layout"),  # a connection without a run
    "parrot_figures": (
        "isthmus.api.rounds",
        "isthmus.data",
        "isthmus.federated",
        "isthmus.programs",
        "isthmus.protocol",
    ),
    "placement_runs": ("isthmus.training",),  # the plain module beside the runs
    # the closed form beside the simulator, and what plans state
    "prediction": ("isthmus.api.make_plan", "isthmus.cost", "isthmus.protocol"),
    "proven_gaps": ("isthmus.api.make_plan", "isthmus.verification"),  # bounds of problems without a job
    "reconstruction": (
        "isthmus.disclosure",
        "isthmus.runtime.coordinator",
        "isthmus.training",
    ),  # what an attacker sees of a stage
    "secure_aggregation": ("isthmus.federated", "isthmus.protocol"),  # one phase without a network
    "sky": ("isthmus.cost.network",),
    "snapshots": ("isthmus.runtime.coordinator.stage_assignments",),  # bytes of states
    "sync": ("isthmus.sync",),
    "thousand": ("isthmus.federated", "isthmus.runtime"),  # devices without processes of their own
    "transport": ("isthmus.protocol.run_messages", "isthmus.runtime", "isthmus.training.layout"),  # a channel alone
    "wan_loss": (
        "isthmus.expected_loss",
        "isthmus.protocol",
    ),  # where its losses go; a run without a job
}
"""Benchmarks that measure a part below the API, and where that part is. All others use public packages alone."""


def imported(folder: str) -> Iterator[tuple[Path, ast.ImportFrom, str]]:
    for script in SCRIPTS:
        if script.parent != ROOT / folder:
            continue
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module is not None:
                yield script, node, node.module


@pytest.mark.parametrize("folder", FOLDERS)
def test_imported_names_exist(folder: str) -> None:
    missing: list[str] = []
    for script, node, name in imported(folder):
        top = name.split(".")[0]
        if top in ("isthmus", "isthmus_testing"):
            module = importlib.import_module(name)
            missing += [f"{script}: {name}.{n.name}" for n in node.names if not hasattr(module, n.name)]
        elif top not in OWN and top not in PEERS and importlib.util.find_spec(top) is None:
            missing.append(f"{script}: {name}")
    assert not missing, missing


@pytest.mark.parametrize("folder", FOLDERS)
def test_imported_names_are_public_or_of_the_part_that_is_measured(folder: str) -> None:
    parts, used, private = COMPONENTS.get(Path(folder).name, ()), set[str](), list[str]()
    for script, node, name in imported(folder):
        if name.split(".")[0] != "isthmus":
            continue
        exported = importlib.import_module(name).__all__ if name in PUBLIC_PACKAGES else ()
        below = [n.name for n in node.names if n.name not in exported and f"{name}.{n.name}" not in PUBLIC_PACKAGES]
        found = {part for part in parts if f"{name}.".startswith(f"{part}.")}
        used |= found if below else set()
        if below and not found:
            private.append(f"{script.name}: {name}: {', '.join(below)}")
    assert not private, private
    assert used == set(parts), "a part that is named and not used"


def test_no_benchmark_that_is_gone_is_named() -> None:
    assert {f"benchmarks/{name}" for name in COMPONENTS} <= set(FOLDERS)
