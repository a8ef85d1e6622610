"""What commands make of a federated run's folder."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

from isthmus.federated.evaluation import RoundHistory, RoundLine
from isthmus.federated.job import build, load_federated_job
from isthmus.federated.resident import Resident
from isthmus.models import ModelSpec, build_model
from isthmus.programs.open_phase import RoundRecord
from isthmus.protocol.federated_messages import ClientTime
from isthmus.report.rounds_table import trace_of
from tests.runtime.commands import isthmus, refused

JOB = """
name = "small"
run_dir = "{folder}/runs"

[model]
name = "mlp"
options = {{ features = 64, width = 4, layers = 1, classes = 10 }}

[data]
kind = "digits"
options = {{ flat = true }}

[federated.partition]
scheme = "iid"
clients = 5

[federated]
algorithm = "fedavg"
rounds = 3

[training]
eval_every = 0

[federated.participation]
clients = 3

[runtime]
scheme = "sp"
"""
PIPELINE = """
name = "small"
run_dir = "{folder}/runs"
fleet = "dtfm-case1"

[model]
name = "mlp"
options = {{ features = 64, width = 4, layers = 1, classes = 10 }}

[data]
kind = "digits"
options = {{ flat = true }}

[training]
steps = 1
batch_size = 8
micro_batches = 2
"""


class Normed(nn.Module):
    """Running means, a frozen parameter and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)
        self.frozen = nn.Parameter(torch.randn(64), requires_grad=False)
        self.again = nn.Linear(64, 64)
        self.again.weight = self.first.weight
        self.last = nn.Linear(64, 10)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.norm(self.first(pixel_values)) + self.frozen
        logits = self.last(self.again(x.relu()))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run-folders")
    (folder / "job.toml").write_text(JOB.format(folder=folder))
    done = isthmus("train", folder / "job.toml")
    assert done.code == 0, done.err
    return folder / "runs" / "small"


def server_model(run: Path) -> torch.Tensor:
    return load_file(run / "rounds" / "round-000002.safetensors")["server/model"]


def test_the_servers_model_is_exported(run: Path, tmp_path: Path) -> None:
    done = isthmus("export", run, tmp_path / "out")
    assert (done.code, done.err) == (0, "") and done.out.endswith("the model after 3 rounds\n")
    spec = json.loads((tmp_path / "out" / "model.json").read_text())
    module = build_model(ModelSpec(name=spec["name"], options=spec["options"]))
    load_model(module, tmp_path / "out" / "model.safetensors")
    assert torch.equal(Resident(module).vector(), server_model(run))
    broadcast = json.loads(isthmus("export", run, tmp_path / "again", "--json").out)
    assert broadcast == {"directory": str(tmp_path / "again"), "round": 3}


def test_means_ties_and_what_does_not_train_are_exported(tmp_path: Path) -> None:
    text = JOB.format(folder=tmp_path).replace('name = "mlp"', 'name = "tests.federated.test_run_folders:Normed"')
    text = text.replace("options = { features = 64, width = 4, layers = 1, classes = 10 }", "")
    (tmp_path / "job.toml").write_text(text)
    assert isthmus("train", tmp_path / "job.toml").code == 0
    assert isthmus("export", tmp_path / "runs" / "small", tmp_path / "out").code == 0
    torch.manual_seed(7)
    module = Normed()
    load_model(module, tmp_path / "out" / "model.safetensors")
    kept = load_file(tmp_path / "runs" / "small" / "rounds" / "round-000002.safetensors")
    resident = Resident(module)
    assert torch.equal(resident.vector(), kept["server/model"])
    buffers = {f"server/buffers/{name}": value for name, value in resident.buffers().items()}
    assert buffers.keys() == {name for name in kept if "buffers" in name} and len(buffers) == 3
    assert all(torch.equal(value, kept[name]) and value.abs().sum() > 0 for name, value in buffers.items())
    begun = build(load_federated_job(tmp_path / "job.toml"))
    assert torch.equal(module.frozen, begun.get_parameter("frozen"))


