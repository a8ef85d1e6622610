"""Many light devices in one process: real agents, whose work for runs is done by threads in place of processes."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from isthmus.errors import IsthmusError
from isthmus.experiments import plan_for
from isthmus.federated.task_spec import load_site
from isthmus.runtime.device.device import DeviceWorker
from isthmus.runtime.device.peer_connections import Endpoint
from isthmus.runtime.federated.site_runner import SiteRunner
from isthmus.runtime.identity import Identity, decode_ticket
from isthmus.runtime.messages.fleet import StartRun
from isthmus.runtime.processes import memory
from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.runtime.service.agent import Agent, Membership, join_fleet
from isthmus.runtime.transport.tcp import Unreached

TIMEOUT_S = 60.0
SWITCH_S = 0.05
"""Hundreds of threads wait for the interpreter here, and each wakes up once in this time: with 5 ms these processes do
little else."""
SITE = "site.toml"
"""In the folder: what devices do for federated runs. Without it they work as stages."""
_LOADING = threading.Lock()
"""NumPy reads headers by `ast.literal_eval`, which may fail in threads of one interpreter (CPython issue 106905)."""


class LightDevice:
    """A device's `RunStarter`."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._folder = name, folder
        self._site: SiteRunner | None = None

    def start_run(self, call: StartRun, coordinator: tuple[str, int]) -> None:
        site = self._folder.parent / SITE
        if site.exists():
            if self._site is None:
                with _LOADING:
                    self._site = SiteRunner(
                        load_site(site), self._name, self._folder, log=_nothing, fail=_failed, plan=plan_for
                    )
            self._site.start_run(call, coordinator)
        else:
            threading.Thread(target=self._work, args=(call, coordinator), daemon=True).start()

    def stop_run(self, run: str) -> None:
        if self._site is not None:
            self._site.stop_run(run)

    def end(self) -> None:
        if self._site is not None:
            self._site.end()

    def _work(self, call: StartRun, coordinator: tuple[str, int]) -> None:
        endpoint = Endpoint(device=self._name, identity=Identity(self._folder))
        try:
            DeviceWorker(coordinator, endpoint, call.run, call.timeout_s).work()
        except IsthmusError as e:
            _failed(e)


def _failed(error: IsthmusError) -> None:
    print(error, file=sys.stderr, flush=True)


def _nothing(_: str) -> None:
    pass


def forked(root: Path, names: Sequence[str], tickets: Sequence[str]) -> int:
    """The process with these devices, which runs until it is killed. To be called before threads are started."""
    pid = os.fork()
    if pid:
        return pid
    try:
        _run(root, names, tickets)
    finally:
        os._exit(1)


def _run(root: Path, names: Sequence[str], tickets: Sequence[str]) -> None:
    torch.set_num_threads(1)
    threading.stack_size(1 << 18)
    sys.setswitchinterval(SWITCH_S)
    memory.SWITCH_S = SWITCH_S  # a stage would shorten it for the whole process, which real devices have for themselves

    # One after the other: the coordinator cuts connections of an address that opens more than 16 at a time.
    for name, ticket in zip(names, tickets, strict=True):
        folder = root / name
        membership = _joined(name, folder, ticket)
        threading.Thread(target=_stay, args=(name, folder, membership), daemon=True).start()
    threading.Event().wait()


def _joined(name: str, folder: Path, ticket: str) -> Membership:
    """Once the coordinator has room."""
    while True:
        try:
            return join_fleet(decode_ticket(ticket), {name: folder}, TIMEOUT_S)[name]
        except Unreached as e:
            _failed(e)


def _stay(name: str, folder: Path, membership: Membership) -> None:
    place, starter = ProcessPlace(hardware="light"), LightDevice(name, folder)
    try:
        Agent(folder, membership, place, timeout_s=TIMEOUT_S, log=_nothing, run_starter=starter).run()
    except IsthmusError as e:
        _failed(e)
