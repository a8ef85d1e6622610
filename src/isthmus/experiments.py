"""Runs under measurement: plan, fleet and places of processes are given, and every report can be watched.

`isthmus.train` makes a plan, a run folder and pictures. An experiment that compares plans, schedulers or placements
makes its plan itself (`isthmus.planners`, `isthmus.cost`) and runs exactly that plan:

    prepared = prepare(load_job(Path("job.toml")))
    plan = plan_for(prepared, fleet)
    outcome = run_plan(prepared, plan, fleet, folder, RunOptions(), Watcher())
    check_outcome(outcome)
"""

from isthmus.api.make_plan import plan_for
from isthmus.federated.evaluation import RoundHistory, RoundLine
from isthmus.graph.capture import Column, capture
from isthmus.protocol import Item, RunSpec
from isthmus.runtime.coordinator.backend import LocalBackend, local_places
from isthmus.runtime.coordinator.run import RunOptions, Watcher, check_outcome, run_plan, run_spec
from isthmus.runtime.coordinator.run_callbacks import Outcome
from isthmus.runtime.federated.run import FederatedRun
from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.training.checkpoint import latest_checkpoint, load_checkpoint, read_tensors
from isthmus.training.learning_rate import LearningRate
from isthmus.training.optim import OptimizerConfig

__all__ = [
    "Column",
    "FederatedRun",
    "Item",
    "LearningRate",
    "LocalBackend",
    "OptimizerConfig",
    "Outcome",
    "ProcessPlace",
    "RoundHistory",
    "RoundLine",
    "RunOptions",
    "RunSpec",
    "Watcher",
    "capture",
    "check_outcome",
    "latest_checkpoint",
    "load_checkpoint",
    "local_places",
    "plan_for",
    "read_tensors",
    "run_plan",
    "run_spec",
]
