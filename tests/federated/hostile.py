"""A coordinator of a test's own, over TLS: it says to honest sites whatever the test wants. Sites are what a user runs,
in threads of this process."""

from __future__ import annotations

import contextlib
import math
import queue
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isthmus.api.make_plan import plan_for
from isthmus.errors import IsthmusError, PeerError
from isthmus.federated.algorithms import AlgorithmSpec, load_algorithm
from isthmus.federated.local import LocalConfig
from isthmus.federated.resident import Resident
from isthmus.federated.robust import Aggregation
from isthmus.federated.secure.recovery import MaskedSum
from isthmus.federated.server import Server
from isthmus.federated.task_spec import TaskSpec, load_site
from isthmus.models import ModelSpec, build_model
from isthmus.programs.masked import Masked, TakeMasksOff, Unmasking
from isthmus.protocol.federated_messages import (
    NONE,
    ClientTask,
    ExecutorJoined,
    PhaseId,
    PhaseOpened,
    PhaseSetup,
    SumsSent,
)
from isthmus.protocol.federated_planning import SecureRules
from isthmus.protocol.run_messages import DeviceFailed
from isthmus.protocol.secure_messages import SecureOrder
from isthmus.runtime.federated.site_runner import SiteRunner
from isthmus.runtime.identity import Authority
from isthmus.runtime.messages.federated import FromExecutor, TaskMessage, ToExecutor
from isthmus.runtime.messages.fleet import StartRun
from isthmus.runtime.messages.run import JoinRun
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.runtime.transport.listener import Listener
from isthmus.runtime.transport.message_sender import headers_of
from tests.federated.sites import write_job
from tests.fleet_service.parties import certified, soon

RUN = "f" * 32
MODEL = ModelSpec(name="mlp", options={"features": 6, "width": 5, "layers": 1, "classes": 3})
MOST = 64
WAIT_S = 30.0
"""For what must come; nothing waits so long in a test that passes."""


class HonestSite:
    """With its own data, in a folder; `failures` is what would end its process."""

    def __init__(self, folder: Path, name: str, authority: Authority) -> None:
        self.said: list[str] = []
        self.failures: list[IsthmusError] = []
        self.folder = folder / f"{name}-state"
        certified(authority, self.folder)
        config = load_site(folder / f"{name}.toml")
        self.runner = SiteRunner(
            config, name, self.folder, log=self.said.append, fail=self.failures.append, plan=plan_for
        )


