"""The command line: bad input is one line on stderr and exit code 2 or 3; every command speaks JSON; export."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from isthmus.api.consoles import Notes
from isthmus.api.folder import RunFolder
from isthmus.api.make_plan import plan_for
from isthmus.cli.app import commands
from isthmus.cost.compression import ratio_planner_names
from isthmus.data import load_dataset
from isthmus.data.dataset import evaluation_rows
from isthmus.errors import UserError
from isthmus.fleet import load_fleet
from isthmus.fleet.fleet import corrected
from isthmus.job import fleet_of, load_job, prepare
from isthmus.planners import planner_names
from isthmus.planners.cohort import COHORT_ALGORITHMS
from isthmus.planners.sync import SYNC_PLANNERS
from isthmus.plans import Plan, Schedule, load_plan, save_plan
from isthmus.plans.plan import PLAN_VERSION
from isthmus.protocol.drift import fit_fleet
from tests.lazy import Lazy
from tests.training.reference import reference_loss

from .commands import Done, edited, isthmus, refused, write_job

transformers = Lazy("transformers")

SCHEDULE = "[learning_rate]"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("fleet =", "fleets =", ["unknown key 'fleets'", "'fleet'"]),
        ("clip_norm =", "clip_nrom =", ["training.clip_nrom", "training.clip_norm"]),
        ("kind =", "knd =", ["data.knd", "data.kind"]),
        (SCHEDULE, "[[optimizer]]\nlrr = 1.0\n[learning_rate]", ["optimizer[0].lrr", "optimizer[0].lr"]),
        ("layers =", "layrs =", ["gpt option 'layrs'", "layers"]),
        ("max_bytes =", "mx_bytes =", ["text option 'mx_bytes'", "max_bytes"]),
        ("steps = 12", 'steps = "many"', ["training.steps", "expected 'integer', got 'text'"]),
        ("steps = 12", "steps = 0", ["training.steps", ">= 1, got 0"]),
        ('"laptop"', '"laptpo"', ["laptpo", "laptop"]),
        ('"laptop"', '"laptop.toml"', ["laptop.toml", "No such file"]),
        ('"even"', '"evne"', ["unknown planner 'evne'", "even"]),
        ('"gpt"', '"gtp"', ["unknown model 'gtp'", "gpt"]),
        ('"gpt"', '"nowhere.at_all:Model"', ["nowhere.at_all:Model", "cannot import"]),
        ('"text"', '"txt"', ["unknown data kind 'txt'", "text"]),
        ('"stdlib"', '"missing.txt"', ["missing.txt"]),
        ('"cosine"', '"cosin"', ["learning_rate.schedule 'cosin'", "cosine"]),
        ("run_dir", 'schedule = "zigzag"\nrun_dir', ["schedule 'zigzag'", "1f1b"]),
        ("batch_size = 8", "batch_size = 9", ["training.batch_size: got 9", "micro_batches"]),
        ("batch_size = 8", "batch_size = 8000000", ["training.batch_size: got 8000000", "no more training samples"]),
        ("eval_samples = 8", "eval_samples = 0", ["eval_samples", "0 held-out samples", "micro-batch (2)"]),
        ("[training]", "[training]]", ["not valid TOML", "line 15"]),
        ("[model]", '[runtime]\ntimeout = "5 parsecs"\n[model]', ["runtime.timeout", "parsecs"]),
        (SCHEDULE, "[[optimizer]]\nlr = -1.0\n[learning_rate]", ["optimizer[0].lr", "got -1.0"]),
        (SCHEDULE, "[[optimizer]]\nlr = inf\n[learning_rate]", ["optimizer[0].lr", "got inf", "finite"]),
        (SCHEDULE, "[[optimizer]]\nlearn_rate = 1\n[learning_rate]", ["optimizer[0].learn_rate", "optimizer[0].lr"]),
        (SCHEDULE, '[[optimizer]]\npattern = "*.bias"\n[learning_rate]', ["no pattern matches", "'token.weight'"]),
        (
            SCHEDULE,
            '[[optimizer]]\n[[optimizer]]\npattern = "*.bias"\n[learning_rate]',
            ["'*.bias' of entry 2 updates no parameter"],
        ),
        (SCHEDULE, "[[optimizer]]\nnesterov = true\n[learning_rate]", ["nesterov", "momentum"]),
        ("vocab_size = 256", "vocab_size = 200", ["'input_ids' holds values up to 255", "0 to 199"]),
    ],
)
def test_bad_jobs(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    job = edited(write_job(tmp_path), (old, new))
    refused(isthmus("train", job), 2, *words)
    assert not (tmp_path / "runs").exists(), "what fails leaves no run behind"


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        ("nowhere:f", ["callback 'nowhere:f'", "cannot import nowhere"]),
        ("math:nothing", ["math has no 'nothing'"]),
        ("math:pi", ["expected a class derived from isthmus.Callback"]),
        ("mine", ["unknown callback 'mine'", "package.module:Class"]),
    ],
)
def test_callbacks_that_cannot_be_had(tmp_path: Path, callback: str, words: list[str]) -> None:
    job = edited(write_job(tmp_path), (SCHEDULE, f'[[callback]]\nname = "{callback}"\n[learning_rate]'))
    for command in (["plan"], ["plan", "--compare", "even"], ["simulate"], ["train"]):
        refused(isthmus(command[0], job, *command[1:]), 2, *words)


@pytest.mark.parametrize(
    ("track", "words"),
    [
        ('to = "tensorbord"', ["unknown track.to 'tensorbord'", "did you mean 'tensorboard'"]),
        ('to = ["prometheus", "prometheus"]', ["track.to: got 'prometheus' twice"]),
        ('options.wandb.mode = "offline"', ["track.options: got 'wandb', expected one of track.to"]),
        ('to = "prometheus"\noptions.prometheus.prot = 9', ["track.options.prometheus", "'prot'", "'port'"]),
        ('to = "prometheus"\noptions.prometheus.port = -1', ["track.options.prometheus", "port"]),
        ('to = "math:pi"', ["'math:pi'", "expected a class with the methods of a tracker"]),
    ],
)
def test_trackers_that_cannot_be_had(tmp_path: Path, track: str, words: list[str]) -> None:
    job = edited(write_job(tmp_path), (SCHEDULE, f"[track]\n{track}\n[learning_rate]"))
    refused(isthmus("plan", job), 2, *words)


CHANGE = "[[runtime.changes]]\nstep = 1\nfactor = 0.5\n{}\n[learning_rate]"


@pytest.mark.parametrize("what", ['device = "gone"', 'link = ["gone", "gone-too"]'])
def test_changes_of_what_is_not_there(tmp_path: Path, what: str) -> None:
    job = edited(write_job(tmp_path), (SCHEDULE, CHANGE.format(what)))
    for command in (["plan"], ["plan", "--compare", "even"], ["simulate"], ["train"]):
        refused(isthmus(command[0], job, *command[1:]), 2, "runtime.changes[0]", "unknown device 'gone'")


def test_addresses_in_place_of_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    where = "s3://bucket/runs"
    job = write_job(tmp_path)
    refused(isthmus("plan", job, "--picture", f"{where}/plan.png"), 2, where, "a path of this machine")
    refused(isthmus("export", "runs/x", where), 2, where, "a path of this machine")
    refused(isthmus("devices", "--state", where), 2, where, "a path of this machine")
    refused(isthmus("train", edited(job, ("run_dir = ", f'run_dir = "{where}" #'))), 2, "run_dir", where)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.toml"]


MODELS = """
import torch
from torch import nn

