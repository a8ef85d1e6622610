"""What does not go together: each refusal of the table is made somewhere, and each that is made is in the table."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from isthmus.api.job_overrides import federated_job_of, job_of
from isthmus.combinations import refusals, refused
from isthmus.data import DataSpec
from isthmus.documents import convert
from isthmus.errors import UserError
from isthmus.federated.job import FederatedConfig, FederatedJob, check_deployment, check_simulation
from isthmus.job import Job, TrainingConfig, fleet_of
from isthmus.models import ModelSpec
from isthmus.models.boundary import BoundaryOptions
from isthmus.models.lora import LoraOptions
from isthmus.runtime.decoupled.run import check_decoupled
from isthmus.runtime.device.peer_connections import Endpoint
from isthmus.runtime.federated.executor import check_device, check_on_devices
from tests.docs.test_named_tests import known

SRC = Path(__file__).parents[1] / "src" / "isthmus"


def made() -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls of `refused`, by file; `documents.py` takes rows of the table itself."""
    for path in sorted(SRC.rglob("*.py")):
        if path.name not in ("combinations.py", "documents.py") and "refused(" in (
            text := path.read_text(encoding="utf-8")
        ):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "refused":
                    yield str(path.relative_to(SRC)), node


def test_every_refusal_says_what_was_got_what_is_expected_and_why() -> None:
    for (what, beside), row in refusals().items():
        text = str(refused(what, beside, "x"))
        assert text.startswith(f"{row.field}: got x {row.words}, expected {row.expected}: {row.reason}")
        assert text.endswith("(not built yet)") is not row.built


def test_what_is_refused_is_in_the_table() -> None:
    table = refusals()
    for path, call in made():
        what, beside = call.args[:2]
        assert isinstance(beside, ast.Constant), f"{path}:{call.lineno}"
        names = [node.value for node in ast.walk(what) if isinstance(node, ast.Constant)]
        assert all((name, beside.value) in table for name in names), f"{path}:{call.lineno}: {names}"
        assert names or isinstance(what, ast.Name), f"{path}:{call.lineno}"


BESIDE = re.compile(
    r"\b(with|beside|in|for|without|of) (an? |the )?("
    r"(sync\.mode|mode|schedule|federated job|scheme|engine|backend|sweep)\b|\[\w+\]|(aggregation|privacy|runtime)\.)"
)
"""Words of a refusal beside something. It is the table's to make them."""
OTHERS = {
    "api/audit.py: f'run folder {run}: has no fingerprints": "an option needs another",
    "cli/first_files.py: '--data: got it for a federated job": "the files of a task",
    "cost/problem.py: f\"period: got 'auto'": "a value of one mode",
    'data/images/pipeline.py: f"{where} (Normalize)': "numbers that do not fit",
    "data/partition.py: f'federated.partition.clients: missing": "an option needs another",
    'federated/job.py: f"runtime.ray: got options': "an option needs another",
    "federated/task_spec.py: f'device: got": "one thing said twice",
    "federated/task_spec.py: f'slow_down: got": "one thing said twice",
    'planners/operators.py: f"operators: no device': "what devices lack",
    "sync/options.py: f\"sync option 'weight'": "a value of one mode",
    'training/learning_rate.py: f"decay_steps: got it': "an option needs another",
    "training/learning_rate.py: 'torch: got it": "one thing said twice",
}
"""Other texts with such words, and what they are of."""


def texts() -> Iterator[tuple[str, str]]:
    """Yield the texts of errors of users and of values, by file."""
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            if name in ("UserError", "ValueError") and isinstance(node, ast.Call) and node.args:
                yield str(path.relative_to(SRC)), ast.unparse(node.args[0])


def test_no_other_place_refuses_a_combination() -> None:
    found = [f"{path}: {text}" for path, text in texts() if BESIDE.search(text)]
    assert [line for line in found if not line.startswith(tuple(OTHERS))] == []
    assert all(any(line.startswith(known) for line in found) for known in OTHERS)


def pipeline(**overrides: object) -> Callable[[], object]:
    """Read and check the job with these keys."""

    def act() -> None:
        job = job_of(PIPELINE, {key.replace("__", "."): value for key, value in overrides.items()})
        fleet = fleet_of(job)
        if job.sync.mode == "decoupled":
            check_decoupled(job, fleet)

    return act


def decoupled(**overrides: object) -> Callable[[], object]:
    return pipeline(sync__mode="decoupled", **overrides)


def rounds(check: Callable[[FederatedJob], object] = check_simulation, **overrides: Any) -> Callable[[], object]:
    """Read and check the federated job with these keys."""
    return lambda: check(federated_job_of(FEDERATED, {key.replace("__", "."): v for key, v in overrides.items()}))


def secure(**overrides: Any) -> Callable[[], object]:
    hidden: dict[str, Any] = {
        "federated__aggregation__secure": True,
        "federated__aggregation__most_samples": 64,
        "federated__participation__minimum": 2,
    }
    return rounds(**hidden, **overrides)


