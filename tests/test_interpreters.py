"""A copied interpreter is as one that was started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .interpreters import Copied, processes

FACTS = """
import atexit, json, os, signal, sys

def annotated(number: int): ...

streams = sys.stdin, sys.stdout, sys.stderr
facts = {
    "module": (__name__, __file__, sys.argv, sys.path),
    "place": (os.getcwd(), {name: os.environ[name] for name in ("HOME", "OWN")}, sorted(os.listdir("/proc/self/fd"))),
    "streams": [(s.fileno(), s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty()) for s in streams],
    "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
    "annotations": str(annotated.__annotations__),
    "leads": (os.getpid() == os.getsid(0), os.getpid() == os.getpgid(0)),
    "input": sys.stdin.read(),
}
atexit.register(print, json.dumps(facts))
print("so", file=sys.stderr)
sys.exit(3)
"""


HOW = [["-m", "isthmus_facts"], ["isthmus_facts.py"]]


@pytest.fixture(params=HOW, ids=["module", "script"])
def command(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "isthmus_facts.py").write_text(FACTS)
    monkeypatch.chdir(tmp_path)
    return [sys.executable, *request.param, "a b", "--c"]


def test_it_knows_and_is_given_what_any_is(command: list[str]) -> None:
    environment = {**os.environ, "OWN": "this", "PYTHONUNBUFFERED": "1", "PYTHONPATH": "/here:/there"}
    found = list[dict[str, object]]()
    for executable in (None, sys.executable):  # with one that is named, it is no copy
        done = subprocess.run(
            command,
            executable=executable,
            input="words",
            capture_output=True,
            text=True,
            env=environment,
            start_new_session=True,
        )
        found.append({"code": done.returncode, "err": done.stderr, **json.loads(done.stdout)})
    copy, started = found
    assert copy == started
    assert copy["code"] == 3 and copy["err"] == "so\n" and copy["input"] == "words"


@pytest.mark.parametrize("command", HOW[:1], indirect=True)
def test_a_safe_one_takes_nothing_from_its_folder(command: list[str]) -> None:
    done = subprocess.run([command[0], "-P", *command[1:]], capture_output=True, text=True)
    assert done.returncode == 1 and "No module named isthmus_facts" in done.stderr


def test_it_is_waited_for_signalled_and_killed(command: list[str]) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    for number, code in ((signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)):
        with subprocess.Popen(command, **pipes) as process:
            assert isinstance(process, Copied) and process.status is not None
            found = processes()[process.pid]
            assert found == (os.getpid(), " ".join(command))
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.01)
            assert process.poll() is None
            process.send_signal(number)
        assert process.returncode == code
    assert process.pid not in processes()


def test_what_no_copy_can_be_is_started(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN", "this")
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    for asked in ({"env": {**os.environ, "PYTHONHASHSEED": other}}, {"pass_fds": [0]}):
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, **asked) as process:
            assert isinstance(process, Copied) and process.status is None
        assert process.returncode == 3