class PerSample(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, 4)
    def forward(self, input_ids, labels):
        return self.table(input_ids).mean((1, 2))

class Branching(PerSample):
    def forward(self, input_ids, labels):
        found = self.table(input_ids).sum()
        if found > 0:
            return found
        return -found

class Reads(PerSample):
    def __init__(self):
        super().__init__()
        self.scale = float(nn.Linear(64, 64).weight.std())

def no_module():
    return 3

def broken():
    raise RuntimeError("two\\nlines")
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("PerSample", ["forward returned a tensor of shape [", "expected a scalar"]),
        ("Branching", ["user_models.py:15", "if found > 0"]),
        ("no_module", ["expected it to return an nn.Module, got int"]),
        ("broken", ["building it failed (user_models.py:", "RuntimeError: two lines"]),
        ("Reads", ["building Reads failed (user_models.py:", "float(", "depends on the data of a tensor"]),
    ],
)
def test_bad_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user_models.py").write_text(MODELS)
    job = edited(
        write_job(tmp_path),
        ('"gpt"', f'"user_models:{name}"'),
        ("options = {vocab_size = 256, sequence_length = 16, width = 16, layers = 2, heads = 2}", ""),
    )
    refused(isthmus("plan", job), 2, *words)


def test_bad_arguments(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    refused(isthmus("plan", tmp_path / "no.toml"), 2, "no.toml", "not found")
    for arguments in (("--steps", "0"), ("--devices", "0"), ("--nothing",)):
        done = isthmus("train", job, *arguments)
        assert done.code == 2 and arguments[0] in done.err and "Traceback" not in done.err
    refused(isthmus("plan", job, "--devices", "9"), 2, "9 devices", "1 to 2")
    refused(isthmus("trace", tmp_path), 2, "not a run")
    refused(isthmus("calibrate", tmp_path), 2, "not a run")
    refused(isthmus("export", tmp_path / "none", tmp_path / "out"), 2, "not found")
    refused(isthmus("train", job, "--resume"), 2, "runs/small", "not found")
    refused(isthmus("train", job, "--resume", "--run", tmp_path), 2, "not a run")
    refused(isthmus("train", job, "--run", tmp_path), 2, "not an empty directory")
    refused(isthmus("train", job, "--run", job / "below"), 2, "cannot be made")


def test_too_large_a_model(tmp_path: Path) -> None:
    fleet = tmp_path / "small.toml"
    fleet.write_text(
        '[[device]]\nname = "small"\ncompute = "1 GFLOPS"\nmemory = "50 KiB"\ncount = 2\n'
        '[links]\ndefault = {latency = "1 ms", bandwidth = "1 Gbit/s"}\n'
    )
    refused(isthmus("plan", write_job(tmp_path), "--fleet", fleet), 3, "small-", "short")


def test_more_devices_than_the_model_has_cuts(tmp_path: Path) -> None:
    fleet = tmp_path / "many.toml"
    fleet.write_text(
        '[[device]]\nname = "d"\ncompute = "1 GFLOPS"\nmemory = "1 GiB"\ncount = 80\n'
        '[links]\ndefault = {latency = "1 ms", bandwidth = "1 Gbit/s"}\n'
    )
    job = write_job(tmp_path)
    plan = json.loads(isthmus("plan", job, "--fleet", fleet, "--json").out)
    assert 1 < len(plan["replicas"][0]["stages"]) < 80
    assert "d-79 is left out: the model has no further place to cut" in plan["notes"]


def test_bad_unit_in_a_fleet(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text('[[device]]\nname = "a"\nregion = "r"\ncompute = "10 GFLOPS"\nmemory = "16 Gigs"\n')
    refused(isthmus("plan", write_job(tmp_path), "--fleet", fleet), 2, "[[device]] 1 'a': memory", "Gigs")


def test_bad_plans(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path))
    prepared, fleet, path = prepare(job), fleet_of(job), tmp_path / "plan.json"
    plan = plan_for(prepared, fleet)
    (replica,) = plan.replicas

    def refuse(*words: str) -> None:
        with pytest.raises(UserError) as caught:
            plan_for(prepared, fleet, path)
        for word in ("plan.json", *words):
            assert word in str(caught.value)

    def with_stages(*changes: dict[str, object]) -> Plan:
        stages = tuple(msgspec.structs.replace(s, **c) for s, c in zip(replica.stages, changes, strict=True))
        return msgspec.structs.replace(plan, replicas=(msgspec.structs.replace(replica, stages=stages),))

    for changed, words in (
        (msgspec.structs.replace(plan, model="unet"), ["model: got 'unet'", "'gpt'"]),
        (msgspec.structs.replace(plan, micro_batches=2), ["micro_batches: got 2", "4"]),
        (msgspec.structs.replace(plan, version=PLAN_VERSION + 1), [f"version: got {PLAN_VERSION + 1}"]),
        (msgspec.structs.replace(plan, replicas=()), ["replicas: got none"]),
        (msgspec.structs.replace(plan, replicas=(replica, replica)), ["in 2 replicas"]),
        (with_stages({"last": 7}, {}), ["0..7", "left a gap"]),
        (with_stages({"flops_forward": -1}, {}), ["stages[0].flops_forward", ">= 0"]),
        (with_stages({}, {"last": 99}), ["..99", "another model"]),
        (with_stages({"device": "desktop"}, {}), ["unknown device 'desktop'", "laptop-0"]),
    ):
        save_plan(changed, path)
        refuse(*words)
    path.write_text("stages: 2")
    refuse("plan file", "cannot be read")
    path.unlink()
    refuse("not found")


def test_a_plan_as_it_was_made_is_taken_as_it_is(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path))
    prepared, fleet, path = prepare(job), fleet_of(job), tmp_path / "plan.json"
    plan = plan_for(prepared, fleet)
    save_plan(plan, path)
    assert plan_for(prepared, fleet, path) == plan
    limited = msgspec.structs.replace(plan.replica, schedule=Schedule("1f1b", (1, 1)))
    save_plan(msgspec.structs.replace(plan, replicas=(limited,)), path)
    taken = plan_for(prepared, fleet, path)
    assert taken.replica.schedule == limited.schedule and taken.notes == plan.notes
    assert msgspec.structs.replace(taken.predicted, steady_s=plan.predicted.steady_s) == plan.predicted
    assert taken.predicted.steady_s > plan.predicted.steady_s
    less = [stage.memory.total - before.memory.total for stage, before in zip(taken.stages, plan.stages, strict=True)]
    assert max(less) <= 0 and min(less) < 0, "fewer micro-batches in flight"


