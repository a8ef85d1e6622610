"""What `import isthmus` gives."""

from __future__ import annotations

import importlib.resources
import subprocess
import sys

import isthmus

EXPECTED = (
    "Callback Device EarlyStopping Evaluated FederatedJob Fleet Job Link Observer Plan Run RunEnded "
    "RunFault RunStarted StepDone Stop Sweep Trace Track compare errors federate join plan probe serve simulate sweep "
    "sync train up verify what_if"
)
CODE = """
import sys, isthmus
assert dir(isthmus) == sorted([*isthmus.__all__, "__version__"])
heavy = {"torch", "numpy", "scipy", "msgspec", "rich", "typer", "matplotlib"}
print(sorted(heavy & {name.split(".")[0] for name in sys.modules}))
isthmus.Fleet
print("torch" in sys.modules)
"""


def test_names_are_those_that_users_need() -> None:
    assert isthmus.__all__ == EXPECTED.split()
    assert all(getattr(isthmus, name) is not None for name in isthmus.__all__)
    assert importlib.resources.files(isthmus).joinpath("py.typed").is_file()


def test_what_is_not_used_is_not_imported() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "False"]
