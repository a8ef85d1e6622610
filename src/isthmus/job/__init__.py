"""A job: which model, which data, how to train it, on which fleet. One TOML file."""

from isthmus.job.prepared import (
    Prepared,
    described_here,
    described_in,
    keep_prepared,
    kept_prepared,
    prepare,
    prepared_again,
)
from isthmus.job.settings import (
    PIPELINE,
    Job,
    JobDocument,
    JobReader,
    PlanConfig,
    PrivacyConfig,
    RuntimeConfig,
    TrainingConfig,
    checked,
    constraints_of,
    fleet_of,
    load_job,
)

__all__ = [
    "PIPELINE",
    "Job",
    "JobDocument",
    "JobReader",
    "PlanConfig",
    "Prepared",
    "PrivacyConfig",
    "RuntimeConfig",
    "TrainingConfig",
    "checked",
    "constraints_of",
    "described_here",
    "described_in",
    "fleet_of",
    "keep_prepared",
    "kept_prepared",
    "load_job",
    "prepare",
    "prepared_again",
]
