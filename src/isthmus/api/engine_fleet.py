"""A fleet on an engine's nodes for one run: a coordinator here, agents there, and nothing left of them afterwards."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Generator, Sequence

import msgspec

from isthmus.api.agent_log import AgentLog
from isthmus.api.cluster import Cluster
from isthmus.api.folder import AGENTS_LOG, COORDINATOR, RunFolder
from isthmus.api.observer import Observer
from isthmus.api.serving_fleet import Serving, serving_fleet
from isthmus.api.up_choices import check_not_public
from isthmus.runtime.launchers.launcher import AgentSpec, Launcher
from isthmus.runtime.processes.signals import Stop, uninterrupted
from isthmus.runtime.service.agent import local_address
from isthmus.runtime.service.fleet_coordinator import FleetCoordinator
from isthmus.runtime.service.fleet_state import remove_state

ANY_PORT = 9  # a port of the engine's head, where only the route to it is asked for


def serving_towards(head: str, timeout: str, host: str = "", port: int = 0, addresses: tuple[str, ...] = ()) -> Serving:
    """Where the coordinator listens: where nobody says, at the address of this machine towards the engine's head."""
    if not host:
        host = local_address(head, ANY_PORT) if head else "127.0.0.1"
        check_not_public(host)
    return Serving(host=host, port=port, addresses=addresses, timeout=timeout)


@contextlib.contextmanager
def fleet_on(
    folder: RunFolder,
    launcher: Launcher,
    specs: Sequence[AgentSpec],
    serving: Serving,
    observer: Observer,
    stop: Stop,
    *,
    verbose: bool = False,
) -> Generator[tuple[FleetCoordinator, list[str]]]:
    """The coordinator and its devices, once the agents of all have joined; lost agents are brought back. Afterwards no
    process, key or ticket is left."""
    log, interrupted = folder.path / AGENTS_LOG, False
    try:
        with _started(folder, launcher, specs, serving, observer, verbose=verbose) as (cluster, service):
            with stop.calls(lambda: None):
                devices = cluster.joined(stop)
            with cluster.kept():
                yield service, devices
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:
        if not folder.begun and log.is_file() and (interrupted or not log.stat().st_size):
            log.unlink()


@contextlib.contextmanager
def _started(
    folder: RunFolder,
    launcher: Launcher,
    specs: Sequence[AgentSpec],
    serving: Serving,
    observer: Observer,
    *,
    verbose: bool,
) -> Generator[tuple[Cluster, FleetCoordinator]]:
    state, ending = folder.path / COORDINATOR, False

    def say(line: str) -> None:
        log.write("coordinator", line)
        if not ending and not verbose:
            observer.note(line)

    with contextlib.ExitStack() as stack:
        folder.path.mkdir(parents=True, exist_ok=True)
        log = stack.enter_context(AgentLog(folder.path / AGENTS_LOG, observer.note if verbose else None))
        remove_state(state)  # of a run that was killed: its devices have our agents' names
        stack.callback(shutil.rmtree, state, ignore_errors=True)
        service = stack.enter_context(serving_fleet(msgspec.structs.replace(serving, state=state), say))
        cluster = Cluster(launcher, service, specs, log, observer.note)
        try:
            cluster.start(state)
            yield cluster, service
        finally:
            ending = True
            with uninterrupted():
                cluster.stop()
