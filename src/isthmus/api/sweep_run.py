"""One run of a sweep, as a process: `python -m isthmus.api.sweep_run`. It ends when its standard input closes.

What it is to do comes as one line of JSON on standard input; its progress goes to standard output.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import msgspec

from isthmus.api.sweep import Task
from isthmus.api.terminal import logged
from isthmus.api.training import train
from isthmus.api.up import HowUp, up
from isthmus.copies import end_with_parent
from isthmus.errors import Interrupted, IsthmusError
from isthmus.runtime.processes.signals import terminable


def carry_out(task: Task) -> str:
    """The run's outcome: done, or interrupted with what it has saved."""
    folder, observer = Path(task.folder), logged(sys.stdout)
    engine = task.engine
    if engine is not None:
        how = HowUp(options=engine.options)
        if engine.nodes is not None:
            how["nodes"] = engine.nodes
        run = up(
            task.job, engine.on, run=folder, resume=task.resume, overrides=task.overrides, observer=observer, **how
        )
    else:
        run = train(task.job, run=folder, resume=task.resume, overrides=task.overrides, observer=observer)
    return run.outcome


def main() -> int:
    """The exit code: 0, 130 for an interrupted run, or that of the error."""
    with open(0, "rb", buffering=0, closefd=False) as pipe:  # no buffer: the thread reads on from there
        task = msgspec.json.decode(pipe.readline(), type=Task)
    threading.Thread(target=end_with_parent, args=(0,), name="parent_pipe", daemon=True).start()
    try:
        with terminable():
            return 130 if carry_out(task) == "interrupted" else 0
    except (Interrupted, KeyboardInterrupt) as e:
        print(e or "interrupted")
        return 130
    except IsthmusError as e:
        print(f"error: {e}")
        return e.exit_code


if __name__ == "__main__":
    sys.exit(main())