def test_the_rounds_are_traced(run: Path) -> None:
    done = isthmus("trace", run, "--json")
    assert done.code == 0, done.err
    broadcast = json.loads(done.out)
    assert broadcast["rounds"] == 3
    events = json.loads(Path(broadcast["perfetto"]).read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert [name for name in names if name.startswith("round")] == ["round 1", "round 2", "round 3"]
    assert sum(name.startswith("client") for name in names) == 9
    assert "round time" in isthmus("trace", run).out


def test_spans_follow_one_another() -> None:
    timed = {"e0": (ClientTime(4, 9, 0.5), ClientTime(2, 3, 0.25)), "e1": (ClientTime(7, 9, 1.0),)}
    lines = [
        RoundLine(record=RoundRecord(round=3, attempt=0, trained=timed), seconds=2.0, sent_bytes=5, received_bytes=6),
        RoundLine(record=RoundRecord(round=4, attempt=0, trained=timed, earlier_s={"e0": 0.5}), seconds=3.0),
    ]
    found = [(s.device, s.name, s.start_s, s.end_s, s.step) for s in trace_of("x", lines).spans]
    assert found == [
        ("coordinator", "round 4", 0.0, 2.0, 4),
        ("e0", "client 4", 0.0, 0.5, 4),
        ("e0", "client 2", 0.5, 0.75, 4),
        ("e1", "client 7", 0.0, 1.0, 4),
        ("coordinator", "round 5", 2.0, 5.0, 5),
        ("e0", "earlier passes", 2.0, 2.5, 5),
        ("e0", "client 4", 2.5, 3.0, 5),
        ("e0", "client 2", 3.0, 3.25, 5),
        ("e1", "client 7", 2.0, 3.0, 5),
    ]


def test_rounds_are_where_they_were_in_time() -> None:
    began_s = 1.7e9
    at = [began_s + 10, None, began_s + 100, began_s + 90]
    lines = [
        RoundLine(record=RoundRecord(round=number, attempt=0, trained={}), seconds=2.0, opened_at_s=opened_s)
        for number, opened_s in enumerate(at)
    ]
    found = [(span.start_s, span.end_s) for span in trace_of("x", lines).spans]
    # the second says nothing of its time, and the clock was set back before the last
    assert found == [(0.0, 2.0), (2.0, 4.0), (90.0, 92.0), (92.0, 94.0)]


def test_a_resumed_run_is_traced_with_its_gap(run: Path, tmp_path: Path) -> None:
    lines = RoundHistory.of(run).lines()
    opened = [line.opened_at_s for line in lines]
    assert None not in opened and opened == sorted(opened)
    lines[2] = msgspec.structs.replace(lines[2], opened_at_s=opened[2] + 3600)
    other = copied(run, tmp_path)
    (other / "rounds.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    broadcast = json.loads(isthmus("trace", other, "--json").out)
    events = json.loads(Path(broadcast["perfetto"]).read_text())["traceEvents"]
    rounds = {e["name"]: e["ts"] for e in events if e["ph"] == "X" and e["name"].startswith("round")}
    assert rounds["round 1"] == 0 and rounds["round 3"] > 3600e6


def test_a_run_without_rounds_says_so(run: Path, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_bytes((run / "job.json").read_bytes())
    for command in (("export", tmp_path, tmp_path / "out"), ("trace", tmp_path)):
        refused(isthmus(*command), 2, "no round was committed yet")


def test_a_model_of_another_form_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "rounds").mkdir()
    name = "rounds/round-000002.safetensors"
    (tmp_path / name).write_bytes((run / name).read_bytes())
    (tmp_path / "job.json").write_text((run / "job.json").read_text().replace('"width":4', '"width":5'))
    (tmp_path / "job.json").write_text((tmp_path / "job.json").read_text().replace('"width": 4', '"width": 5'))
    refused(isthmus("export", tmp_path, tmp_path / "out"), 2, "a model of another form than that of job.json")


def test_a_folder_is_of_one_kind(run: Path, tmp_path: Path) -> None:
    (tmp_path / "pipeline.toml").write_text(PIPELINE.format(folder=run.parent.parent))
    before = (run / "job.json").read_bytes()
    refused(
        isthmus("train", tmp_path / "pipeline.toml", "--resume"), 2, "holds a federated job, expected a pipeline job"
    )
    assert (run / "job.json").read_bytes() == before
    other = tmp_path / "other"
    other.mkdir()
    (other / "job.json").write_text('{"name": "small", "training": {}}')
    refused(
        isthmus("train", run.parent.parent / "job.toml", "--resume", "--run", other),
        2,
        "expected a federated job",
    )
    assert len(RoundHistory.of(run).lines()) == 3


def test_the_older_round_is_exported_where_the_newest_is_damaged_whatever_clients_keep(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB.format(folder=tmp_path).replace('"fedavg"', '"scaffold"'))
    assert isthmus("train", tmp_path / "job.toml").code == 0
    newest = sorted((tmp_path / "runs" / "small" / "rounds").iterdir())[-1]
    newest.write_bytes(newest.read_bytes()[:-1] + b"\xff")
    done = isthmus("export", tmp_path / "runs" / "small", tmp_path / "out")
    assert done.code == 0 and done.out.endswith("the model after 2 rounds\n")
    assert str(newest) in done.err and "going back to round 2" in done.err
    refused(isthmus("train", tmp_path / "job.toml", "--resume"), 2, "round 2 cannot be gone back to")
    assert "last federated round" in " ".join(isthmus("export", "--help").out.split())


def copied(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder / "copy"))


def test_rounds_that_are_gone_were_still_made(run: Path, tmp_path: Path) -> None:
    other = copied(run, tmp_path)
    shutil.rmtree(other / "rounds")
    refused(isthmus("export", other, tmp_path / "out"), 2, "holds no round, expected the last of the 3")
    job = (other / "job.json").read_text()
    (other / "job.json").write_text(
        re.sub(r'("save_every": ?)1\b', r"\g<1>5", re.sub(r'("rounds": ?)3\b', r"\g<1>9", job))
    )
    refused(isthmus("export", other, tmp_path / "out"), 2, "no round was saved yet: training.save_every is 5")
    (other / "rounds.jsonl").write_bytes(b"{\n")
    refused(isthmus("export", other, tmp_path / "out"), 2, "holds no round, and no line of rounds.jsonl can be read")


@pytest.mark.parametrize(("content", "what"), [(None, "missing"), (b"", "empty"), (b"{\n", "damaged")])
def test_a_trace_without_the_rounds_lines_says_so(run: Path, tmp_path: Path, content: bytes | None, what: str) -> None:
    other = copied(run, tmp_path)
    (other / "rounds.jsonl").unlink()
    if content is not None:
        (other / "rounds.jsonl").write_bytes(content)
    refused(isthmus("trace", other), 2, f"rounds.jsonl: {what}")


@pytest.mark.parametrize(
    ("damage", "said", "kept"),
    [
        (lambda lines: [lines[0], lines[1][:50]], ("line 2 is the last one and is not whole", "rounds 2 to 3:"), 1),
        (lambda lines: [lines[0][:9] + b"\n", *lines[1:]], ("line 1 cannot be read", "round 1:"), 2),
        (lambda lines: [lines[0], lines[2]], ("tells nothing of round 2:",), 2),
        (lambda lines: lines, (), 3),
    ],
)
def test_a_trace_says_of_which_rounds_it_is_not(
    run: Path, tmp_path: Path, damage: Callable[[list[bytes]], list[bytes]], said: tuple[str, ...], kept: int
) -> None:
    other = copied(run, tmp_path)
    path = other / "rounds.jsonl"
    path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    done = isthmus("trace", other, "--json")
    assert done.code == 0 and json.loads(done.out)["rounds"] == kept
    assert all(what in done.err for what in said) and bool(done.err) == bool(said)