def of_file(**tables: object) -> Callable[[], object]:
    """Read a federated job's file with these tables."""
    text = {"name": "x", "model": {"name": "mlp"}, "federated": {}}
    return lambda: convert({**text, **tables}, FederatedJob, "job.toml")


def spec(name: str, **options: object) -> Callable[[], object]:
    return lambda: ModelSpec(name=name, boundary=BoundaryOptions(method="subspace"), **options)  # pyright: ignore[reportArgumentType]


DATA = DataSpec(kind="digits", options={"flat": True})
MODEL = ModelSpec(name="mlp", options={"features": 64})
PIPELINE = Job(name="x", model=MODEL, data=DATA, training=TrainingConfig(batch_size=24))
FEDERATED = FederatedJob(name="x", model=MODEL, data=DATA, federated=FederatedConfig())
NOISE: dict[str, Any] = {"activations": {"clip": 1.0, "noise_multiplier": 1.0}}
OWN: dict[str, Any] = {"plan__data_holder": ["laptop-0"], "plan__holders_data": "own"}
ONE: dict[str, Any] = {"sync__mode": "local", "sync__period": 2}
PRIVATE: dict[str, Any] = {"privacy": {"clip": 1.0, "noise_multiplier": 1.0}}
SITES: dict[str, Any] = {"federated__deployment": {"sites": ["a", "b"]}}

