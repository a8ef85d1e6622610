"""One job under several settings and seeds."""

from __future__ import annotations

import re
import statistics
import sys
from pathlib import Path
from subprocess import PIPE, Popen

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import isthmus
from isthmus.api.sweep import MARGIN, SweepRecord, may_start
from isthmus.errors import UserError
from isthmus.job.sweep import SweepFile, SweepRun, runs_of
from isthmus.report.comparison import RunResult, sweep_rows
from isthmus.runtime.processes.memory import family_bytes
from tests.runtime.commands import isthmus as command
from tests.runtime.commands import refused, start, wait_until

JOB = """
name = "small"
metrics = ["accuracy"]
model = { name = "mlp", options = { features = 64, width = 8, layers = 1, classes = 10 } }
data = { kind = "digits", options = { flat = true, holdout = 0.5 } }
federated.partition = { scheme = "dirichlet", clients = 6, alpha = 0.3 }
federated.algorithm = "fedavg"
federated.rounds = 2
training = { epochs = 1, batch_size = 16, eval_every = 1 }
federated.participation = { clients = 3 }
runtime = { executors = 1 }
track = { to = "prometheus" }
"""
SWEEP = """
name = "rates"
job = "small.toml"
run_dir = "{folder}/runs"
seeds = [0, 1, 2]
at_once = 1

[grid]
learning_rate = [0.2]
"""


def write(folder: Path, sweep: str = SWEEP, job: str = JOB) -> Path:
    (folder / "small.toml").write_text(job)
    path = folder / "sweep.toml"
    path.write_text(sweep.format(folder=folder))
    return path


def record(folder: Path) -> SweepRecord:
    return msgspec.json.decode((folder / "sweep.json").read_bytes(), type=SweepRecord)


def outcomes(folder: Path) -> list[str]:
    return [result.outcome for result in record(folder).results]


