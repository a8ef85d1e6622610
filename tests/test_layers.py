"""What may be imported where, and what each package exports."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import isthmus

MACHINES_IMPORT = {
    *("__future__", "collections", "dataclasses", "hashlib", "heapq", "itertools", "math", "msgspec", "numpy"),
    *("statistics", "typing", "isthmus.errors", "isthmus.fleet", "isthmus.planners", "isthmus.plans"),
    *("isthmus.programs", "isthmus.protocol", "isthmus.rng", "isthmus.session", "isthmus.trace", "isthmus.units"),
    "isthmus.wire_types",
}

WITHOUT_TORCH = [
    "planners",
    "verification",
    "simulator",
    "fleet",
    "plans",
    "cost",
    "protocol",
    "programs.tokens",
    "session.program",
    "trace",
    "units",
    "graph",
    "errors",
    "rng",
    "data.partition",
    "data.femnist",
]

PUBLIC = {
    "accelerators": (
        "AUTO Accelerator DeviceEvent HOST MemoryUse Stream accelerator_names open_accelerator resolve_accelerator"
    ),
    "api": "",
    "callbacks": (
        "Callback CallbackConfig Callbacks EarlyStopping Evaluated RunEnded RunFault RunStarted StepDone "
        "build_callback check_callback find_callback"
    ),
    "cli": "app main",
    "cost": (
        "Decoupled EdgeTime MemoryRoom OPTIMIZER_TENSORS ParameterState PipelineTime Placement PlanLayout Price "
        "Problem SyncPolicy broken_constraint build_again build_plan build_replicas in_flight_limits is_priced "
        "layouts_of parameter_state place plan_compression preference repeat_compression step_price "
        "with_edges with_sync"
    ),
    "federated": (
        "Algorithm AlgorithmSpec ClientTrainer ClientUpdate Cohort Combine Commits LocalConfig LocalTrainer "
        "Pass RunIdentity Server StateForm StateStore TrainingTask Values algorithm_names describe_algorithm "
        "load_algorithm"
    ),
    "dashboard": "",
    "endpoint": "",
    "data": (
        "ColumnSpec DataSpec Dataset JoinedDataset JoinedOrder SampleOrder Split batch_at dataset_kinds "
        "describe_dataset load_dataset sample_order"
    ),
    "fleet": (
        "Device Fleet FleetChange Link LinkTrace Links Measurement RANDOM Region Route changed corrected "
        "built_in_fleet built_in_names describe dump_fleet in_half load_fleet parse_fleet resolve_fleet with_memory"
    ),
    "graph": "Affine Crossing Cut Flow Op OpGraph Ref StageGraph TensorSpec assign cuts decode encode partition",
    "job": (
        "Job JobDocument JobReader PIPELINE PlanConfig Prepared PrivacyConfig RuntimeConfig TrainingConfig checked "
        "constraints_of described_here described_in fleet_of keep_prepared kept_prepared load_job prepare "
        "prepared_again"
    ),
    "models": (
        "Bottleneck BoundaryOptions CNN CNNConfig GPT GPTConfig LoraOptions MLP MLPConfig ModelSpec UNet UNetConfig "
        "as_eager base_of build_model describe_model has_bottlenecks has_subspace is_hugging_face is_peft merged "
        "model_names model_on_meta save_adapter save_hugging_face summarize_model taken_off widened"
    ),
    "plans": (
        "ANY_PLAN Averages CHOICES Certificate Collective Compression CompressionConfig Constraints "
        "Edge LackingOperators Objective OuterOptimizer OwnSamples Packing Plan PlanPeriod Prediction Replica "
        "ReplicaSync SCHEDULES Schedule SharedParameter Stage StageMemory SyncGroup "
        "SyncIteration SyncPlan SyncWorker bounded_plans classic_in_flight load_plan "
        "question_in_words save_plan schedule_of"
    ),
    "planners": (
        "ABILITIES Capabilities ENTRY_POINTS INTERRUPTED Planner SearchObserver SearchStopped abilities "
        "capabilities "
        "check_constraints check_planner cut_short describe keep legal_places looked_at observed_by over_counts "
        "plan planner_names scheduled whole_replicas"
    ),
    "programs": "",
    "session": "",
    "protocol": "Item Lineage RunSpec StageView StateHolding StateLayout Worker items",
    "report": (
        "ComparedPlan Comparison ComparisonSummary DeviceMemoryUse DeviceUse Explanation Headroom Improvement "
        "LinkUse PlanComparison PlanSummary PlanningProgress Progress StageSummary Transfer compared_table "
        "comparison_summary comparison_table draw_faults draw_loss draw_plan draw_timeline during explain "
        "explanation_text improvements last_period least_headroom memory_table memory_use "
        "plan_summary plan_table planners_table prediction_error ranked run_summary "
        "fleets_table linked_devices verdict_table what_if_table WhatIf WhatIfRow"
    ),
    "simulator": (
        "Fault Overheads RecoveryTimes SimulatedRun SimulationOptions Transmission Uplink Wire simulate simulate_run"
    ),
    "stores": (
        "OWNER Owner RemoteStoreError Store StoreConfig StoreFile Uploader commits_in commits_of hub_silence "
        "is_document is_url newest_first number_of read_owner"
    ),
    "sync": "Decoupled DeltaCodec Options Sync SyncStatistics attach load_worker mode_names save_worker",
    "trackers": (
        "ID_FILE Track TrackedRun Tracker TrackerCallback check_trackers describe_tracker tracker_builders "
        "tracker_names tracker_options"
    ),
    "training": (
        "Engine EngineConfig LearningRate OptimizerConfig TorchEngine latest_checkpoint load_checkpoint read_tensors"
    ),
    "runtime": "",
    "verification": (
        "BoundCheck Difference ProofProgress Prover Question StateBytes Until Verdict asked_in_words is_priced "
        "state_bytes unproven verify"
    ),
}
"""What people may rely on: a change here is a change of the public API."""


def test_planning_and_simulating_need_no_torch() -> None:
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'safetensors', 'transformers', 'asyncio'):\n"
        "            raise ImportError(f'{name} is not to be imported here')\n"
        "sys.meta_path.insert(0, Refuse())\n"
        f"import importlib\nfor name in {WITHOUT_TORCH}: importlib.import_module('isthmus.' + name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_verifying_loads_neither_planners_nor_the_cost_model() -> None:
    code = (
        "import sys, isthmus.verification\n"
        "print([m for m in sys.modules if m.startswith(('isthmus.planners', 'isthmus.cost'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize("package", PUBLIC)
def test_the_public_names(package: str) -> None:
    module = importlib.import_module(f"isthmus.{package}")
    assert sorted(getattr(module, "__all__", [])) == sorted(PUBLIC[package].split())
    assert all(hasattr(module, name) for name in PUBLIC[package].split())


def test_every_package_is_listed() -> None:
    found = {module.name for module in pkgutil.iter_modules(isthmus.__path__) if module.ispkg}
    assert found == PUBLIC.keys()


def test_state_machines_import_only_what_computes() -> None:
    """`make check` refuses clocks, sockets, threads and torch by name; this, whatever else is no computation."""
    found = {
        name
        for package in ("protocol", "programs", "session")
        for file in (Path(isthmus.__file__).parent / package).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        for name in _imported(node)
    }
    assert found - MACHINES_IMPORT == set()


def _imported(node: ast.AST) -> list[str]:
    """A package of ours by its name, any other by its first part."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "isthmus" else [node.module]
    else:
        return []
    return [".".join(name.split(".")[: 2 if name.startswith("isthmus.") else 1]) for name in names if name]
