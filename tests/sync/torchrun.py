"""torchrun on loopback, bounded in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


def torchrun(workers: int, script: Path, *arguments: str, timeout_s: float = 240.0) -> str:
    """Standard output of a script that runs in so many workers."""
    done = subprocess.run(
        _command(workers, script, arguments), env=_environment(), capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, f"ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@contextmanager
def start_torchrun(workers: int, script: Path, *arguments: str) -> Generator[subprocess.Popen[bytes]]:
    """The script while it runs. In the end torchrun is told to stop, and stops its workers."""
    process = subprocess.Popen(
        _command(workers, script, arguments), env=_environment(), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def kill_a_worker(torchrun: subprocess.Popen[bytes]) -> None:
    """As a machine that goes away: torchrun then stops the other workers and gives up."""
    workers = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    assert torchrun.wait(60) != 0


def _command(workers: int, script: Path, arguments: Sequence[str]) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
        "--nproc-per-node", str(workers), str(script), *arguments,
    ]  # fmt: skip


def _environment() -> dict[str, str]:
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(paths)
    }  # fmt: skip