def ends(pid: int) -> bool:
    """A killed process that nobody waited for is a zombie still."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.long
def test_killed_stopped_and_resumed_it_trains_each_run_once(tmp_path: Path) -> None:
    job = f'{JOB}store = {{ url = "file://{tmp_path}/bucket" }}\n'
    sweep, folder = write(tmp_path, job=job), tmp_path / "runs" / "rates"
    sweeping = start("sweep", sweep)
    wait_until(lambda: (folder / "sweep.json").is_file() and "done" in outcomes(folder))
    pids = Path(f"/proc/{sweeping.pid}/task/{sweeping.pid}/children")
    wait_until(lambda: pids.read_text().split())
    child = int(pids.read_text().split()[0])
    sweeping.kill()
    sweeping.communicate()
    wait_until(lambda: ends(child))
    assert outcomes(folder) == ["done", "waiting", "waiting"]
    first = folder / record(folder).results[0].folder
    changed = (first / "job.json").stat().st_mtime_ns
    refused(command("sweep", sweep), 2, f"--run {folder}: holds a sweep already; add --resume to continue it")

    stop = isthmus.Stop()
    stopped = isthmus.sweep(
        sweep, resume=True, stop=stop, note=lambda line: stop.request() if "(2 of 3 done)" in line else None
    )
    assert stopped.outcome == "interrupted"
    assert outcomes(folder) == ["done", "done", "waiting"]

    ended = command("sweep", sweep, "--resume", "--at-once", "2")
    assert ended.code == 0, ended.err
    for result in record(folder).results:
        figures = (folder / result.folder / "metrics.prom").read_text()
        assert (tmp_path / "bucket" / result.folder / "job.json").is_file(), "one store, a folder each"
        assert f'isthmus_step{{group="rates",run="{result.folder}"}} 2.0' in figures, "one group, a name each"
    assert "2 of 3 runs are done already" in ended.err
    assert (first / "job.json").stat().st_mtime_ns == changed
    found = isthmus.Sweep(folder)
    assert found.outcome == "done"
    assert [(row.point, row.runs, row.done) for row in found.rows] == [({"learning_rate": 0.2}, 3, 3)]
    alone = isthmus.federate(tmp_path / "small.toml", run=tmp_path / "alone", overrides=overrides(0.2, 2))
    assert alone.evaluation is not None
    assert found.results[2].metrics["held-out loss"] == alone.evaluation.loss
    spread = found.rows[0].metrics["accuracy"]
    assert re.search(rf"0\.2 +3 .*{spread.mean:.4f} ± {spread.deviation:.4f}", ended.out)


PIPELINE = """
name = "small"
fleet = "one.toml"
model = { name = "mlp", options = { features = 64, width = 16, layers = 2, classes = 10 } }
data = { kind = "digits", options = { flat = true, holdout = 0.2 } }
training = { steps = 3, batch_size = 8, micro_batches = 2 }
"""
ONE = """
name = "one"
device = [{ name = "d", compute = "1 GFLOPS", memory = "1 GiB" }]
"""


@pytest.mark.long
def test_each_run_on_an_engine_is_that_of_this_machine(tmp_path: Path) -> None:
    text = 'name = "rates"\njob = "small.toml"\nrun_dir = "{folder}/runs"\ngrid = {{ training.steps = [2] }}\n'
    (tmp_path / "one.toml").write_text(ONE)
    sweep = write(
        tmp_path,
        text + 'engine = {{ on = "local", nodes = 1 }}\n',
        PIPELINE.replace("one.toml", f"{tmp_path}/one.toml"),
    )
    found = isthmus.sweep(sweep)
    assert found.outcome == "done", found.results
    alone = isthmus.train(tmp_path / "small.toml", run=tmp_path / "alone", overrides={"training.steps": 2})
    assert found.results[0].metrics["loss"] == alone.losses[-1].loss
    assert (found.path / found.results[0].folder / "agents.log").stat().st_size


@pytest.mark.long
def test_rounds_on_an_engine_are_those_of_this_machine(tmp_path: Path) -> None:
    text = 'name = "rates"\njob = "small.toml"\nrun_dir = "{folder}/runs"\ngrid = {{ learning_rate = [0.2] }}\n'
    job = JOB.replace('track = { to = "prometheus" }\n', "")
    found = isthmus.sweep(write(tmp_path, text + 'engine = {{ on = "local", nodes = 1 }}\n', job))
    assert found.outcome == "done", found.results
    alone = isthmus.train(tmp_path / "small.toml", run=tmp_path / "alone", overrides={"learning_rate": 0.2})
    assert alone.evaluation is not None
    assert found.results[0].metrics["accuracy"] == alone.evaluation.metrics["accuracy"]
    assert (found.path / found.results[0].folder / "agents.log").stat().st_size


SLOW = """
name = "two"
links.default = { latency = "1 ms", bandwidth = "1 Gbit/s" }
[[device]]
name = "d"
region = "here"
compute = "1 MFLOPS"
memory = "1 GiB"
count = 3
"""
SECURE = """
federated.aggregation = { secure = true, most_samples = 1000 }
federated.participation = { fraction = 1.0, minimum = 2 }
"""
KINDS = {  # more of the job, and settings of each point
    "replicas": "",
    "devices": 'sync = { mode = "decoupled", decoupled.fragments = 2 }',
    "pipelines": 'sync = { mode = "decoupled", decoupled = { fragments = 2, replicas = [["d-0", "d-1"], ["d-2"]] } }',
}


@pytest.mark.long
@pytest.mark.parametrize("kind", [*KINDS, "secure"])
def test_a_sweep_of_each_program_has_the_figures_of_its_runs(kind: str, tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(SLOW)
    training = "{ steps = 4, eval_every = 2, batch_size = 12, micro_batches = 6 }"
    job = PIPELINE.replace("{ steps = 3, batch_size = 8, micro_batches = 2 }", training)
    job += f"runtime.emulate = false\n{KINDS.get(kind, '')}\n"
    if kind == "secure":
        job = JOB.replace("federated.participation = { clients = 3 }\n", SECURE)
    grid = "learning_rate" if kind == "secure" else '"training.clip_norm"'
    text = SWEEP.replace("[0, 1, 2]", "[0, 1]").replace("learning_rate", grid)
    found = isthmus.sweep(write(tmp_path, text, job), note=lambda line: None)
    assert found.outcome == "done" and len(found.results) == 2
    for result in found.results:
        run = isthmus.Run(tmp_path / "runs" / "rates" / result.folder)
        assert run.outcome == "done" and result.metrics["held-out loss"] == run.heldout[-1].loss
        if kind == "replicas":
            assert len(run.plan.replicas) > 1
    assert found.results[0].metrics["held-out loss"] != found.results[1].metrics["held-out loss"]


def overrides(rate: float, seed: int) -> dict[str, object]:
    return {"learning_rate": rate, "training.seed": seed}


def test_a_run_that_fails_is_named_and_the_others_are_done(tmp_path: Path) -> None:
    sweep = write(
        tmp_path,
        'name = "rates"\njob = "small.toml"\nat_once = 2\n[[points]]\ndata.options.holdout = 0.5\n'
        "[[points]]\nmodel.options.features = 63\n",
    )
    ended = command("sweep", sweep, "--run", tmp_path / "here", "--json")
    assert ended.code == 1, ended.err
    document = msgspec.json.decode(ended.out)
    assert [result["outcome"] for result in document["results"]] == ["done", "failed"]
    assert document["results"][1]["reason"] and "features=63" in document["results"][1]["folder"]
    assert document["rows"][0]["metrics"]["accuracy"]["deviation"] is None


BAD = {
    'grid = { "learning_rat" = [1] }': "key",
    'grid = { "learning_rate" = 0.1 }': "grid.learning_rate: got 0.1, expected a list of values",
    "grid = { learning_rate = [] }": "grid.learning_rate: got [], expected a list of values",
    'grid = { "training.seed" = [1] }': "grid: got a seed, expected it in seeds = [...]",
    "seeds = [-1]": "seeds",
    "seeds = [1, 1]": "twice, expected each once",
    "points = [{ learning_rate = 1 }, { learning_rate = 1 }]": "twice, expected each once",
    'job = "none.toml"': "job: got 'none.toml', expected a job file",
    "at_onc = 2": "at_once",
    'engine = { on = "local", node = 2 }': "node",
    'points = [{ "training.batch_size" = -1 }]': "(with training.batch_size=-1)",
}


@pytest.mark.parametrize(("text", "error"), BAD.items())
def test_bad_files_start_nothing(tmp_path: Path, text: str, error: str) -> None:
    job = "" if text.startswith("job") else 'job = "small.toml"\n'
    sweep = write(tmp_path, "")
    sweep.write_text(f'name = "rates"\nrun_dir = "{tmp_path}/runs"\n{job}{text}\n')
    with pytest.raises(UserError, match=re.escape(error)):
        isthmus.sweep(sweep)
    assert not (tmp_path / "runs").exists()


def test_a_changed_job_is_refused(tmp_path: Path) -> None:
    sweep = write(tmp_path)
    folder = tmp_path / "runs" / "rates"
    folder.mkdir(parents=True)
    before = SweepRecord(name="rates", job="", job_digest="", results=())
    (folder / "sweep.json").write_bytes(msgspec.json.encode(before))
    with pytest.raises(UserError, match="has changed since the sweep"):
        isthmus.sweep(sweep, resume=True)
    (folder / "sweep.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        isthmus.sweep(sweep, resume=True)
    with pytest.raises(UserError, match="not found, or no sweep"):
        isthmus.sweep(sweep, resume=True, run=tmp_path / "other")


VALUES = st.lists(st.one_of(st.integers(-9, 9), st.booleans(), st.text("ab/ ", max_size=3)), min_size=1, max_size=3)


@given(
    st.dictionaries(st.sampled_from(["a.b", "a.c", "d"]), VALUES, max_size=3),
    st.lists(st.integers(0, 9), unique=True, max_size=3),
)
def test_each_combination_has_a_folder_of_its_own(grid: dict[str, list[object]], seeds: list[int]) -> None:
    distinct = {
        key: list({msgspec.json.encode(value): value for value in values}.values()) for key, values in grid.items()
    }
    runs = runs_of(SweepFile(name="s", job="j", grid=dict(distinct), seeds=tuple(seeds)))
    count = max(1, len(seeds))
    for values in distinct.values():
        count *= len(values)
    assert len(runs) == len({run.folder for run in runs}) == count
    for run in runs:
        assert re.fullmatch(r"[A-Za-z0-9=.,_-]+", run.folder) and run.point.keys() == grid.keys()
        turned = SweepRun(point=dict(reversed(run.point.items())), seed=run.seed)
        assert turned.folder[-8:] == run.folder[-8:]


def test_tables_without_quotes_are_settings() -> None:
    sweep = SweepFile(name="s", job="j", grid={"a": {"b": {"c": [1]}}, "d": [2]}, points=[{"e": {"f": 3}}])
    assert [run.point for run in runs_of(sweep)] == [{"e.f": 3, "a.b.c": 1, "d": 2}]


@given(
    st.lists(st.integers(0, 100), max_size=5),
    st.one_of(st.none(), st.integers(0, 100)),
    st.one_of(st.none(), st.integers(0, 1000)),
    st.integers(1, 5),
)
def test_runs_start_while_there_is_room(
    running: list[int], need: int | None, available: int | None, limit: int
) -> None:
    starts = may_start(running, need, available, limit)
    if len(running) >= limit:
        assert not starts
    elif not running or available is None:
        assert starts
    else:
        fits = need is not None and sum(max(need, now) for now in running) + MARGIN * need <= available + sum(running)
        assert starts == fits


def test_rows_have_the_mean_and_deviation_of_what_is_done() -> None:
    def result(rate: float, seed: int, loss: float | None) -> RunResult:
        metrics = {} if loss is None else {"loss": loss}
        outcome = "failed" if loss is None else "done"
        return RunResult(point={"rate": rate}, seed=seed, folder=f"{rate}-{seed}", outcome=outcome, metrics=metrics)

    rows = sweep_rows([result(1, 0, 2.0), result(2, 0, 5.0), result(1, 1, 4.0), result(2, 1, None)])
    assert [(row.point["rate"], row.runs, row.done) for row in rows] == [(1, 2, 2), (2, 2, 1)]
    assert rows[0].metrics["loss"].mean == 3.0
    assert rows[0].metrics["loss"].deviation == statistics.stdev([2.0, 4.0])
    assert rows[1].metrics["loss"].deviation is None


def test_memory_of_a_process_is_counted() -> None:
    code = "import os; print(flush=True); input(); held = os.urandom(64 << 20); print(len(held), flush=True); input()"
    with Popen([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE, text=True) as child:
        assert child.stdin and child.stdout
        child.stdout.readline()
        before = family_bytes(child.pid)
        child.stdin.write("\n")
        child.stdin.flush()
        child.stdout.readline()
        assert family_bytes(child.pid) - before > 48 << 20
        child.kill()
    assert family_bytes(2**22 + 1) == 0


def test_an_unknown_engine_starts_nothing(tmp_path: Path) -> None:
    text = 'name = "rates"\njob = "small.toml"\nrun_dir = "{folder}/runs"\nengine.on = "lokal"\n'
    sweep = write(tmp_path, text, PIPELINE)
    with pytest.raises(UserError, match="unknown --on 'lokal'"):
        isthmus.sweep(sweep)
    assert not (tmp_path / "runs").exists()