DRIVEN: dict[tuple[str, str], Callable[[], object]] = {
    ("compression", "decoupled"): decoupled(compression={"method": "int8"}),
    ("fingerprints", "decoupled"): decoupled(runtime__fingerprints=True),
    ("changes that are not finite", "decoupled"): decoupled(training__non_finite="ignore"),
    ("own data", "decoupled"): decoupled(**OWN),
    ("activation noise", "decoupled"): decoupled(plan__data_holder=["laptop-0"], privacy=NOISE),
    ("snapshots", "decoupled"): decoupled(runtime__snapshot_every=5),
    ("changes", "decoupled"): decoupled(runtime__changes=[{"step": 1, "device": "laptop-0", "factor": 0.5}]),
    ("skipped steps", "delayed"): pipeline(schedule="delayed", training__non_finite="skip"),
    ("averaged replicas", "delayed"): pipeline(schedule="delayed", **ONE),
    ("own data", "delayed"): pipeline(schedule="delayed", **OWN),
    ("activation noise", "delayed"): pipeline(schedule="delayed", plan__data_holder=["laptop-0"], privacy=NOISE),
    ("compile", "deterministic"): pipeline(runtime__compile=True, runtime__deterministic=True),
    ("store", "activation noise"): pipeline(store={"url": "file:///x"}, plan__data_holder=["laptop-0"], privacy=NOISE),
    ("a description", "own data"): pipeline(data__description="x.json", **OWN),
    ("changes", "real devices"): pipeline(
        runtime__emulate=False, runtime__changes=[{"step": 1, "device": "laptop-0", "factor": 0.5}]
    ),
    ("a description", "federated"): rounds(data__description="x.json"),
    ("planners of stages", "federated"): of_file(planner="chain"),
    ("schedule", "federated"): of_file(schedule="gpipe"),
    ("compression", "federated"): of_file(compression={"method": "int8"}),
    ("fingerprints", "federated"): of_file(runtime={"fingerprints": True}),
    ("JAX", "federated"): of_file(runtime={"engine": "jax"}),
    ("compile", "federated"): of_file(runtime={"compile": True}),
    ("fp16", "federated"): rounds(training__precision="fp16"),
    ("an executor for each client", "joined executors"): rounds(check_on_devices, runtime__scheme="sd"),
    ("emulation", "joined executors"): rounds(check_on_devices, runtime__noise=0.1),
    ("several ranks, JAX", "joined executors"): lambda: check_device(Endpoint(device="a", engine="jax")),
    ("slow executors", "a scheme of its own"): rounds(execution__scheme="rw", execution__slow_down=[1.0]),
    ("an emulated fleet", "sites"): rounds(fleet="parrot-a", **SITES),
    ("an availability trace", "sites"): rounds(
        check_deployment, federated__participation__availability="x.csv", **SITES
    ),
    ("robust aggregation", "secure sums"): secure(federated__aggregation__rule="median"),
    ("late updates", "secure sums"): secure(federated__participation__staleness=1),
    ("weighted clients", "secure sums"): secure(federated__participation__weighted=True),
    ("a least number of samples", "secure sums"): secure(federated__participation__min_samples=2),
    ("a largest norm", "secure sums"): secure(federated__admission__max_norm=1.0),
    ("noise of sites", "sums in the open"): rounds(privacy={**PRIVATE["privacy"], "noise": "sites"}),
    ("robust aggregation", "client privacy"): rounds(federated__aggregation__rule="median", **PRIVATE),
    ("a largest norm", "client privacy"): rounds(federated__admission__max_norm=1.0, **PRIVATE),
    ("weighted clients", "Poisson sampling"): rounds(
        federated__participation__poisson=True, federated__participation__weighted=True
    ),
    ("late updates", "Poisson sampling"): rounds(
        federated__participation__poisson=True, federated__participation__staleness=1
    ),
    ("optimizers", "an algorithm of SGD"): rounds(federated__algorithm="scaffold", local__clip_norm=1.0),
    ("a scheme without executors", "Ray"): rounds(execution__engine="ray", execution__scheme="sp"),
    ("an emulated fleet", "Ray"): rounds(execution__engine="ray", fleet="parrot-a"),
    ("accelerators by name", "Ray"): rounds(execution__engine="ray", execution__device="cuda:1"),
    ("a boundary", "LoRA"): spec("gpt", lora=LoraOptions()),
    ("a boundary", "pretrained weights"): spec("hf"),
}
"""Refusals that a job's keys alone bring about."""
TESTED = {
    ("a plan document", "decoupled"): "test_a_mistake_is_answered_in_one_line",
    ("one plan", "decoupled"): "test_nothing_is_to_be_planned",
    ("options of a simulation", "decoupled"): "test_a_mistake_is_answered_in_one_line",
    ("streams", "own data"): "test_a_description_has_the_layout",
    ("options of plans", "federated"): "test_a_federated_simulation_has_no_trace",
    ("steps", "federated"): "test_a_federated_simulation_has_no_trace",
    ("streams", "federated"): "test_a_federated_job_is_refused_in_one_line",
    ("faults of links", "federated"): "test_faults_that_no_site_can_have",
    ("isthmus plan", "a federated job"): "test_plan_says_what_runs_a_federated_job",
    ("isthmus graph", "a federated job"): "test_commands_of_stages_say_what_a_federated_job_has_in_their_place",
    ("isthmus describe-data", "a federated job"): "test_commands_of_stages_say_what_a_federated_job_has_in_their_place",
    ("isthmus probe", "a federated job"): "test_commands_of_stages_say_what_a_federated_job_has_in_their_place",
    ("options of rounds", "pipeline"): "test_a_pipelines_job_is_no_federated_one",
    ("a single number", "client privacy"): "test_bad_options_are_refused_in_one_line",
    ("collected values", "client privacy"): "test_what_is_collected_is_not_private",
    ("running statistics", "privacy or aggregation"): "test_running_means_are_refused",
    ("robust aggregation", "summed states"): "test_bad_options_are_refused_in_one_line",
    ("random numbers", "clients together"): "test_an_algorithm_that_draws_trains_one_by_one",
    ("running statistics", "clients together"): "test_clients_together_may_have_constants_and_no_running_means",
    ("gradients of batches", "pipeline clients"): "test_algorithms_that_need_single_gradients_are_refused",
    ("a mean as loss", "several ranks"): "test_ranks_share_out_no_mean_of_the_models_own",
    ("norms of gradients", "trained weights"): "test_refused_where_the_count_would_not_be_the_truth",
    ("statistics over samples", "activation noise"): "test_refused_where_the_count_would_not_be_the_truth",
    ("own data", "trained weights"): "test_holders_do_not_sum_gradients_of_raw_samples_with_each_other",
    ("sites", "isthmus up"): "test_a_mistake_is_answered_in_one_line",
    ("JAX", "audit"): "test_a_run_whose_rounding_is_not_torchs_is_refused",
    ("a lost coordinator", "generation"): "test_a_service_is_predicted_also_under_faults",
    ("an option of another mode", "a mode"): "test_options_that_the_mode_does_not_read",
    ("a codec", "modes without deltas"): "test_codec_where_there_are_no_deltas",
    ("a saved state", "decoupled scripts"): "test_what_the_mode_cannot_do_is_refused",
    ("optimizers", "updates in backward"): "test_lbfgs_in_dream",
    ("closures", "updates in backward"): "test_closure_in_dream",
    ("GradScaler", "updates in backward"): "test_grad_scaler_in_dream",
    ("changed gradients", "updates in backward"): "test_clipping_in_dream",
}
"""The test that expects a refusal which takes more than a job's keys."""
UNTESTED = 37
"""So many refusals are expected by no test; fewer are welcome."""


@pytest.mark.parametrize("key", DRIVEN, ids=" + ".join)
def test_a_refused_job_gets_the_reason_of_the_table(key: tuple[str, str]) -> None:
    with pytest.raises((UserError, ValueError), match=re.escape(refusals()[key].reason)):
        DRIVEN[key]()


def test_refusals_are_driven_or_expected_by_a_test() -> None:
    table = refusals().keys()
    assert not DRIVEN.keys() & TESTED.keys() and DRIVEN.keys() | TESTED.keys() <= table
    assert [test for test in TESTED.values() if not any(test in tests for tests in known().values())] == []
    assert len(table - DRIVEN.keys() - TESTED.keys()) <= UNTESTED, sorted(table - DRIVEN.keys() - TESTED.keys())
