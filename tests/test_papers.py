"""Every command of docs/papers runs to its end, in small; what it finds is looked at where that is quick."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.commands import isthmus
from tests.tiers import represented_by

ROOT = Path(__file__).parents[1]


def run(command: str, *options: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "BENCHMARK_TIMES": "any"}
    script, *documented = shlex.split(command)
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, *documented, *options],
        capture_output=True,
        text=True,
        env=environment,
        timeout=850,
    )
    assert done.returncode == 0, done.stderr


BARE = ("--quick", "--repeats", "1", "--sides", "bare loop", "ours, 1 executor")
SMALL: dict[str, tuple[str, ...]] = {
    "cohort/run.py": ("--quick",),
    "compression_convergence/longer.py": ("--only", "GPT", "--steps", "2"),
    "dream/run.py": ("--quick",),
    "dtfm/run.py": ("--quick", "--fleets", "dtfm-case5"),
    "dtfm/run.py --fleets fluidstack": ("--quick",),
    "dtfm/search_curves.py": ("--cases", "5", "--candidates", "102"),
    "federated/run.py": BARE,
    "federated/run.py --only CNN": BARE,
    "federated_convergence/run.py": ("--quick",),
    "federated_memory/run.py --only schemes": ("--quick",),
    "federated_scheduling/real.py --only clocks": ("--quick",),
    "federated_scheduling/run.py": ("--quick",),
    "fusion/run.py": ("--quick",),
    "fusion/table1.py": (),
    "parrot_figures/run.py": ("--quick",),
    "parrot_figures/run.py --only 9": ("--quick",),
    "sky/iteration.py": ("--quick",),
    "sky/run.py": ("--quick",),
    "sync/published.py": (),
    "sync/run.py": ("--quick", "--model", "gpt"),
    "sync_convergence/frequency.py": ("--workers", "2", "--seeds", "1", "--steps", "6"),
    "sync_convergence/run.py": ("--quick", "--model", "gpt"),
}
"""Each script that docs/papers names, as it is called there, with options that make it short."""
END_TO_END = [command for command in SMALL if command.startswith("dtfm/run.py")]
LOOKED_AT = ("compression_convergence/longer.py", "dtfm/search_curves.py", "sky/iteration.py", *END_TO_END)
"""Those of whose results a test of their own says something."""
PAGES = "".join(page.read_text() for page in sorted((ROOT / "docs" / "papers").glob("*.md")))
COMMANDS = sorted(set(re.findall(r"`isthmus ([^`]+)`", PAGES)))
MODES = sorted(set(re.findall(r'`\[(\w+)\] (\w+) = "(\w+)"`', PAGES)))


def test_every_script_of_the_papers_pages_is_here() -> None:
    assert set(re.findall(r"`python benchmarks/([^`]+)`", PAGES)) == set(SMALL)


@pytest.mark.parametrize("command", represented_by(sorted(SMALL.keys() - set(LOOKED_AT)), "dream/run.py"))
def test_a_script_of_the_papers_pages_ends_well(command: str, tmp_path: Path) -> None:
    run(command, *SMALL[command], "--json", str(tmp_path / "found.json"))
    assert json.loads((tmp_path / "found.json").read_text())


JOB = """
name = "papers"
fleet = "slow.toml"
run_dir = "runs"
[model]
name = "mlp"
options = { features = 64, width = 16, layers = 6, classes = 10 }
[data]
kind = "digits"
options = { flat = true, holdout = 0.5 }
[training]
steps = 2
batch_size = 16
micro_batches = 2
[[optimizer]]
name = "sgd"
lr = 0.1
"""


FLEET = """
name = "slow"
[[device]]
name = "slow"
region = "lab"
compute = "1 MFLOPS"
memory = "1 GiB"
count = 4
[links]
default = { latency = "1 us", bandwidth = "1 GB/s" }
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Computation is what takes time, so that there are several stages or replicas."""
    (tmp_path / "slow.toml").write_text(FLEET)
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path / "job.toml"


@pytest.mark.parametrize("text", COMMANDS)
def test_a_command_of_the_papers_pages_ends_well(text: str, job: Path) -> None:
    command, *options = text.split()
    done = isthmus(command, *([job] if command == "plan" else []), *(word for word in options if word != "JOB"))
    assert done.code == 0 and done.out, done.err


@pytest.mark.parametrize(("table", "key", "value"), MODES)
def test_a_mode_of_the_papers_pages_runs(table: str, key: str, value: str, job: Path, tmp_path: Path) -> None:
    clients, one = ROOT / "examples" / "fed-digits.toml", "federated.rounds=1"
    needed = {
        "compression": ["simulate", job, "--set", "compression.ratio=10", "--planner", "even"],
        "sync": ["simulate", job, "--set", "sync.period=2"],
        "runtime": ["train", clients, "--set", one, "--run", tmp_path / "run"],
    }
    done = isthmus(*needed[table], "--set", f"{table}.{key}={value}")
    assert done.code == 0 and done.out and "averages nothing" not in done.out, done


@pytest.mark.long
@pytest.mark.parametrize("command", END_TO_END)
def test_layouts_of_whole_iterations_are_simulated(command: str, tmp_path: Path) -> None:
    """Each takes minutes."""
    run(command, *SMALL[command], "--json", str(tmp_path / "found.json"))
    assert json.loads((tmp_path / "found.json").read_text())["rows"]


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