class Trained(NamedTuple):
    job: Path
    run: Path
    plan: Path
    done: Done


HF_OPTIONS = "{n_layer = 2, n_head = 2, n_embd = 16, vocab_size = 256, n_positions = 16}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Hugging Face's GPT-2 with micro-batches of one sample, on three devices, under a plan edited by hand."""
    folder = tmp_path_factory.mktemp("trained")
    job = edited(
        write_job(folder, steps=4, fleet="three-sites"),
        ('"gpt"', '"hf-gpt2"'),
        ("micro_batches = 4", "micro_batches = 8"),
        ("{vocab_size = 256, sequence_length = 16, width = 16, layers = 2, heads = 2}", HF_OPTIONS),
        ("max_bytes", "shift_labels = false, max_bytes"),
        ("run_dir", "devices = 3\nrun_dir"),
    )
    path = folder / "plan.json"
    path.write_text(isthmus("plan", job, "--json").out)
    plan = load_plan(path)
    (replica,) = plan.replicas
    first, second, third = replica.stages
    moved = (
        msgspec.structs.replace(first, device=third.device),
        second,
        msgspec.structs.replace(third, device=first.device),
    )
    save_plan(msgspec.structs.replace(plan, replicas=(msgspec.structs.replace(replica, stages=moved),)), path)
    done = isthmus("train", job, "--run", folder / "run", "--plan", path, "--json", draws=True)
    return Trained(job, folder / "run", path, done)