class HostileCoordinator:
    """Says what it is told to, to sites of these names."""

    def __init__(
        self, folder: Path, names: Sequence[str], rounds: int = 4, *, secure: bool = True, algorithm: str = "fedavg"
    ) -> None:
        write_job(folder, tuple(names), algorithm, rounds)
        self._algorithm = AlgorithmSpec(name=algorithm)
        authority = Authority(folder / "authority")
        self.folder, self.names, self._rounds, self._secure = folder, tuple(names), rounds, secure
        self.kept = "0" * 32
        """Of the run, as sites know it."""
        self._inbox: queue.SimpleQueue[tuple[str, Any, list[Tensor]]] = queue.SimpleQueue()
        self._channels: dict[str, SocketChannel] = {}
        self._joined: dict[str, SocketChannel] = {}
        """On which each site has said what it has."""
        self.samples: dict[str, int] = {}
        self.wrong: frozenset[tuple[str, str]] = frozenset()
        """Holder and owner of each wrong share of the last sum."""
        self._listener = Listener(
            "127.0.0.1", identity=certified(authority, folder / "coordinator", "coordinator"), timeout_s=WAIT_S
        )
        self._listener.start(self._attend)
        torch.manual_seed(0)
        module = build_model(MODEL)
        resident = Resident(module)
        server = Server(load_algorithm(self._algorithm), resident.vector(), resident.buffers(), len(names))
        self._sizes = {name: math.prod(form.shape) for name, form in server.sums[0].items()}
        self.model = resident.vector().clone()
        self.broadcast = server.broadcast()
        """What goes out beside the model."""
        self.sites = {name: HonestSite(folder, name, authority) for name in names}
        call = StartRun(run=RUN, timeout_s=WAIT_S, threads=1)
        for site in self.sites.values():
            site.runner.start_run(call, ("127.0.0.1", self._listener.port))
        self.await_sites()

    def close(self) -> None:
        for site in self.sites.values():
            site.runner.leave()
        self._listener.close()

    def task_spec(self, name: str) -> TaskSpec:
        return TaskSpec(
            job="clinics",
            run=self.kept,
            algorithm=self._algorithm,
            model=MODEL,
            local=LocalConfig(epochs=1, batch_size=MOST, learning_rate=0.5),
            seed=3,
            client=self.names.index(name),
            rounds=self._rounds,
            sites=self.names,
            aggregation=Aggregation(secure=True, most_samples=MOST) if self._secure else Aggregation(),
        )

    def _attend(self, channel: SocketChannel) -> None:
        received = channel.receive(idle_s=WAIT_S)
        if received is None:
            return  # it hung up at the end of a test
        assert isinstance(received[0], JoinRun)
        name = received[0].device
        self._channels[name] = channel
        channel.send(TaskMessage(run=RUN, task_spec=self.task_spec(name)))
        try:
            while (received := channel.receive(idle_s=WAIT_S)) is not None:
                if isinstance(message := received[0], FromExecutor):
                    if isinstance(message.body, ExecutorJoined):
                        self._joined[name] = channel
                    self._inbox.put((name, message.body, received[1]))
            ended = None
        except Exception as e:
            ended = e
        if self._channels[name] is channel:  # else it has joined again
            self._inbox.put((name, ended, []))

    def heard(self) -> tuple[str, Any, list[Tensor]]:
        """The next report of a site; None of one that hung up."""
        return self._inbox.get(timeout=WAIT_S)

    def await_sites(self, *names: str) -> None:
        """That join, or join again."""
        left = set(names or self.names)
        while left:
            name, body, _ = self.heard()
            if isinstance(body, ExecutorJoined):
                assert body.samples is not None
                self.samples[name] = body.samples
                left.discard(name)

    def reconnect(self) -> None:
        """Sites that hung up by themselves may have joined again already, on connections that are closed here too."""
        closed = list(self._channels.values())
        for channel in closed:
            channel.close()
        soon(lambda: all(self._joined[n] is self._channels[n] and self._joined[n] not in closed for n in self.names))
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get_nowait()

    def open(self, phase: PhaseId, names: Sequence[str], state: int = NONE) -> None:
        broadcast = {**self.broadcast, "model": self.model}
        for name in names:
            setup = PhaseSetup(
                phase=phase, clients=len(names), samples=sum(self.samples[n] for n in names), durable_round=-1
            )
            task = ClientTask(self.names.index(name), self.samples[name], state)
            self._tell(name, PhaseOpened(opening=setup, tasks=(task,)), broadcast)

    def _tell(self, name: str, body: Any, tensors: Mapping[str, Tensor] = {}) -> None:
        payload = [memoryview(t.numpy()).cast("B") for t in tensors.values()]
        self._channels[name].send(ToExecutor(run=RUN, body=body, tensors=headers_of(tensors)), payload)

    def secure_sum(self, phase: PhaseId, names: Sequence[str]) -> Tensor | str:
        """The sum of these sites' updates, in units of itself; or why the sites do not give it."""
        total = MaskedSum(self._sizes)
        machine = Masked(SecureRules())
        machine.port = sums = _Sums(self, total)
        self.open(phase, names)
        machine.opened(phase, frozenset(names))
        summed: set[str] = set()
        while sums.found is None:
            name, body, tensors = self.heard()
            if getattr(body, "phase", phase) != phase:
                continue  # of an attempt before
            match body:
                case None | Exception():
                    return f"{name} hung up"
                case DeviceFailed(reason=reason):
                    return reason
                case SumsSent(refused=refused) if refused:
                    return refused[0].reason
                case SumsSent():
                    total.add(dict(zip(sorted(total.sizes), tensors, strict=True)))
                    summed.add(name)
                    if summed == set(names):
                        machine.sums_wanted(phase, frozenset(summed))
                case _:
                    machine.heard(name, body)
        self.wrong = total.wrong
        return sums.found


class _Sums:
    """What the machine of one sum asks. `found` is how it ended."""

    def __init__(self, coordinator: HostileCoordinator, total: MaskedSum) -> None:
        self._coordinator, self._total = coordinator, total
        self.found: Tensor | str | None = None

    def tell(self, site: str, order: SecureOrder) -> None:
        self._coordinator._tell(site, order)

    def leave_out(self, phase: PhaseId, sites: tuple[str, ...], reason: str) -> None:
        raise AssertionError(f"{sites} left out: {reason}")

    def take_masks_off(self, recovered: TakeMasksOff) -> Unmasking:
        try:
            values, _ = self._total.unmasked(recovered, RUN)
        except PeerError as e:
            return Unmasking(str(e))
        self.found = torch.cat([value.double() for _, value in sorted(values.items())])
        return Unmasking(wrong=self._total.wrong)

    def unmasked(self, phase: PhaseId, reason: str) -> None:
        self.found = reason or self.found


def settled(site: HonestSite, text: str) -> str:
    """The line of the site's log that has this text."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        found = next((line for line in list(site.said) if text in line), None)
        if found is not None:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{text!r} is not in {site.said}")
