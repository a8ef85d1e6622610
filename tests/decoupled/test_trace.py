"""The trace of decoupled replicas: of a real run and of a simulated one the same."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import msgspec

import isthmus
from isthmus.api.decoupled import simulate_decoupled
from isthmus.cost import SyncPolicy
from isthmus.programs.merger import MERGER
from isthmus.report.rounds_table import replicas_traced
from isthmus.runtime.decoupled.merged_run import merged_fragments
from isthmus.trace import Trace
from tests.runtime.commands import isthmus as isthmus_command

from .small import PAIR, job_of


def merges_of(trace: Trace) -> list[str]:
    return [span.name for span in trace.spans if span.track == "control"]


def names_of(trace: Trace) -> set[tuple[str, str, str, str]]:
    return {(span.device, span.track, span.name, span.other) for span in trace.spans}


def test_a_real_run_and_a_simulated_one_have_the_same_trace(tmp_path: Path) -> None:
    """A merge is due each 128 samples, and the run ends after 320: whatever the time of a step, these are three."""
    (tmp_path / "fleet.toml").write_text(PAIR.format(4, 8))
    job = job_of()
    job = msgspec.structs.replace(
        job,
        fleet=str(tmp_path / "fleet.toml"),
        run_dir=str(tmp_path / "runs"),
        training=msgspec.structs.replace(job.training, steps=20, micro_batches=2),
        sync=msgspec.convert(
            {"mode": "decoupled", "period": 8, "decoupled": {"fragments": 1, "quorum": 2}}, SyncPolicy
        ),
    )
    run, simulated = isthmus.train(job), simulate_decoupled(job)
    real, expected = run.trace, simulated.trace
    assert merges_of(real) == merges_of(expected) == ["merge 1", "merge 2", "merge 3"]
    assert [f"merge {line.merge.merge}" for line in run.merges] == merges_of(real)
    assert names_of(real) == names_of(expected)
    for trace, merges in ((real, run.merges), (expected, simulated.run.merges)):
        assert replicas_traced(trace).merges == len(merges)
        assert all(0.0 <= span.start_s <= span.end_s for span in trace.spans)
        for name in ("a-0", "b-0"):
            steps = [span for span in trace.spans if span.device == name and span.track == "compute"]
            assert [span.step for span in steps] == list(range(len(steps)))
            assert all(one.end_s <= next_one.start_s for one, next_one in pairwise(steps))
        whole = {span.size_bytes for span in trace.spans if span.name == "fragment"}
        assert whole == {4 * sum(values.numel() for values in merged_fragments(job).known)}
    _shown(run.path, tmp_path / "job.json", real)


def _shown(run: Path, job: Path, real: Trace) -> None:
    """By `isthmus trace`, and in the file for a viewer: each replica and the merger is a process there."""
    shown = isthmus_command("trace", run)
    assert shown.code == 0 and shown.out.startswith("3 merges\n"), shown
    assert [line.split()[0] for line in shown.out.splitlines()[3:5]] == ["a-0", "b-0"]
    found = json.loads(isthmus_command("trace", run, "--json").out)
    assert (
        found["replicas"] == [msgspec.to_builtins(use) for use in replicas_traced(real).replicas]
        and found["merges"] == 3
    )
    events = json.loads(Path(found["perfetto"]).read_bytes())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        f"runtime {name}" for name in ("a-0", "b-0", MERGER)
    }
    assert len([e for e in events if e["ph"] == "X"]) == len(real.spans)


def test_a_simulated_trace_is_written_for_a_viewer(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "decoupled.toml"
    done = isthmus_command("simulate", example, "--steps", "20", "--trace", tmp_path / "t.json")
    assert done.code == 0, done.err
    events = json.loads((tmp_path / "t.json").read_bytes())["traceEvents"]
    assert {"simulator merger", "simulator cloud-0"} <= {e["args"].get("name") for e in events if e["ph"] == "M"}
    assert {"step", "contribution", "change", "fragment", "merge 1"} <= {e["name"] for e in events if e["ph"] == "X"}