def test_train_leaves_a_folder_that_explains_it(trained: Trained) -> None:
    assert trained.done.code == 0, trained.done.err
    told = json.loads(trained.done.out)
    assert told["run"] == str(trained.run) and told["comparison"]["measured_step_s"] > 0
    for name in ("plan.json", "trace.jsonl", "predicted.jsonl", "plan.png", "timeline.png", "loss.png"):
        assert (trained.run / name).exists(), name
    assert (trained.run / "checkpoints/latest").exists()
    asked, used = load_plan(trained.plan), load_plan(trained.run / "plan.json")
    assert [s.device for s in used.stages] == [s.device for s in asked.stages]
    assert "computed anew" in used.notes[-1] and used.predicted != asked.predicted
    assert {path.name for path in (trained.run / "logs").iterdir()} == {f"{s.device}.log" for s in used.stages}
    refused(isthmus("train", trained.job, "--run", trained.run), 2, "holds a run already", "--resume")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("n_embd = 16", "n_embd = 32"), "the model has ["),
        pytest.param(("n_layer = 2", "n_layer = 3"), "it is of another model", marks=pytest.mark.long),
        (("batch_size = 8", "batch_size = 16"), "resume: training.batch_size: got 16"),
    ],
)
def test_another_job_is_not_resumed_and_nothing_is_planned_for_it(
    change: tuple[str, str], words: str, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "other.toml"
    job.write_text(trained.job.read_text())
    monkeypatch.setattr("isthmus.api.pipeline.plan_for", lambda *_: pytest.fail("it was planned"))
    job = edited(job, change, ("steps = 4", "steps = 6"))
    refused(isthmus("train", job, "--resume", "--run", trained.run), 2, words)


def test_a_run_tells_how_fast_its_fleet_is(trained: Trained, tmp_path: Path) -> None:
    folder, target = RunFolder(trained.run), tmp_path / "fleet.toml"
    assert "measured: " in trained.done.err and f"isthmus calibrate {trained.run}" in trained.done.err
    done = isthmus("calibrate", trained.run, "--out", target)
    assert done.code == 0 and str(target) in done.err, done.err
    written, stated = load_fleet(target), folder.fleet()
    assert written == fit_fleet(stated, folder.periods(), folder.measured().spans)
    assert [d.flops_per_s for d in written.devices] == [d.flops_per_s for d in stated.devices]
    assert {d.name for d in written.devices if d.scale != 1} <= set(folder.plan().devices)
    assert isthmus("calibrate", trained.run).out.strip() == target.read_text().strip()
    assert json.loads(isthmus("plan", trained.job, "--fleet", target, "--json").out)["predicted"]["step_s"] > 0


@pytest.mark.long
def test_a_resumed_run_is_planned_for_the_fleet_as_it_was_measured(tmp_path: Path) -> None:
    job = edited(write_job(tmp_path, steps=1), ("eval_every = 5", "eval_every = 0"))
    run = RunFolder(tmp_path / "run")
    assert isthmus("train", job, "--run", run.path).code == 0
    refused(isthmus("calibrate", run.path), 2, "nothing was measured", "a second step")
    stated = run.fleet()
    slow = run.plan().devices[0]
    measured = corrected(stated, {slow: stated.device(slow).flops_per_s / 50}, {})
    run.keep_fitted(measured)
    done = isthmus("train", job, "--run", run.path, "--resume", "--steps", "2", "--planner", "chain")
    assert done.code == 0 and f"{slow} computes at" in done.err and "2 % of what the fleet file says" in done.err, done
    again = edited(job, ("steps = 1", "steps = 2"), ("even", "chain"))
    assert run.plan() == plan_for(prepare(load_job(again)), measured)
    assert run.periods()[0].fleet == measured and run.fleet() == stated
    run.begin(run.job(), stated, run.plan(), 2)
    assert run.fitted() is not None
    run.begin(run.job(), stated.subset([slow]), run.plan(), 2)
    assert run.fitted() is None, "it was of another fleet"


def test_export_gives_hugging_face_the_same_model(trained: Trained, tmp_path: Path) -> None:
    exported = json.loads(isthmus("export", trained.run, tmp_path / "out", "--json").out)
    assert exported == {"directory": str(tmp_path / "out"), "step": 4}
    module = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    job = load_job(trained.job)
    data = load_dataset(job.data, "heldout")
    rows = evaluation_rows(data, job.training.eval_samples)
    with torch.no_grad():
        loss = reference_loss(module, [data.batch([i], list(data.columns)) for i in rows])
    (*_, told) = [p.loss for p in RunFolder(trained.run).losses() if p.split == "heldout"]
    assert loss == pytest.approx(told, rel=1e-6)
    refused(isthmus("export", trained.run, tmp_path / "out"), 2, "not an empty directory")


def test_every_command_speaks_json(trained: Trained, tmp_path: Path) -> None:
    simulated = json.loads(isthmus("simulate", trained.job, "--json", "--plan", trained.run / "plan.json").out)
    assert simulated["step_s"] > 0
    said = isthmus("simulate", trained.job, "--plan", trained.run / "plan.json").out
    assert "simulated step " in said and "by FusionLLM's Eq. 3 " in said
    traced = json.loads(isthmus("trace", trained.run, "--json").out)
    assert json.loads(Path(traced["perfetto"]).read_text())["traceEvents"]
    assert "three-sites" in json.loads(isthmus("fleets", "--json").out)
    assert {"text", "digits"} <= json.loads(isthmus("datasets", "--json").out).keys()
    assert {"fedavg", "fedadam"} <= json.loads(isthmus("algorithms", "--json").out).keys()
    listed = json.loads(isthmus("planners", "--json").out)
    expected = {
        "plan": planner_names(),
        "compression": ratio_planner_names(),
        "sync": sorted(SYNC_PLANNERS),
        "cohort": sorted(COHORT_ALGORITHMS),
    }
    assert {kind: sorted(found["planners"]) for kind, found in listed.items()} == expected
    table = isthmus("planners").out
    assert all(name in table for names in expected.values() for name in names)
    assert all(field in table for field in ("`planner`", "`compression.method`", "`runtime.planner`"))
    again = json.loads(isthmus("train", trained.job, "--run", trained.run, "--resume", "--json").out)
    assert again["heldout_loss"] == json.loads(trained.done.out)["heldout_loss"]


def test_a_truncated_checkpoint_is_refused(trained: Trained, tmp_path: Path) -> None:
    """No other one is whole. (With one that is, a run goes on from there: test_checkpoint.)"""
    run = tmp_path / "run"
    shutil.copytree(trained.run, run)
    for checkpoint in run.glob("checkpoints/step-*"):
        (path,) = checkpoint.glob("stage-1.*")
        assert load_file(path)
        path.write_bytes(path.read_bytes()[:-100])
    words = ("step-000004", "stage-1.safetensors", "truncated")
    refused(isthmus("export", run, tmp_path / "out"), 2, *words)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    refused(isthmus("train", trained.job, "--run", run, "--resume", "--steps", "6"), 2, *words)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_notes_that_nobody_reads_end_nothing() -> None:
    read, write = os.pipe()
    os.close(read)
    file = os.fdopen(write, "w")
    notes = Notes(file=file, markup=False)
    for number in range(3):
        notes.print(f"step {number}")
    with pytest.raises(BrokenPipeError):  # what the first left in the file's buffer
        file.close()


def test_the_help_lists_all_commands_under_headings() -> None:
    text = isthmus("--help").out
    listed = dict(re.findall(r"^  ([a-z][a-z-]+) {2,}(\S.*)$", text, re.MULTILINE))
    assert listed.keys() == commands().keys()
    assert text.count("...") == 1, "no sentence is cut; the usage has ARGS..."
    headings = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert headings[0] == "Options" and "A fleet, on the coordinator's machine" in headings
