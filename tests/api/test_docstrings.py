"""Examples in docstrings of the Python API run, and every public name has one."""

from __future__ import annotations

import copy
import doctest
import importlib
import inspect
import pkgutil
import shutil

import pytest
import torch
from torch.utils.data import TensorDataset

import isthmus
import isthmus.api
from tests.api.public import PUBLIC_PACKAGES
from tests.runtime.commands import write_job

MODULES = [
    *(f"isthmus.api.{module.name}" for module in pkgutil.iter_modules(isthmus.api.__path__)),
    "isthmus.cost.build_plan",
    "isthmus.federated.algorithms.algorithm",
    "isthmus.overrides",
    "isthmus.sync.attach",
    *sorted(
        {
            found.__module__
            for name in isthmus.__all__
            if hasattr(found := getattr(isthmus, name), "__module__") and not found.__module__.startswith("isthmus.api")
        }
    ),
]


@pytest.fixture(scope="session")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What examples begin with: a run and a federated run that are over, and what others are made of."""
    folder = tmp_path_factory.mktemp("examples")
    torch.manual_seed(0)
    model, loss = torch.nn.Linear(8, 1), torch.nn.functional.mse_loss
    x = torch.randn(32, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    run = isthmus.train(model=model, loss=loss, data=data, steps=4, batch=4, run=folder / "finished")
    clients = [{"input": torch.randn(8, 4), "target": torch.zeros(8, 1)} for _ in range(3)]
    federated = isthmus.federate(
        model=torch.nn.Linear(4, 1),
        loss=loss,
        clients=clients,
        test=clients[0],
        rounds=2,
        run=folder / "federated",
        overrides={"runtime.executors": 1},
    )
    return {
        "isthmus": isthmus,
        "torch": torch,
        "copy": copy,
        "model": model,
        "loss": loss,
        "data": data,
        "run": run,
        "finished": run.path,
        "interrupted": shutil.copytree(run.path, folder / "interrupted"),
        "federated": federated.path,
        "folder": folder / "train",
        "federated_folder": folder / "federate",
        "algorithm_folder": folder / "algorithm",
        "clients": [{"input": torch.randn(8, 8), "target": torch.zeros(8, 1)} for _ in range(2)],
        "job_file": write_job(folder),
    }


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, names: dict[str, object]) -> None:
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for found in doctest.DocTestFinder().find(module, extraglobs={**names}):
        runner.run(found)
    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.parametrize("package", PUBLIC_PACKAGES)
def test_public_names_say_what_they_are(package: str) -> None:
    module = importlib.import_module(package)
    assert inspect.getdoc(module)
    found = {name: getattr(module, name) for name in module.__all__}
    silent = [
        name
        for name, one in found.items()
        if (inspect.isclass(one) or inspect.isfunction(one))
        and (not one.__doc__ or one.__doc__.startswith(f"{name}("))  # dataclasses and named tuples make such a text
    ]
    assert silent == [], f"{package}: without a docstring"


def test_members_of_the_packages_names_say_what_they_are() -> None:
    silent: list[str] = []
    for name in isthmus.__all__:
        if inspect.isclass(found := getattr(isthmus, name)):
            members = {key: value for key, value in vars(found).items() if not key.startswith("_")}
            calls = {k: v for k, v in members.items() if isinstance(v, property | classmethod) or inspect.isfunction(v)}
            silent += [f"{name}.{key}" for key, call in calls.items() if not call.__doc__]
    assert silent == []


def test_names_of_the_package_have_an_example() -> None:
    found = {name: getattr(isthmus, name) for name in isthmus.__all__}
    bare = [name for name, one in found.items() if not inspect.ismodule(one) and ">>>" not in (one.__doc__ or "")]
    assert bare == []
