"""Replicas over slow links, for scripts that torchrun starts.

sync = isthmus.sync.attach(model, optimizer, mode="local", period=5)
...
loss.backward()
sync.step()
"""

from isthmus.extensions import what_is_missing

try:
    from isthmus.cost import Decoupled
    from isthmus.sync.attach import attach, mode_names
    from isthmus.sync.options import Options
    from isthmus.sync.sync import Sync, SyncStatistics, load_worker, save_worker
    from isthmus.training.compression import DeltaCodec
except ModuleNotFoundError as e:
    missing = what_is_missing("isthmus.sync", e)
    if missing is None:
        raise
    raise ModuleNotFoundError(missing, name=e.name) from e

__all__ = [
    "Decoupled",
    "DeltaCodec",
    "Options",
    "Sync",
    "SyncStatistics",
    "attach",
    "load_worker",
    "mode_names",
    "save_worker",
]
