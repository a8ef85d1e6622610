"""The page of `isthmus dashboard` beside a run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from importlib.util import find_spec
from pathlib import Path

from isthmus.errors import UserError
from isthmus.extensions import EXTRAS, what_is_missing
from isthmus.listening import listening_socket

PORT = 7434
NICE = 10  # the page gives way to those that train


@contextlib.contextmanager
def page_beside(folder: Path | None, note: Callable[[str], None], *, fleet: bool = False) -> Generator[None]:
    """The page of a run's folder, or with `fleet` of a fleet's state folder, while the block works; None: no page.

    `note` gets the address. The page is a process of its own that reads the folder, so a run neither waits for it nor
    ends with it. UserError where the libraries of the extra `dashboard` are missing, or no port can be opened.
    """
    if folder is None:
        yield
        return
    for module in (module for module, extra in EXTRAS.items() if extra == "dashboard"):
        if find_spec(module) is None:
            raise UserError(what_is_missing("the dashboard", ModuleNotFoundError(name=module)))
    try:
        listener = listening_socket("127.0.0.1", PORT)
    except UserError:  # another run's page is there
        listener = listening_socket("127.0.0.1", 0)
    with listener:
        shown = f"--fleet={folder}" if fleet else str(folder)
        page = subprocess.Popen(
            [sys.executable, "-m", "isthmus.dashboard", str(listener.fileno()), shown],
            stdin=subprocess.PIPE,  # the page ends when this closes, also of a run that is killed
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C is for the run
        )
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, page.pid, NICE)
        note(f"dashboard: http://127.0.0.1:{listener.getsockname()[1]}/")
    with page:
        try:
            yield
        finally:
            page.terminate()
