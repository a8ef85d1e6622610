"""Isthmus trains one model on machines that are far apart, unequal, and joined by slow links.

    run = isthmus.train("examples/gpt-stdlib.toml")
    plan = isthmus.plan(model, fleet, inputs=example)
    trace = isthmus.simulate(plan, fleet)

Names are imported when they are used: `import isthmus` needs no torch. The packages, from the top: `cli`,
`dashboard`, `api`, `report`, `simulator` and `runtime`, `job`, `training`, `models`, `data`, `protocol`, `planners`,
`cost`, `plans`, `graph`, `fleet`. See ARCHITECTURE.md.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus import errors, sync
    from isthmus.api.join import join
    from isthmus.api.observer import Observer
    from isthmus.api.plan import compare, plan, simulate, verify
    from isthmus.api.probe import probe
    from isthmus.api.run import Run
    from isthmus.api.serve import serve
    from isthmus.api.sweep import Sweep, sweep
    from isthmus.api.training import federate, train
    from isthmus.api.up import up
    from isthmus.api.what_if import what_if
    from isthmus.callbacks import Callback, EarlyStopping, Evaluated, RunEnded, RunFault, RunStarted, StepDone
    from isthmus.federated.job import FederatedJob
    from isthmus.fleet import Device, Fleet, Link
    from isthmus.job import Job
    from isthmus.plans import Plan
    from isthmus.runtime.processes.signals import Stop
    from isthmus.trace import Trace
    from isthmus.trackers import Track

__version__ = "0.1.0"

_NAMES = {  # names by module; one that is named like its module is the module
    "isthmus.api.join": "join",
    "isthmus.api.observer": "Observer",
    "isthmus.api.plan": "compare plan simulate verify",
    "isthmus.api.probe": "probe",
    "isthmus.api.run": "Run",
    "isthmus.api.serve": "serve",
    "isthmus.api.sweep": "Sweep sweep",
    "isthmus.api.training": "federate train",
    "isthmus.api.up": "up",
    "isthmus.api.what_if": "what_if",
    "isthmus.callbacks": "Callback EarlyStopping Evaluated RunEnded RunFault RunStarted StepDone",
    "isthmus.errors": "errors",
    "isthmus.federated.job": "FederatedJob",
    "isthmus.fleet": "Device Fleet Link",
    "isthmus.job": "Job",
    "isthmus.plans": "Plan",
    "isthmus.runtime.processes.signals": "Stop",
    "isthmus.sync": "sync",
    "isthmus.trace": "Trace",
    "isthmus.trackers": "Track",
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "Callback",
    "Device",
    "EarlyStopping",
    "Evaluated",
    "FederatedJob",
    "Fleet",
    "Job",
    "Link",
    "Observer",
    "Plan",
    "Run",
    "RunEnded",
    "RunFault",
    "RunStarted",
    "StepDone",
    "Stop",
    "Sweep",
    "Trace",
    "Track",
    "compare",
    "errors",
    "federate",
    "join",
    "plan",
    "probe",
    "serve",
    "simulate",
    "sweep",
    "sync",
    "train",
    "up",
    "verify",
    "what_if",
]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_WHERE[name])
    found = module if _WHERE[name] == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
