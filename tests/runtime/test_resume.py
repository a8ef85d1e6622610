"""A run that is killed or interrupted goes on from its last checkpoint, one that loses a device at once; no process is
left."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from isthmus.api.folder import RunFolder
from isthmus.job import load_job
from isthmus.training.checkpoint import latest_checkpoint, newest_checkpoint, read_manifest, read_tensors

from .commands import (
    Done,
    devices_of,
    edited,
    interrupt,
    is_running,
    isthmus,
    refused,
    start,
    wait_until,
    write_job,
)

STEPS = 12

USER_CODE = """
import isthmus
import torch
from torch import nn
from torch.nn import functional as F

class Counting(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table = nn.Embedding(256, width)
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(0.1)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, input_ids, labels):
        x = self.table(input_ids) * self.scale
        for layer in self.mix:
            x = self.drop(torch.tanh(layer(x)))
        logits = self.norm(x) @ self.table.weight.T
        losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
        counted = (labels.flatten() != 32).float()
        return (losses * counted).sum(), counted.sum()

class Say(isthmus.Callback):
    def _say(self, *words):
        with open("callback.log", "a") as file:
            print(*words, file=file)

    def start(self, started):
        self._say("start", started.run, started.first_step, started.steps, started.settings["training"]["steps"],
            started.plan.used == ())

    def step(self, done):
        self._say("step", done.step, done.heldout_loss, *done.learning_rates, ",".join(done.devices), done.period,
            done.run)

    def evaluation(self, evaluated):
        self._say("evaluation", evaluated.step, evaluated.loss)

    def fault(self, fault):
        self._say("fault", fault)

    def end(self, ended):
        self._say("end", ended.run, ended.outcome, ended.reason, *ended.pictures)

class FailsAt(Say):
    def __init__(self, at):
        self._at = at

    def _say(self, *words):
        super()._say(*words)
        if list(words[:2]) == self._at:
            raise ValueError("no more\\nsteps")
