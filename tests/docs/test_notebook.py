"""The notebook's cells run in order. IPython need not be installed: a small module with its two functions stands in."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.interpreters import script

NOTEBOOK = Path(__file__).parents[2] / "examples" / "python" / "first-plan-and-run.ipynb"
RUNNER = """
import ast, json, sys, types

class Handle:
    def update(self, value):
        show(value)

class Image:
    def __init__(self, path):
        self.data = open(path, "rb").read()
    def _repr_html_(self):
        return f"picture {self.data[1:4].decode()}"

def show(value, **options):
    print("shown:", value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
    return Handle()

ipython, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
ipython.version_info = (9, 0)  # matplotlib asks
ipython.get_ipython = lambda: types.SimpleNamespace(kernel=True)
ipython.display, display.display, display.Image = display, show, Image
sys.modules.update({"IPython": ipython, "IPython.display": display})

names = {}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] != "code":
        continue
    tree = ast.parse("".join(cell["source"]))
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if last is not None and (value := eval(compile(ast.Expression(last.value), "cell", "eval"), names)) is not None:
        show(value)
"""


@pytest.mark.long
def test_the_notebook_runs_and_shows_tables_and_pictures(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [*script(RUNNER, tmp_path), str(NOTEBOOK)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "shown: picture PNG" in done.stdout
    assert "<td>10 of 10</td>" in done.stdout, "the live table"
    assert 'src="data:image/png;base64,' in done.stdout, "the run's pictures, inline"
    assert float(done.stdout.rsplit("weight: ", 1)[1]) < 1e-6


def test_the_notebook_is_kept_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
