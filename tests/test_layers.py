"""What may be imported where, and what each package exports."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import isthmus

WITHOUT_TORCH = ["planners", "simulator", "fleet", "plan", "cost", "protocol", "trace", "units", "graph", "errors"]

PUBLIC = {
    "cli": "app main",
    "cost": "EdgeTime Layout OPTIMIZER_TENSORS ParameterState Pipeline Placement Price Problem build_plan "
    "build_replicas in_flight_limits parameter_state place step_price with_edges",
    "data": "ColumnSpec DataSpec Dataset SampleOrder Split dataset_kinds load_dataset",
    "fleet": "Device Fleet Link LinkTrace Links Route Site describe dump_fleet load_fleet parse_fleet resolve_fleet "
    "topology topology_names",
    "graph": "Affine Crossing Cut Flow Op OpGraph Ref StageGraph TensorSpec assign cuts decode encode partition",
    "models": "CNN CNNConfig GPT GPTConfig MLP MLPConfig ModelSpec UNet UNetConfig as_eager build_model "
    "is_hugging_face model_names save_hugging_face",
    "plan": "Certificate Compression Edge Plan Prediction Replica SCHEDULES Schedule SharedParameter Stage StageMemory "
    "SyncGroup SyncIteration SyncPlan SyncWorker Tasklet classic_in_flight load_plan save_plan",
    "planners": "ENTRY_POINTS Planner describe plan planner_names",
    "protocol": "Coordinator Item RunSpec StageView Worker items",
    "report": "ComparisonSummary DeviceUse LinkUse PlanSummary Progress StageSummary Transfer comparison_summary "
    "comparison_table draw_loss draw_timeline fleet_table plan_summary plan_table planners_table prediction_error "
    "topologies_table",
    "simulator": "Fault Overheads SimulatedRun SimulationOptions Transmission Uplink Wire simulate simulate_run",
    "training": "Engine EngineConfig LearningRate OptimizerConfig TorchEngine latest_checkpoint load_checkpoint "
    "plain_loss plain_step plain_update read_tensors",
    "runtime": "",
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


@pytest.mark.parametrize("package", PUBLIC)
def test_the_public_names(package: str) -> None:
    module = importlib.import_module(f"isthmus.{package}")
    assert sorted(getattr(module, "__all__", [])) == sorted(PUBLIC[package].split())
    assert all(hasattr(module, name) for name in PUBLIC[package].split())


def test_every_package_is_listed() -> None:
    found = {module.name for module in pkgutil.iter_modules(isthmus.__path__) if module.ispkg}
    assert found == PUBLIC.keys()
