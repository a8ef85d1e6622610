"""A command imports what it needs, when it is called."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from isthmus.cli.app import app, app_for, commands

HEAVY = (
    "torch",
    "transformers",
    "datasets",
    "pyarrow",
    "safetensors",
    "sklearn",
    "scipy",
    "networkx",
    "matplotlib",
    "numpy",
    "highspy",
    "opacus",
)
LIGHT = ["isthmus.api.states", "isthmus.api.stop"]
"""All that a help text needs of the application."""

CALLED = """
import contextlib, io, json, sys
from isthmus.cli import main
found = {}
for words in json.loads(sys.argv[1]):
    sys.argv = ["isthmus", *words]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main()
    found[words[0]] = sorted(sys.modules)
print(json.dumps(found))
"""
"""One process for all: what one command imports is still there at the next."""
IMPORTED = """
import json, sys
import isthmus.api.job_overrides, isthmus.api.serve, isthmus.federated.job
print(json.dumps(sorted(sys.modules)))
import isthmus.api.pipeline, isthmus.api.make_plan, isthmus.api.pipeline
print(json.dumps(sorted(sys.modules)))
"""
"""What `serve` imports before it listens; and what plans and trains, before it draws."""
WORKED = """
import sys, torch
import isthmus.runtime.device_fork_server
before = set(sys.modules)
value = torch.ones(3, requires_grad=True)
torch.autograd.grad([value * 2], [value], [torch.ones(3)], allow_unused=True)
print(*sorted(set(sys.modules) - before))
from isthmus.plans import OuterOptimizer
from isthmus.training.optim import OptimizerConfig, Optimizers, OuterStep
for name in ("sgd", "adamw"):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizers = Optimizers([OptimizerConfig(name=name, momentum=0.5 if name == "sgd" else 0.0)], {"w": parameter})
    parameter.sum().backward()
    optimizers.step()
OuterStep([torch.ones(3)], OuterOptimizer()).step([torch.ones(3)])
print(*[name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
"""
"""What a device imports in its first backward; and before its first step, and with its optimizers in it."""


def lines_of(code: str) -> list[str]:
    """What a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.splitlines()


def test_what_commands_do_not_import(tmp_path: Path) -> None:
    light = [["--help"], ["train", "--help"], ["serve", "--help"], ["nonsense"], ["ticket", "--state", str(tmp_path)]]
    light += [[name, "--state", str(tmp_path)] for name in ("jobs", "status", "logs", "stop", "resume", "devices")]
    called = [*light, ["drain", "oslo", "--state", str(tmp_path)], ["fleets"], ["planners"]]
    done = subprocess.run(
        [sys.executable, "-c", CALLED, json.dumps(called)], capture_output=True, text=True, check=True, timeout=120
    )
    found: dict[str, list[str]] = json.loads(done.stdout)
    assert [name for name in found["--help"] if name.startswith("isthmus.api.")] == LIGHT
    assert [name for name in found["train"] if name == "rich" or name.startswith("rich.")] == []
    assert {"isthmus.api.jobs"} <= set(found["drain"])
    assert [name for name in HEAVY if name in found["drain"]] == []
    torches = ("torch", "transformers", "datasets", "pyarrow", "safetensors", "sklearn")
    assert [name for name in torches if name in found["planners"]] == []


@pytest.mark.parametrize("words", [["--help"], [], ["trian"], ["train", "--help"], ["--nonsense"], ["plan"]])
def test_a_command_line_made_for_one_call_says_what_the_whole_one_says(words: list[str]) -> None:
    runner = CliRunner()
    part, whole = (runner.invoke(made, words, prog_name="isthmus") for made in (app_for(words), app))
    assert (part.output, part.exit_code) == (whole.output, whole.exit_code) and part.output


def test_no_options_are_made_of_commands_that_are_not_called() -> None:
    def options(words: list[str]) -> dict[str, int]:
        made = typer.main.get_command(app_for(words))
        return {name: len(command.params) for name, command in made.commands.items()}  # type: ignore[attr-defined]

    everything = options(["--help"])
    assert everything.keys() == commands().keys() and not any(everything.values())
    assert options(["train", "--help"]) == {"train": len(commands()["train"].params)}


def test_a_shell_that_completes_words_is_given_all_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_ISTHMUS_COMPLETE", "complete_bash")
    assert app_for([]) is app


@pytest.mark.long
def test_a_coordinator_listens_before_it_can_plan_capture_and_draw() -> None:
    """It may be started again while devices wait for it. And a picture is drawn only when it is asked for."""
    listening, planning = map(json.loads, lines_of(IMPORTED))
    assert "isthmus.runtime.service.fleet_coordinator" in listening
    late = ("matplotlib", "networkx", "scipy.optimize", "sympy", "torch._dynamo", "isthmus.graph.capture")
    assert [name for name in late if name in listening] == []
    assert "matplotlib" not in planning


def test_a_device_imports_nothing_of_torch_in_its_first_backward_and_never_torchs_compiler() -> None:
    """Every process of a run would import the one anew, and its first step would wait for that; the other takes longer
    than torch itself."""
    backward, compiler = lines_of(WORKED)
    assert backward.split() == [] and compiler.split() == []
