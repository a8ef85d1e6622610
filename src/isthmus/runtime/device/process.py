"""A device's process: joins a coordinator, takes one stage after another as plans change, runs until halted.

Forked by a fork server, with the command line `--coordinator HOST:PORT --device NAME` and the run's secret in
ISTHMUS_RUN.
With `--parent-pipe` it ends when its standard input closes, which happens whenever its parent process dies. If the
device may hold several stages of a plan (`--stages`), each stage has its own thread. If one fails, all end.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch

from isthmus.engines import ENGINES
from isthmus.errors import InternalError, IsthmusError, PeerError
from isthmus.plans.plan import worker_id
from isthmus.runtime.decoupled.joined import serve_joined
from isthmus.runtime.device.device import DeviceWorker
from isthmus.runtime.device.peer_connections import Endpoint
from isthmus.runtime.device.tasklets import ComputeTurns
from isthmus.runtime.identity import Identity
from isthmus.runtime.processes.children import end_with_parent
from isthmus.runtime.processes.memory import limit_memory
from isthmus.session.failures import in_one_line


def main(arguments: Sequence[str]) -> None:
    """The process's life, by its command line. It must end by `os._exit`, as links still receive tensors then."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinator", required=True, metavar="HOST:PORT")
    parser.add_argument("--device", required=True)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on for other devices")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes any")
    parser.add_argument("--address", default="", help="how others reach it, where that is not the host")
    parser.add_argument(
        "--identity", type=Path, metavar="DIR", help="use TLS with the key and certificate in this folder"
    )
    parser.add_argument("--trusted-network", action="store_true", help="use plain TCP beyond loopback")
    parser.add_argument("--relayed", action="store_true", help="other devices connect through the coordinator's relay")
    parser.add_argument("--island", type=Path, metavar="DIR", help="folder where the ranks of this device meet")
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks, this one included")
    parser.add_argument("--sharded", action="store_true", help="each rank holds a part of a stage's weights")
    parser.add_argument("--accelerator", default="cpu", help="where it computes: cpu, cuda:0, ...")
    parser.add_argument("--engine", choices=ENGINES, default="torch", help="what computes its stages")
    parser.add_argument("--data-kind", action="append", help="a kind of data that may be read; without it all may")
    parser.add_argument("--memory", type=int, metavar="BYTES", help="what this process may take; without it any amount")
    parser.add_argument("--stages", type=int, default=1, help="how many stages it may get at once")
    parser.add_argument("--replica", action="store_true", help="train the whole model, and have its changes merged")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds of silence after which a peer is lost")
    parser.add_argument("--parent-pipe", action="store_true", help="end when standard input closes")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's to handle: it saves, then halts us
    if options.parent_pipe:
        threading.Thread(target=end_with_parent, args=(0,), name="parent_pipe", daemon=True).start()
    if options.memory is not None and options.accelerator == "cpu":  # a driver maps more than it uses
        limit_memory(options.memory)
    host, _, port = str(options.coordinator).rpartition(":")
    site = Endpoint(
        device=options.device,
        host=options.host,
        port=options.port,
        address=options.address,
        identity=Identity(options.identity) if options.identity is not None else None,
        trusted_network=options.trusted_network,
        relayed=options.relayed,
        island=options.island,
        ranks=options.ranks,
        sharded=options.sharded,
        accelerator=options.accelerator,
        engine=options.engine,
        data_kinds=None if options.data_kind is None else tuple(options.data_kind),
    )
    run, timeout_s = os.environ.get("ISTHMUS_RUN", ""), options.timeout
    at, serve = (host, int(port)), serve_joined if options.replica else _serve_stages
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
