"""Plans of steps that overlap: memory of two versions, no certificate, and a check that computes the figures itself."""

from pathlib import Path

import pytest
from msgspec.json import encode
from msgspec.structs import replace

from isthmus.api.make_plan import read_plan, verify_plan
from isthmus.data import DataSpec
from isthmus.errors import UserError
from isthmus.job import Job, TrainingConfig, checked, fleet_of, prepare
from isthmus.job.settings import PlanConfig
from isthmus.models import ModelSpec
from isthmus.planners import plan as make_plan
from isthmus.plans import Plan
from isthmus.training.optim import OptimizerConfig


def job_of(**fields: object) -> Job:
    return Job(
        name="delayed",
        model=ModelSpec(name="mlp"),
        data=DataSpec(kind="digits"),
        training=TrainingConfig(steps=4, batch_size=16, micro_batches=8),
        **{"schedule": "delayed", "fleet": "three-sites", **fields},  # type: ignore[arg-type]
    )


def plan_of(job: Job) -> Plan:
    prepared, fleet = prepare(job), fleet_of(job)
    return make_plan("even", prepared.problem(fleet))


def test_a_plan_and_its_check() -> None:
    job = job_of()
    plan, plain = plan_of(job), plan_of(replace(job, schedule="1f1b"))
    assert plan.certificate is None and plan.period == 2
    assert plan.predicted.step_s < plain.predicted.step_s
    for stage, other in zip(plan.stages, plain.stages, strict=True):
        assert stage.memory.optimizer == other.memory.optimizer + stage.parameter_bytes  # both in float32
    verdict = verify_plan(job, plan)
    assert verdict.differences == () and verdict.holds()
    wrong = replace(plan, predicted=replace(plan.predicted, step_s=plain.predicted.step_s))
    assert [d.field for d in verify_plan(job, wrong).differences] == ["predicted.step_s"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"training": TrainingConfig(non_finite="skip")},
            "schedule: got steps that may be left out with",
        ),
        (
            {"plan": PlanConfig(data_holder=("a",), holders_data="own")},
            "plan.holders_data: got 'own' with schedule 'delayed'",
        ),
    ],
)
def test_what_cannot_overlap_is_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        checked(replace(job_of(), **fields))


def test_muon_is_of_matrices() -> None:
    with pytest.raises(UserError, match=r"muon: got parameter '.*bias' of shape \[\d+\], expected matrices"):
        prepare(job_of(optimizer=(OptimizerConfig(name="muon", momentum=0.95),)))


def test_a_plan_of_overlapping_steps_is_none_of_auto(tmp_path: Path) -> None:
    """Their result differs; `auto` leaves only the order within a step open."""
    document = tmp_path / "plan.json"
    document.write_bytes(encode(plan_of(job_of())))
    with pytest.raises(UserError, match=r"schedule\.name: got 'delayed', the job has 'auto'"):
        read_plan(job_of(schedule="auto"), fleet_of(job_of()), document)
