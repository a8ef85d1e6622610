"""The job file, callbacks, and what is checked before any process starts."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import EntryPoint
from pathlib import Path

import msgspec
import pytest
import torch

from isthmus.callbacks import Callback, CallbackConfig, build_callback
from isthmus.errors import UserError
from isthmus.job import Job, fleet_of, keep_prepared, kept_prepared, load_job, prepare

JOB = """
name = "j"
[model]
name = "gpt"
options = {vocab_size = 256, sequence_length = 8, width = 8, layers = 1, heads = 1}
[data]
kind = "text"
options = {files = "stdlib", sequence_length = 8, max_bytes = 20000}
[training]
batch_size = 8
micro_batches = 4
"""


def _job(folder: Path, *changes: tuple[str, str]) -> Job:
    text = JOB
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / "job.toml"
    path.write_text(text)
    return load_job(path)


def test_a_job(tmp_path: Path) -> None:
    job = _job(tmp_path, ("[model]", 'devices = 1\n[runtime]\ntimeout = "1 min"\n[model]'))
    assert (job.micro_batch_size, job.timeout_s, job.fleet, job.planner) == (2, 60.0, "laptop", "auto")
    assert job.engine().micro_batches == 4
    assert fleet_of(job).names == ("laptop-0",)
    assert msgspec.json.decode(msgspec.json.encode(job), type=Job) == job


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "j"', 'name = "../j"', "name: expected 'text' matching"),
        ("micro_batches = 4", "micro_batches = 3", "batch_size: got 8, expected a multiple of training.micro_batches"),
        ("[model]", "optimizer = []\n[model]", "optimizer: got an empty list"),
        ("[model]", '[runtime]\ntimeout = "0.1 s"\n[model]', "runtime.timeout: got '0.1 s', expected at least 1 s"),
        ("[model]", '[runtime]\ntimeout = "4 bytes"\n[model]', "job.toml: runtime.timeout"),
        (
            "[model]",
            "[runtime]\nemulate = false\nchanges = [{step = 1, factor = 0.5, device = 'd'}]\n[model]",
            "runtime.changes: got some with runtime.emulate = false",
        ),
        ("[model]", "[runtime]\nchanges = [{step = 1, factor = 0, device = 'd'}]\n[model]", "factor: got 0"),
        ("[model]", "[[optimizer]]\nbetas = [0.9, 1.0]\n[model]", "optimizer[0].betas[1]: expected 'number' < 1.0"),
        ("[model]", "[learning_rate]\nwarmup_steps = -1\n[model]", "learning_rate.warmup_steps"),
        ("[model]", "[runtime]\ncompile = true\ndeterministic = true\n[model]", "runtime.compile: got true with"),
        ("[model]", "[sync]\nmode = 'outer'\nperiod = 0\n[model]", "sync.period: expected 'integer' >= 1"),
        ("[model]", "[sync]\nmode = 'outer'\nperiod = 3\n[model]", "got 100, expected a multiple of sync.period"),
        ("[model]", "[sync]\nouter_momentum = 1.0\n[model]", "sync.outer_momentum: expected 'number' < 1.0"),
        ("[model]", "[sync]\nmode = 'local'\nmixing = 0.1\n[model]", "mixing: got 0.1 with mode 'local', which"),
        ("[model]", "[sync]\nouter_rate = 0.5\n[model]", "outer_rate: got 0.5 with mode 'every-step', which"),
        ("[model]", "[sync]\nmode = 'streaming'\ndelay = 2\n[model]", "delay: got 2, expected at most the period"),
    ],
)
def test_bad_jobs(tmp_path: Path, old: str, new: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        _job(tmp_path, (old, new))
    assert str(tmp_path / "job.toml") in str(caught.value) and words in str(caught.value)


GPT_OPTIONS = "options = {vocab_size = 256, sequence_length = 8, width = 8, layers = 1, heads = 1}"
TEXT_OPTIONS = 'options = {files = "stdlib", sequence_length = 8, max_bytes = 20000}'


def test_ids_and_classes_that_the_model_has_no_place_for_are_found_before_the_run(tmp_path: Path) -> None:
    digits = (('"text"', '"digits"'), (TEXT_OPTIONS, ""), ('"gpt"', '"mlp"'))
    assert prepare(_job(tmp_path, *digits, (GPT_OPTIONS, ""))).samples.columns["labels"].limit == 10
    with pytest.raises(UserError, match=r"'labels' holds values up to 9, but the model's loss has classes for 0 to 6"):
        prepare(_job(tmp_path, *digits, (GPT_OPTIONS, "options = {classes = 7}")))
    with pytest.raises(UserError, match=r"'input_ids' holds values up to 255, .* rows for 0 to 99 only \(token\)"):
        prepare(_job(tmp_path, ("vocab_size = 256", "vocab_size = 100")))


def test_every_optimizer_entry_has_parameters_and_every_parameter_an_entry(tmp_path: Path) -> None:
    entries = '[[optimizer]]\npattern = "*.bias"\n[[optimizer]]\npattern = "{}"\n[model]'
    assert prepare(_job(tmp_path, ("[model]", entries.format("*"))))
    with pytest.raises(UserError, match=r"no pattern matches parameter 'token.weight': got \['\*.bias', 'head\*'\]"):
        prepare(_job(tmp_path, ("[model]", entries.format("head*"))))
    last = '[[optimizer]]\n[[optimizer]]\npattern = "*.bias"\n[model]'
    with pytest.raises(UserError, match=r"pattern '\*.bias' of entry 2 updates no parameter"):
        prepare(_job(tmp_path, ("[model]", last)))


class Counting(Callback):
    def __init__(self, first: int = 0) -> None:
        self.count = first


def counting_from_seven() -> Counting:
    """A callback may be built by a function."""
    return Counting(7)


def test_callbacks_by_name_and_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        EntryPoint("mine", f"{__name__}:Counting", "isthmus.callbacks"),
        EntryPoint("broken", "nowhere:f", "isthmus.callbacks"),
        EntryPoint("number", "math:pi", "isthmus.callbacks"),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: [e for e in entries if e.group == group])

    def built(name: str, **options: object) -> object:
        return build_callback(CallbackConfig(name=name, options=options))

    found = built("mine"), built("mine", first=3), built(f"{__name__}:counting_from_seven")
    assert [one.count for one in found if isinstance(one, Counting)] == [0, 3, 7]
    for name, options, words in (
        ("broken", {}, "cannot be loaded: No module named 'nowhere'"),
        ("number", {}, "expected a class derived from isthmus.Callback, got 3.14"),
        ("mien", {}, "unknown callback 'mien': did you mean 'mine'"),
        (":f", {}, "expected 'package.module:callable'"),
        ("mine", {"frist": 3}, "unknown mine option 'frist': did you mean 'first'"),
        ("builtins:dict", {}, "got dict without start, expected an object of a class derived from isthmus.Callback"),
        (f"{__name__}:Counting.__init__", {}, "missing a required argument"),
    ):
        with pytest.raises(UserError) as caught:
            built(name, **options)
        assert words in str(caught.value)


def test_a_prepared_job_allocates_no_weights(tmp_path: Path) -> None:
    wide = "vocab_size = 256, sequence_length = 8, width = 8"
    prepared = prepare(_job(tmp_path, (wide, wide.replace("width = 8", "width = 100000"))))
    assert prepared.captured.train.parameter_bytes > 400 * 10**9
    assert prepared.problem(fleet_of(prepared.job)).micro_batches == 4
    assert prepared.samples.heldout == 0 < prepared.samples.train


def test_a_kept_capture_is_taken_for_the_same_model_and_data_alone(tmp_path: Path) -> None:
    wide, kept_in = "vocab_size = 256, sequence_length = 8, width = 8", tmp_path / "captured.safetensors"
    job = _job(tmp_path, (wide, wide))
    prepared = prepare(job)
    constants = {"made": torch.tensor([1.0, 2.0]), "none": torch.zeros((0, 3), dtype=torch.int64)}
    captured = msgspec.structs.replace(prepared.captured, constants=constants)
    prepared = msgspec.structs.replace(prepared, captured=captured)
    assert kept_prepared(job, kept_in) is None
    keep_prepared(prepared, kept_in)
    found = kept_prepared(job, kept_in)
    assert found is not None
    assert (found.captured.train, found.captured.eval) == (captured.train, captured.eval)
    assert (found.samples, found.job, found.origin) == (prepared.samples, job, prepared.origin)
    assert found.captured.constants.keys() == constants.keys()
    for name, value in constants.items():
        read = found.captured.constants[name]
        assert torch.equal(read, value) and read.dtype == value.dtype
    longer = msgspec.structs.replace(job, training=msgspec.structs.replace(job.training, steps=7))
    assert kept_prepared(longer, kept_in) is not None, "how long it trains changes no graph"
    wider = msgspec.structs.replace(job.model, options={**job.model.options, "width": 16})
    bf16 = msgspec.structs.replace(job.training, precision="bf16")
    other_data = msgspec.structs.replace(job.data, options={**job.data.options, "sequence_length": 4})
    for other in (
        msgspec.structs.replace(job, model=wider),
        msgspec.structs.replace(job, training=bf16),
        msgspec.structs.replace(job, data=other_data),
    ):
        assert kept_prepared(other, kept_in) is None
    kept_in.write_bytes(kept_in.read_bytes()[:-40])
    assert kept_prepared(job, kept_in) is None, "torn"
