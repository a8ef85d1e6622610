"""Boundaries and codecs for a fleet within a loss budget: what each is expected to cost is that of the curves."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import msgspec
import pytest

import isthmus
from isthmus import api, expected_loss
from isthmus.api.observer import Silent
from isthmus.errors import UserError
from isthmus.job import Job, load_job, prepare
from isthmus.models import BoundaryOptions, ModelSpec

FLEET = """
name = "far"
links = { default = { latency = "20 ms", bandwidth = "200 kbit/s" } }
[[device]]
name = "a"
region = "here"
compute = "200 MFLOPS"
memory = "500 KiB"
[[device]]
name = "b"
region = "there"
compute = "200 MFLOPS"
memory = "500 KiB"
"""
JOB = """
name = "small"
fleet = "{folder}/fleet.toml"
planner = "chain"
[model]
name = "{model}"
options = {options}
[data]
kind = "{data}"
options = {data_options}
[training]
batch_size = 8
micro_batches = 8
"""
GPT = "{vocab_size = 256, sequence_length = 16, width = 32, layers = 2, heads = 2}"
TEXT = '{files = "stdlib", sequence_length = 16, max_bytes = 40000}'


def job_of(folder: Path, model: str = "gpt", options: str = GPT, data: str = "text", data_options: str = TEXT) -> Job:
    (folder / "fleet.toml").write_text(FLEET)
    text = JOB.format(folder=folder, model=model, options=options, data=data, data_options=data_options)
    (folder / "job.toml").write_text(text)
    return load_job(folder / "job.toml")


@pytest.mark.long
def test_a_budget_buys_boundaries_and_codecs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_loss, "CODECS", {"bf16": 0.0, "int8": 0.001, "int4": 0.01})
    monkeypatch.setattr(expected_loss, "TOPK", {1.0: 0.0, 50.0: 0.5})
    monkeypatch.setitem(expected_loss.BOUNDARIES, "subspace", {16.0: 0.02, 32.0: 0.2})
    monkeypatch.setitem(expected_loss.BOUNDARIES, "residual", {16.0: 0.07})
    job = job_of(tmp_path)
    found = api.what_if.plan_boundaries(job, 0.05, Silent(), isthmus.Stop())
    rows = {row.name: row for row in found.rows}
    assert rows.keys() == {"none", "subspace, rate 16", "subspace, rate 32", "residual, on slow links"}
    assert "more than the budget" in (rows["subspace, rate 32"].refused or "")
    planned = [row for row in found.rows if row.step_s is not None]
    times = [(row.step_s or 0.0) * expected_loss.more_steps(row.increase or 0.0) for row in planned]
    assert times == sorted(times)
    assert rows["none"].increase is not None and rows["none"].step_s is not None
    for name, boundary in (("none", 0.0), ("subspace, rate 16", 0.02), ("residual, on slow links", 0.07 / 7)):
        row = rows[name]
        assert row.increase is not None and boundary <= row.increase <= 0.05
        assert row.step_s is not None and row.step_s <= rows["none"].step_s
        settings = tomllib.loads(row.settings)
        assert settings["compression"]["loss_budget"] == pytest.approx(0.05 - boundary)
        assert bool(boundary) == ("model" in settings)
    residual = rows["residual, on slow links"]
    assert tomllib.loads(residual.settings)["model"]["boundary"]["after"] == {"blocks.0": 16}
    written = tmp_path / "written.toml"  # as a user pastes it
    written.write_text((tmp_path / "job.toml").read_text() + residual.settings)
    pasted = load_job(written)
    assert pasted.model.boundary == BoundaryOptions(method="residual", after={"blocks.0": 16.0})
    assert pasted.compression is not None and pasted.compression.loss_budget == pytest.approx(0.04)
    noted = isthmus.plan(written, overrides={"planner": "even"}).notes
    assert sum("boundary 'residual': expected loss +1.00% without codecs" in note for note in noted) == 1


def test_a_boundary_that_was_not_measured_has_no_expected_loss() -> None:
    assert expected_loss.boundary_increase("subspace", [3.0]) == math.inf
    assert expected_loss.boundary_increase("subspace", [16.0]) == expected_loss.BOUNDARIES["subspace"][16.0]


def test_a_model_without_a_residual_stream_has_codecs_alone(tmp_path: Path) -> None:
    job = job_of(tmp_path, "mlp", "{features = 64, width = 64, classes = 10}", "digits", "{flat = true}")
    none, refused = api.what_if.plan_boundaries(job, 0.05, Silent(), isthmus.Stop()).rows
    assert none.step_s is not None and "no residual stream" in (refused.refused or "")
    with pytest.raises(UserError, match="--loss-budget: got -1, expected a share"):
        api.what_if.plan_boundaries(job, -1.0, Silent(), isthmus.Stop())


def test_weights_that_are_there_have_codecs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(tmp_path, "mlp", "{features = 64, width = 64, classes = 10}", "digits", "{flat = true}")
    prepared = prepare(job)
    monkeypatch.setattr(api.what_if, "prepare", lambda _: prepared)
    there = msgspec.structs.replace(job, model=ModelSpec(name="hf", options={"path": "here"}))
    none, refused = api.what_if.plan_boundaries(there, 0.05, Silent(), isthmus.Stop()).rows
    assert none.step_s is not None and "weights that are read" in (refused.refused or "")
