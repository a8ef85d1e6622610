"""A device's process: joins a coordinator, takes one stage after another as plans change, runs until halted.

Forked by a fork server, with `ProcessOptions` as its command line and the run's secret in ISTHMUS_RUN. It ends when its
standard input closes, which happens whenever its parent process dies. If the device may hold several stages of a plan,
each stage has its own thread. If one fails, all end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
import torch

from isthmus.copies import end_with_parent
from isthmus.errors import InternalError, IsthmusError, PeerError
from isthmus.plans.plan import worker_id
from isthmus.runtime.decoupled.device_replica import serve_replica
from isthmus.runtime.device.device import DeviceWorker
from isthmus.runtime.device.peer_connections import Endpoint
from isthmus.runtime.device.tasklets import ComputeTurns
from isthmus.runtime.federated.executor import serve_executor
from isthmus.runtime.identity import Identity
from isthmus.runtime.processes.memory import limit_memory
from isthmus.runtime.processes.place import DevicePlace, ProcessOptions
from isthmus.session.session import in_one_line


def main(arguments: Sequence[str]) -> None:
    """The process's life, by its command line. It must end by `os._exit`, as links still receive tensors then."""
    (text,) = arguments
    options = ProcessOptions.decoded(text)
    place = options.place
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's to handle: it saves, then halts us
    threading.Thread(target=end_with_parent, args=(0,), name="parent_pipe", daemon=True).start()
    if place.memory_bytes is not None and place.accelerator == "cpu":  # a driver maps more than it uses
        limit_memory(place.memory_bytes // place.local_ranks)
    host, _, port = options.coordinator.rpartition(":")
    site = Endpoint(
        device=options.device,
        identity=Identity(place.identity) if place.identity is not None else None,
        **{name: getattr(place, name) for name in DevicePlace.__struct_fields__},
    )
    run, timeout_s = os.environ.get("ISTHMUS_RUN", ""), options.timeout_s
    at, serve = (host, int(port)), _SERVE[options.role]
    first, *others = (
        partial(_work, s, partial(serve, at, s, run, timeout_s)) for s in worker_ids(site, options.stages)
    )
    further = [threading.Thread(target=_end_with_error, args=(work,), daemon=True) for work in others]
    for thread in further:
        thread.start()
    if code := first():
        sys.exit(code)
    for thread in further:
        thread.join()


def worker_ids(site: Endpoint, stages: int) -> list[Endpoint]:
    """The same device for each of so many stages."""
    if stages == 1:
        return [site]
    sharing = ComputeTurns()
    return [msgspec.structs.replace(site, device=worker_id(site.device, n), sharing=sharing) for n in range(stages)]


def _serve_stages(coordinator: tuple[str, int], site: Endpoint, run: str, timeout_s: float) -> None:
    DeviceWorker(coordinator, site, run, timeout_s).work()


_SERVE: Mapping[str, Callable[[tuple[str, int], Endpoint, str, float], None]] = {
    "stage": _serve_stages,
    "replica": serve_replica,
    "executor": serve_executor,
}


def _work(site: Endpoint, serve: Callable[[], None]) -> int:
    """To the end of the run; returns the exit code."""
    try:
        serve()
    except IsthmusError as e:
        print(f"device {site.device}: {e}", file=sys.stderr)
        return e.exit_code
    except torch.AcceleratorError as e:
        print(f"device {site.device}: {site.accelerator} failed: {in_one_line(e)}", file=sys.stderr)
        return PeerError.exit_code
    except Exception:
        traceback.print_exc()
        return InternalError.exit_code
    return 0


def _end_with_error(work: Callable[[], int]) -> None:
    """End the process if one stage fails: the others of the device are lost with it."""
    if code := work():
        sys.stderr.flush()
        os._exit(code)
