"""The plain package without its extras, and a system without POSIX: one line says what a command needs."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from isthmus.cli.app import commands, refuse_system
from isthmus.errors import UserError
from isthmus.extensions import EXTRAS, POSIX, TESTING, import_extra

WITHOUT = """
import contextlib, io, json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

blocked, lines = json.loads(sys.argv[1])
sys.meta_path.insert(0, Blocked())
from isthmus.cli import main
for words in lines:
    sys.argv, code, told = ["isthmus", *words], None, io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        try:
            main()
        except SystemExit as e:
            code = e.code
    print(json.dumps([code, told.getvalue()]))
"""
"""What commands say where modules cannot be imported; one process for all."""
LIBRARY = """
import sys
sys.modules["torch"] = None
try:
    import isthmus.sync
except ModuleNotFoundError as e:
    print(e)
"""
PACKAGES = {"PIL": "pillow", "sklearn": "scikit-learn"}
PACKAGES |= {"dp_accounting": "dp-accounting", "sse_starlette": "sse-starlette"}
PACKAGES |= {"mlflow": "mlflow-skinny", "prometheus_client": "prometheus-client"}
JOB = """
name = "small"
[model]
name = "mlp"
[data]
kind = "digits"
[training]
steps = 1
batch_size = 8
[[optimizer]]
name = "sgd"
lr = 0.1
"""


def said(blocked: list[str], lines: list[list[str]]) -> list[tuple[int, str]]:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, json.dumps([blocked, lines])],
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
        check=True,
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def _arguments(command: str, folder: Path) -> list[str]:
    job = str(folder / "job.toml")
    given = {
        "plan": [job],
        "simulate": [job],
        "train": [job],
        "submit": [job],
        "trace": ["run"],
        "export": ["run", "to"],
        "audit": ["run", "--step", "1"],
        "calibrate": ["run"],
        "logs": ["1"],
        "stop": ["1"],
        "resume": ["1"],
        "drain": ["desk"],
        "probe": ["a", "b"],
        "dashboard": [str(folder)],
    }
    return [command, *given.get(command, [])]


def test_every_command_without_any_extra(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    plain = {"init", "example", "fleets", "planners"}
    names = [name for name in commands() if name not in (*plain, "doctor")]
    state = {"jobs", "status", "logs", "stop", "resume", "devices", "drain", "ticket", "submit", "serve", "probe"}
    (tmp_path / "roster.sqlite").touch()
    lines = [
        [*_arguments(name, tmp_path), *(["--state", str(tmp_path)] if name in state | {"join"} else [])]
        for name in names
    ]
    for name, (code, told) in zip(names, said(sorted(EXTRAS), lines), strict=True):
        assert code == 2 and "Traceback" not in told and "internal" not in told, (name, code, told)
        needs = re.fullmatch(r"error: isthmus (\w+) needs (\w+): pip install '.\[(\w+)\]' in a checkout .*\n", told)
        assert needs or "run" in told or "--" in told or "Missing argument" in told, (name, told)
        if needs:
            assert needs[1] == name and EXTRAS[needs[2]] == needs[3]
    written = {"init": [str(tmp_path / "first")]}
    for code, told in said(sorted(EXTRAS), [[name, *written.get(name, [])] for name in sorted(plain)]):
        assert code == 0 and told


def test_every_command_has_its_help_without_any_extra() -> None:
    names = list(commands())
    for name, (code, told) in zip(names, said(sorted(EXTRAS), [[n, "--help"] for n in names]), strict=True):
        assert code == 0 and f"isthmus {name}" in told and "--help" in told and "pip install" not in told, (name, told)


def test_the_doctor_says_it_too(tmp_path: Path) -> None:
    ((code, told),) = said(sorted(EXTRAS), [["doctor", "--json", "--state", str(tmp_path / "new")]])
    broken = {f["hop"]: f["remedy"] for f in json.loads(told) if not f["good"]}
    assert code == 1 and broken.keys() == {name for name, extra in EXTRAS.items() if extra == "train"} - {"sympy"}
    assert all("pip install '.[train]'" in remedy for remedy in broken.values())


def test_commands_on_a_system_without_posix(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    lines = [["serve", "--port", "0", "--state", str(tmp_path / "fleet")], ["train", str(tmp_path / "job.toml")]]
    for words, (code, told) in zip(lines, said(sorted(POSIX - {"posix"}), lines), strict=True):
        assert code == 2 and told.splitlines()[-1].startswith(f"error: isthmus {words[0]} needs Linux"), told
    for name, system in itertools.product(("train", "serve", "join", "ticket"), ("win32", "darwin")):
        with pytest.raises(UserError, match=f"isthmus {name} needs Linux"):
            refuse_system([name], system)
    for words in (["plan"], ["doctor"], ["--help"], []):
        refuse_system(words, "darwin")
    refuse_system(["train"], "linux")


@pytest.mark.long
def test_a_job_on_the_emulated_accelerator_without_it(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    ((code, told),) = said([TESTING], [["train", str(tmp_path / "job.toml"), "--set", "runtime.device=checked"]])
    needs = "runtime.device: 'checked' needs isthmus_testing: pip install ./testing in a checkout of isthmus"
    assert (code, told.splitlines()[-1]) == (2, f"error: {needs}")


def test_a_library_that_is_imported_by_a_script() -> None:
    done = subprocess.run([sys.executable, "-c", LIBRARY], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "isthmus.sync needs torch: pip install '.[train]' in a checkout of isthmus\n"


def test_each_module_is_in_the_extra_that_is_named() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = {
        name: {re.split("[<>=]", package)[0] for package in packages}
        for name, packages in project["optional-dependencies"].items()
        if name not in ("dev", "docs", "browser")
    }
    named = {(extra, PACKAGES.get(module, module)) for module, extra in EXTRAS.items() if module != "sympy"}
    assert named == {(extra, package) for extra, packages in extras.items() for package in packages}
    for module, extra in EXTRAS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with pytest.raises(UserError, match=rf"the job needs {module}: pip install '.\[{extra}\]'"):
                import_extra(module, "the job")
