"""The application: what the command line, the job queue and `isthmus` itself call.

`api.pipeline` and the other modules are imported when they are used: `from isthmus import api` costs nothing.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # as type checkers see it; each is found by `__getattr__`
    from isthmus.api import audit as audit
    from isthmus.api import consoles as consoles
    from isthmus.api import descriptions as descriptions
    from isthmus.api import doctor as doctor
    from isthmus.api import export as export
    from isthmus.api import forecast as forecast
    from isthmus.api import generation as generation
    from isthmus.api import job_overrides as job_overrides
    from isthmus.api import jobs as jobs
    from isthmus.api import join as join
    from isthmus.api import names as names
    from isthmus.api import output as output
    from isthmus.api import pipeline as pipeline
    from isthmus.api import probe as probe
    from isthmus.api import queue_simulation as queue_simulation
    from isthmus.api import run as run
    from isthmus.api import run_job as run_job
    from isthmus.api import run_session as run_session
    from isthmus.api import serve as serve
    from isthmus.api import serving_fleet as serving_fleet
    from isthmus.api import site as site
    from isthmus.api import status as status
    from isthmus.api import terminal as terminal
    from isthmus.api import up as up
    from isthmus.api import what_if as what_if


def __getattr__(name: str) -> ModuleType:
    full = f"{__name__}.{name}"
    try:
        return importlib.import_module(full)
    except ModuleNotFoundError as e:
        if e.name == full:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        raise
