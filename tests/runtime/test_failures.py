"""A device that cannot go on ends the run: one error that names it and says why, of the right family."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from isthmus.data import DataSpec
from isthmus.errors import FleetTooSmall, PeerError, UserError
from isthmus.experiments import check_outcome
from isthmus.graph.opgraph import Arg, ArgList, Ref
from isthmus.job import Prepared, prepare
from isthmus.runtime.processes.device_processes import ProcessPlace

from .commands import isthmus
from .jobs import job_of, random_cut, run


def _data(folder: Path, classes: int) -> DataSpec:
    path = folder / "images.npz"
    np.savez(path, pixel_values=np.zeros((40, 64), np.float32), labels=np.arange(40) % classes)
    return DataSpec(kind="npz", options={"path": str(path)})


def test_data_that_a_device_does_not_have(tmp_path: Path) -> None:
    prepared = prepare(job_of("mlp", {}, _data(tmp_path, 10)))
    (tmp_path / "images.npz").unlink()
    with pytest.raises(UserError, match=r"^device 'd[01]': npz option 'path': no file .*images.npz$"):
        run(prepared, random_cut(prepared, 2, 0), tmp_path)


OPERATOR = (
    r"aten\.cross_entropy_loss\.default.*: IndexError: Target \d+ is out of bounds\. "
    r"\(step 1, samples \d+, \d+ of the training data\)"
)


def test_what_an_operator_raises_where_nobody_else_can_try(tmp_path: Path) -> None:
    prepared = prepare(job_of("mlp", {}, _data(tmp_path, 40)))
    with pytest.raises(UserError, match=rf"^device 'd1': {OPERATOR}$"):
        run(prepared, random_cut(prepared, 2, 0), tmp_path)
    assert "Traceback" in (tmp_path / "logs" / "d1.log").read_text()


JOB = """
name = "wrong-labels"
fleet = "laptop"
planner = "even"
run_dir = "{folder}/runs"
model = {{name = "mlp"}}
data = {{kind = "npz", options = {{path = "{folder}/images.npz"}}}}
training = {{steps = 4, batch_size = 8, micro_batches = 4}}
runtime = {{emulate = false}}
"""


@pytest.mark.parametrize(
    "devices, who",
    [
        ("2", r"^error: device '(\S+)', as on device '(?!\1)\S+' before: "),
        ("1", r"^error: device '(\S+)', again: "),
    ],
)
def test_what_every_device_raises_is_the_jobs_fault(tmp_path: Path, devices: str, who: str) -> None:
    _data(tmp_path, 40)
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(folder=tmp_path))
    done = isthmus("train", job, "--devices", devices)
    assert done.code == 2, done.err
    (line,) = (line for line in done.err.splitlines() if line.startswith("error:"))
    assert re.search(who + OPERATOR, line), line


def test_a_process_that_does_not_start(tmp_path: Path) -> None:
    prepared = prepare(job_of("mlp", {}, _data(tmp_path, 10)))
    _, outcome = run(prepared, random_cut(prepared, 2, 0), tmp_path, places={"d1": ProcessPlace(prefix=("false",))})
    with pytest.raises(PeerError, match=r"^device 'd1' was lost: its process ended with code 1, see .*d1\.log$"):
        check_outcome(outcome)


def _with_relu_replaced(prepared: Prepared, target: str, args: tuple[Arg, ...]) -> Prepared:
    """The job as a hostile coordinator would send it: `x` stands for the labels."""
    ops = list(prepared.captured.train.ops)
    at = next(i for i, op in enumerate(ops) if op.target == "aten.relu.default")
    column = next(op.name for op in ops if op.kind == "placeholder" and op.outputs[0].dtype == "int64")
    hostile = tuple(Ref(column) if isinstance(a, Ref) else a for a in args)
    ops[at] = msgspec.structs.replace(ops[at], target=target, args=(*ops[at].args[:1], *hostile))
    train = msgspec.structs.replace(prepared.captured.train, ops=tuple(ops))
    return msgspec.structs.replace(prepared, captured=msgspec.structs.replace(prepared.captured, train=train))


@pytest.mark.parametrize(
    ("target", "args", "words"),
    [
        ("aten._reshape_alias.default", (ArgList((1 << 18,)), ArgList((1,))), "is not on the allow-list of operators"),
        ("aten.zeros_like.default", (13,), "expected a dtype"),
        ("aten._weight_norm.default", (Ref("x"), 0), "aten._weight_norm.default: expected two tensors of one dtype"),
    ],
)
def test_a_graph_that_reaches_beyond_its_tensors(
    tmp_path: Path, target: str, args: tuple[Arg, ...], words: str
) -> None:
    prepared = prepare(job_of("mlp", {}, _data(tmp_path, 10)))
    wrong = _with_relu_replaced(prepared, target, args)
    with pytest.raises(UserError, match=rf"^device 'd\d': operator graph: .*{words}"):
        _, outcome = run(wrong, random_cut(prepared, 2, 0), tmp_path)
        check_outcome(outcome)


def test_a_graph_that_asks_for_more_memory_than_the_owner_gives(tmp_path: Path) -> None:
    prepared = prepare(job_of("mlp", {}, _data(tmp_path, 10)))
    greedy = _with_relu_replaced(prepared, "aten.new_zeros.default", (ArgList((1 << 28,)),))
    places = {f"d{n}": ProcessPlace(memory_bytes=256 << 20) for n in range(2)}
    with pytest.raises(FleetTooSmall, match=r"'d\d': out of memory on cpu in stage \d, .*: asked for 1 GiB, .* free"):
        _, outcome = run(greedy, random_cut(prepared, 2, 0), tmp_path, places=places)
        check_outcome(outcome)
