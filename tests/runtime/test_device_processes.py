"""Device processes are forked from one that has imported what they need, and end with whoever started them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from isthmus.runtime.processes.device_processes import DeviceProcesses, ProcessPlace
from isthmus.runtime.processes.fork_server import safe_path
from isthmus.runtime.transport.listener import Listener
from tests.interpreters import script
from tests.tiers import represented_by

from .commands import devices_of, is_running, wait_until


@pytest.fixture
def address() -> Generator[str]:
    """Somebody who takes connections and says nothing: devices wait for it."""
    listener = Listener("127.0.0.1", timeout_s=60.0)
    listener.start(lambda *_: time.sleep(60))
    yield f"127.0.0.1:{listener.port}"
    listener.close()


def started(address: str, tmp_path: Path, *devices: str) -> tuple[DeviceProcesses, dict[str, int]]:
    launcher = DeviceProcesses(address, "run", logs=tmp_path / "logs")
    for device in devices:
        launcher.start(device, ProcessPlace())
    wait_until(lambda: len(devices_of(os.getpid())) == len(devices))
    return launcher, devices_of(os.getpid())


def test_they_run_until_they_are_ended(address: str, tmp_path: Path) -> None:
    launcher, pids = started(address, tmp_path, "oslo", "new york/1")
    assert set(pids) == {"oslo", "new york/1"}
    assert launcher.running("oslo") and launcher.started("oslo") and not launcher.started("rome")
    assert {os.getpgid(pid) for pid in pids.values()} == set(pids.values()), "process groups of their own"
    launcher.end(halted=False)
    wait_until(lambda: not any(is_running(pid) for pid in pids.values()))


def test_how_they_ended_is_told_and_they_can_be_started_again(address: str, tmp_path: Path) -> None:
    launcher, pids = started(address, tmp_path, "oslo", "rome")
    os.kill(pids["oslo"], signal.SIGKILL)
    wait_until(launcher.ended)
    assert launcher.ended() == {"oslo": "its process was killed by SIGKILL"}
    assert not launcher.running("oslo") and launcher.running("rome")
    launcher.start("oslo", ProcessPlace())
    wait_until(lambda: len(devices_of(os.getpid())) == 2)
    assert launcher.ended() == {} and devices_of(os.getpid())["rome"] == pids["rome"]
    launcher.end(halted=False)


def test_an_error_is_in_its_log(tmp_path: Path) -> None:
    with DeviceProcesses("127.0.0.1:9", "run", timeout_s=0.2, logs=tmp_path / "logs") as launcher:
        launcher.start("oslo", ProcessPlace())
        wait_until(launcher.ended)
        log = tmp_path / "logs" / "oslo.log"
        assert launcher.ended() == {"oslo": f"its process ended with code 4, see {log}"}
        assert log.read_text().startswith("device oslo: ")


def test_a_place_that_cannot_be_entered(tmp_path: Path) -> None:
    with DeviceProcesses("127.0.0.1:9", "run", logs=tmp_path / "logs") as launcher:
        launcher.start("oslo", ProcessPlace(prefix=("sh", "-c", "echo no such place >&2; exit 3", "sh")))
        wait_until(launcher.ended)
        assert launcher.ended()["oslo"].startswith("its process ended with code 3")
        assert "no such place" in (tmp_path / "logs" / "oslo.log").read_text()


def test_when_the_forking_process_is_killed_its_devices_end(address: str, tmp_path: Path) -> None:
    launcher, pids = started(address, tmp_path, "oslo")
    stat = Path(f"/proc/{pids['oslo']}/stat").read_text()
    os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
    wait_until(lambda: launcher.ended() == {"oslo": "its process was killed by SIGKILL"})
    wait_until(lambda: not is_running(pids["oslo"]))
    launcher.start("rome", ProcessPlace())
    wait_until(lambda: "rome" in devices_of(os.getpid()))
    assert launcher.running("rome") and not launcher.running("oslo")
    launcher.end(halted=False)


LAUNCHED = """
import os, sys, threading, time
from pathlib import Path
from isthmus.runtime.processes.device_processes import DeviceProcesses, ProcessPlace, fork_before_threads

def children():
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()

def run(*devices):
    launcher = DeviceProcesses(sys.argv[1], "run", logs=Path(sys.argv[2]))
    for device in devices:
        launcher.start(device, ProcessPlace())
    while not all(child.lives() for child in launcher._children.values()):
        time.sleep(0.01)
    return launcher

if sys.argv[3] == "early":
    with_thread = threading.Thread(target=time.sleep, args=(0.2,))
    with_thread.start()
    fork_before_threads()
    assert not children(), "a lock of the thread could stay locked in the copy"
    with_thread.join()
    fork_before_threads()
    (early,) = children()
    run("rome").end(halted=False)
    first, second = run("bern"), run("paris")
    assert len(children()) == 2, "one run at a time is served by the copy"
    first.end(halted=False)
    second.end(halted=False)
    os.environ["OTHER"] = "environment"
    run("kyiv").end(halted=False)
    assert children() == [early], "it stays, and those of the others have ended"
    del os.environ["OTHER"]
run("oslo")
time.sleep(60)
"""


@pytest.mark.parametrize("fork_server_is", represented_by(["early", "its own interpreter"], "early"))
@pytest.mark.long
def test_they_end_with_a_launcher_that_is_killed(address: str, tmp_path: Path, fork_server_is: str) -> None:
    arguments = [address, str(tmp_path), fork_server_is]
    with subprocess.Popen([*script(LAUNCHED, tmp_path), *arguments]) as parent:
        wait_until(lambda: parent.poll() is not None or "oslo" in devices_of(parent.pid))
        pid = devices_of(parent.pid)["oslo"]
        parent.kill()
    wait_until(lambda: not is_running(pid))


def test_a_copy_for_a_fleet_imports_nothing_from_the_folder_where_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/other")
    assert safe_path([str(tmp_path), "", "/lib", ".", str(tmp_path / "lib")]) == ["/lib", str(tmp_path / "lib")]
    monkeypatch.setenv("PYTHONPATH", f"/other:{tmp_path}")
    assert safe_path([str(tmp_path), "", "/lib"]) == [str(tmp_path), "/lib"], "its owner names the folder"