"""

CHANGES = (
    ('name = "gpt"', 'name = "user_code:Counting"'),
    ("{vocab_size = 256, sequence_length = 16, width = 16, layers = 2, heads = 2}", "{width = 8}"),
    (
        "clip_norm = 1.0",
        'clip_norm = 0.5\nprecision = "fp16"\nloss_scale = {init_scale = 8192, growth_interval = 3}',
    ),
    (
        "[learning_rate]",
        '[[optimizer]]\npattern = "*.bias"\nname = "sgd"\nlr = 0.1\nmomentum = 0.9\n'
        "[[optimizer]]\nlr = 0.01\n"
        '[[callback]]\nname = "user_code:Say"\n'
        "[learning_rate]",
    ),
)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("here")
    (folder / "user_code.py").write_text(USER_CODE)
    edited(write_job(folder, steps=STEPS), *CHANGES)
    return folder


@pytest.fixture(autouse=True)
def _in_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)


@pytest.fixture(scope="module")
def whole(here: Path) -> Done:
    """The run that nothing interrupts: fp16 with a loss scale that moves, clipping, cosine, two optimizers, dropout, a
    counted loss, a tie."""
    before = Path.cwd()
    os.chdir(here)
    try:
        return isthmus("train", "job.toml", "--run", "whole", "--json")
    finally:
        os.chdir(before)


def _saved(folder: str) -> dict[str, torch.Tensor]:
    return read_tensors(latest_checkpoint(Path(folder, "checkpoints")))


def _equal(a: str, b: str) -> None:
    first, second = _saved(a), _saved(b)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    assert RunFolder(Path(a)).losses() == RunFolder(Path(b)).losses()


def _kill(process: subprocess.Popen[str]) -> None:
    """kill -9 of the coordinator alone: its devices end by themselves."""
    devices = devices_of(process.pid)
    process.kill()
    process.communicate()
    wait_until(lambda: not any(map(is_running, devices.values())))


def test_a_whole_run(whole: Done) -> None:
    assert whole.code == 0, whole.err
    points = RunFolder(Path("whole")).losses()
    assert [p.step for p in points if p.split == "train"] == list(range(1, STEPS + 1))
    assert [p.step for p in points if p.split == "heldout"] == [5, 10, 12]
    told = json.loads(whole.out)
    assert (told["loss"], told["heldout_loss"]) == (points[-2].loss, points[-1].loss)
    saved = _saved("whole")
    assert {t.dtype for n, t in saved.items() if not n.endswith(".step")} == {torch.float32}, "fp32 masters"
    assert {n.rpartition(".")[2] for n in saved if n.startswith("optimizer.")} == {
        "momentum_buffer",
        "step",
        "exp_avg",
        "exp_avg_sq",
    }
    assert {"unused", "scale", "table.weight"} <= saved.keys()
    said = Path("callback.log").read_text().splitlines()
    assert said[0] == f"start whole 0 {STEPS} {STEPS} False"
    steps = [line.split()[1] for line in said if line.startswith("step")]
    assert steps == [str(n + 1) for n in range(STEPS)]
    heldout = {p.step: str(p.loss) for p in points if p.split == "heldout"}
    facts = [line.split()[2:] for line in said if line.startswith("step")]
    assert [held for held, *_ in facts] == [["None", heldout[5], heldout[10]][n // 5] for n in range(STEPS)]
    job = load_job(Path("job.toml"))
    for step, (_, *rates, devices, period, folder) in enumerate(facts):
        factor = job.learning_rate.factor(step, STEPS)
        assert rates == [str(optimizer.lr * factor) for optimizer in job.optimizer] and len(rates) >= 2
        assert (devices.split(","), period, folder) == (list(RunFolder(Path("whole")).plan().used), "1", "whole")
    assert [line for line in said if line.startswith("evaluation")] == [
        f"evaluation {step} {loss}" for step, loss in heldout.items()
    ]
    assert said[-1] == "end whole done  plan timeline loss" and not any(line.startswith("fault") for line in said)


def test_killed_anywhere_it_resumes_bit_for_bit(whole: Done) -> None:
    """Before the first checkpoint, then at a random step, then while a checkpoint is being written."""
    folder, losses = RunFolder(Path("killed")), lambda: len(folder.losses())
    process = start("train", "job.toml", "--run", "killed")
    wait_until(lambda: losses() >= 1, process)
    _kill(process)
    shutil.rmtree("killed/checkpoints", ignore_errors=True)  # it may have been quicker than we

    step = random.randint(4, 8)
    process = start("train", "job.toml", "--run", "killed", "--resume")
    wait_until(lambda: losses() >= step, process)
    _kill(process)

    partial = Path("killed/checkpoints/.step-000012")
    partial.mkdir(parents=True, exist_ok=True)
    (partial / "stage-0.safetensors").write_bytes(b"half")
    with Path("killed/losses.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "lo')
    saved = newest_checkpoint(Path("killed/checkpoints"))
    told = f"after step {read_manifest(saved).step}" if saved is not None else "from the start: nothing was saved"
    done = isthmus("train", "job.toml", "--run", "killed", "--resume")
    assert done.code == 0, done.err
    assert told in done.err
    _equal("whole", "killed")
    assert not partial.exists()


def test_nothing_left_to_do(whole: Done) -> None:
    done = isthmus("train", "job.toml", "--run", "whole", "--resume")
    assert done.code == 0 and "nothing left to do" in done.err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([("steps =", "seed = 3\nsteps =")], ["training.seed: got 3", "made with 0"]),
        pytest.param(
            [("batch_size = 8", "batch_size = 16")], ["training.batch_size: got 16", "8"], marks=pytest.mark.long
        ),
        pytest.param([("steps =", "shuffle = false\nsteps =")], ["training.shuffle"], marks=pytest.mark.long),
        pytest.param(
            [("max_bytes = 40000", "max_bytes = 30000")],
            ["resume: data: device", "has other training samples"],
            marks=pytest.mark.long,
        ),
        ([("width = 8", "width = 12")], ["weight", "[256, 8]", "[256, 12]"]),
        pytest.param(
            [('name = "sgd"', 'name = "adamw"')],
            ["optimizer state of 'mix.0.bias'", "momentum_buffer"],
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_a_checkpoint_was_not_made_with_is_refused(
    whole: Done, tmp_path: Path, changes: list[tuple[str, str]], words: list[str]
) -> None:
    job = tmp_path / "job.toml"
    shutil.copy("job.toml", job)
    shutil.copytree("whole", tmp_path / "run")
    refused(isthmus("train", edited(job, *changes), "--run", tmp_path / "run", "--resume", "--steps", "20"), 2, *words)


@pytest.mark.long
def test_another_fleet_takes_over(whole: Done, tmp_path: Path) -> None:
    shutil.copytree("whole", tmp_path / "run")
    done = isthmus(
        "train",
        "job.toml",
        "--run",
        tmp_path / "run",
        "--resume",
        "--steps",
        "14",
        "--fleet",
        "three-sites",
        "--devices",
        "3",
    )
    assert done.code == 0, done.err
    assert f"resumed with another job: training.steps was {STEPS}, is now 14" in done.err
    before, after = _saved("whole"), _saved(str(tmp_path / "run"))
    assert before.keys() == after.keys()
    counted = "optimizer.table.weight.step"  # steps that were not left out
    assert 0 < float(before[counted]) < float(after[counted]) <= 14
    losses = [p.loss for p in RunFolder(tmp_path / "run").losses() if p.split == "train"]
    assert len(losses) == 14 and losses[-1] < losses[0]
    assert len(list(latest_checkpoint(tmp_path / "run" / "checkpoints").glob("stage-*"))) == 3
    for folder in (tmp_path / "run", tmp_path / "run" / "sessions" / "1"):
        traced = json.loads(isthmus("trace", folder, "--json").out)
        devices = {d["device"] for d in traced["comparison"]["devices"]}
        assert len(devices) == (2 if folder.name == "1" else 3)
        assert [s["outcome"] for s in traced["sessions"]] == ([] if folder.name == "1" else ["done", "done"])


def _endless(folder: str) -> subprocess.Popen[str]:
    process = start("train", "job.toml", "--run", folder, "--steps", "1000000")
    wait_until(lambda: len(RunFolder(Path(folder)).losses()) >= 5, process)
    return process


@pytest.mark.long
def test_nobody_else_runs_in_a_folder_and_a_second_ctrl_c_ends_at_once() -> None:
    process = _endless("impatient")
    devices = devices_of(process.pid)
    refused(isthmus("train", "job.toml", "--run", "impatient", "--resume"), 2, "run", "another process")
    os.kill(devices["laptop-0"], signal.SIGSTOP)  # what is leased will not be finished
    interrupt(process)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    interrupt(process)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    again = "to go on: isthmus train job.toml --steps 1000000 --resume --run impatient"
    assert f"interrupted at once: run folder impatient; {again}" in errors
    assert not any(map(is_running, devices.values()))


@pytest.mark.long
def test_a_run_that_loses_a_device_goes_on_and_ctrl_c_saves_and_exits_130() -> None:
    process = _endless("lost")
    devices, folder = devices_of(process.pid), RunFolder(Path("lost"))
    os.kill(devices["laptop-1"], signal.SIGKILL)
    reached = max(p.step for p in folder.losses()) + 3
    wait_until(lambda: folder.losses() and folder.losses()[-1].step > reached, process)
    interrupt(process)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert read_manifest(latest_checkpoint(folder.path / "checkpoints")).step == folder.losses()[-1].step
    for name in ("timeline.png", "loss.png", "trace.jsonl"):
        assert (folder.path / name).exists()
    assert "device 'laptop-1' was lost: its process was killed by SIGKILL" in errors and "training again" in errors
    faults = [line for line in Path("callback.log").read_text().splitlines() if line.startswith("fault")]
    lost = "fault lost laptop-1: device 'laptop-1' was lost: its process was killed by SIGKILL"
    assert faults[0].startswith(lost) and "fault another plan: " in "\n".join(faults)
    assert not any("joined" in line for line in faults), "those that the run began with are no news"
    trained = [p.step for p in folder.losses() if p.split == "train"]
    assert trained == sorted(set(trained)), "what was done again is called once"
    unreported = set(range(1, trained[-1] + 1)) - set(trained)
    assert len(unreported) <= 1, "only of its last step may the state have arrived, and not the loss"
    assert not any(map(is_running, devices.values()))


def test_a_callback_that_raises_ends_the_run_and_hears_of_it(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    shutil.copy("job.toml", job)
    edited(job, ('"user_code:Say"', '"user_code:FailsAt"\noptions = {at = ["step", 2]}'))
    before = len(Path("callback.log").read_text().splitlines())
    done = isthmus("train", job, "--run", tmp_path / "run", "--devices", "1")
    refused(done, 2, "callback 'user_code:FailsAt': step raised ValueError: no more steps")
    said = Path("callback.log").read_text().splitlines()[before:]
    assert [line.split()[0] for line in said] == ["start", "step", "step", "end"]
    assert said[-1].startswith(f"end {tmp_path / 'run'} failed callback 'user_code:FailsAt'")
