"""The process that agents of this machine are forked from: it has imported what `isthmus join` needs.

So a hundred agents import torch once, and share its memory.
"""

from __future__ import annotations

import importlib
import runpy
import signal
import sys

from isthmus.runtime.processes.fork_server import SpawnRequest, serve_forks

IMPORTED = ("isthmus.cli.app", "isthmus.api.join")


def main() -> None:
    """Until the launcher at the other end of standard input is gone."""
    for module in IMPORTED:
        importlib.import_module(module)
    serve_forks(_join, "isthmus agents")


def _join(request: SpawnRequest) -> None:
    """Join as `python -m isthmus join ...` does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["isthmus", *request.arguments]
    runpy.run_module("isthmus", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
