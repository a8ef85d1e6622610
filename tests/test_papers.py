"""Every command of docs/papers runs to its end, in small; what it finds is looked at where that is quick."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import represented_by

ROOT = Path(__file__).parents[1]


def run(script: str, *options: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "BENCHMARK_TIMES": "any"}
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, *options],
        capture_output=True,
        text=True,
        env=environment,
        timeout=850,
    )
    assert done.returncode == 0, done.stderr


SMALL: dict[str, tuple[str, ...]] = {
    "cohort/run.py": ("--quick",),
    "compression_convergence/longer.py": ("--only", "GPT", "--steps", "2"),
    "dream/run.py": ("--quick",),
    "dtfm/run.py": ("--quick", "--only", "placement"),
    "dtfm/search_curves.py": ("--cases", "5", "--candidates", "102"),
    "federated/run.py": ("--quick", "--repeats", "1", "--sides", "bare loop", "ours, 1 executor"),
    "federated_convergence/run.py": ("--quick",),
    "federated_memory/run.py": ("--quick", "--only", "tiny"),
    "federated_scheduling/real.py": ("--quick", "--only", "clocks"),
    "federated_scheduling/run.py": ("--quick",),
    "fusion/run.py": ("--quick",),
    "parrot_figures/run.py": ("--quick",),
    "sky/iteration.py": ("--quick",),
    "sky/run.py": ("--quick",),
    "sync/published.py": (),
    "sync/run.py": ("--quick", "--model", "gpt"),
    "sync_convergence/frequency.py": ("--workers", "2", "--seeds", "1", "--steps", "6"),
    "sync_convergence/run.py": ("--quick", "--model", "gpt"),
}
"""Each script that docs/papers names, with options that make it short."""
LOOKED_AT = ("compression_convergence/longer.py", "dtfm/search_curves.py", "sky/iteration.py")
"""Those of whose results a test of their own says something."""


def test_every_script_of_the_papers_pages_is_here() -> None:
    pages = "".join(page.read_text() for page in sorted((ROOT / "docs" / "papers").glob("*.md")))
    assert set(re.findall(r"`python benchmarks/(\S+\.py)", pages)) == set(SMALL)


@pytest.mark.parametrize("script", represented_by(sorted(SMALL.keys() - set(LOOKED_AT)), "dream/run.py"))
def test_a_script_of_the_papers_pages_ends_well(script: str, tmp_path: Path) -> None:
    run(script, *SMALL[script], "--json", str(tmp_path / "found.json"))
    assert json.loads((tmp_path / "found.json").read_text())


@pytest.mark.long
@pytest.mark.parametrize("fleet", ["dtfm-case5", "fluidstack"])
def test_layouts_of_whole_iterations_are_simulated(fleet: str, tmp_path: Path) -> None:
    """The other part of dtfm/run.py: each takes minutes."""
    where = str(tmp_path / "found.json")
    run("dtfm/run.py", "--quick", "--only", "end-to-end", "--fleets", fleet, "--json", where)
    assert json.loads((tmp_path / "found-end-to-end.json").read_text())["rows"]


@pytest.mark.long
def test_the_iteration_of_sky_computing_is_all_stages_together(tmp_path: Path) -> None:
    run("sky/iteration.py", *SMALL["sky/iteration.py"], "--json", str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    uniform = [r for r in found["rows"] if r["setting"]["slow_downs"] == "uniform"]
    of = {(r["planner"], r["setting"]["memory"], r["setting"]["parts"]): r for r in uniform}
    even, balanced = of["even", True, 5], of["certified", True, 5]
    (limit,) = [x for x in found["limits"] if x["setting"]["slow_downs"] == "uniform"]
    assert limit["balanced"] < limit["stopped"] < limit["fastest"]
    saved = 1 - balanced["step_s"] / even["step_s"]
    assert saved == pytest.approx(limit["balanced"], abs=0.02), "the limit leaves messages and whole layers out"
    assert balanced["pipelined_s"] < balanced["step_s"] / 3, "8 micro-batches keep devices busy at once"


@pytest.mark.long
def test_search_curves_start_with_the_population_and_only_fall(tmp_path: Path) -> None:
    where = str(tmp_path / "found.json")
    options = (*SMALL["dtfm/search_curves.py"], "--json", where, "--picture", str(tmp_path / "found.png"))
    run("dtfm/search_curves.py", *options)
    curves = json.loads(Path(where).read_text())["curves"]
    assert len(curves) == 4 * 3 and (tmp_path / "found.png").stat().st_size > 10_000
    for curve in curves:
        seen, _, costs = zip(*curve["improved"], strict=True)
        assert seen[0] == 1 and seen[-1] == 102 and list(costs) == sorted(costs, reverse=True)
    starts = {(c["search"], c["seed"]): c["improved"][0][2] for c in curves}
    for seed in range(3):
        assert starts["dtfm-kl", seed] == starts["dtfm-genetic", seed] == starts["dtfm-genetic-code", seed]
        assert starts["random", seed] > starts["dtfm-kl", seed], "its shuffles match nobody"


@pytest.mark.long
def test_longer_curves_of_compression_begin_alike(tmp_path: Path) -> None:
    script = "compression_convergence/longer.py"
    run(script, *SMALL[script], "--json", str(tmp_path / "found.json"))
    curves = json.loads((tmp_path / "found.json").read_text())["curves"]
    assert [c["method"] for c in curves] == ["dense", "adatopk", "uniform"]
    for curve in curves:
        (point,) = curve["points"]
        assert point["steps"] == 2 and 4 < point["training_loss"] < 7
        assert (point["loss"] == point["packed_loss"]) == (curve["method"] == "dense")
