"""A run's executors are devices that joined a fleet: each that is there trains clients, each that comes is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from torch import Tensor

from isthmus.combinations import refused
from isthmus.errors import PeerError
from isthmus.federated.job import FederatedJob
from isthmus.federated.server import Server
from isthmus.programs.round_records import RoundRecord
from isthmus.programs.rounds import Rounds
from isthmus.runtime.coordinator.backend import RunRequest
from isthmus.runtime.federated.fleet_states import KeptStates
from isthmus.runtime.federated.host import ConnectionPolicy, FederatedHost, RoundMeasure
from isthmus.runtime.federated.site_acceptor import SiteAcceptor, SiteConnection
from isthmus.runtime.federated.update_receiver import SumsReceiver
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.federated import FromExecutor, StateReport, StatesWanted, ToExecutor, TrainClients
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.transport.message_sender import headers_of
from isthmus.trackers import Track

COORDINATORS: dict[str, object] = {"callback": (), "track": Track(), "store": None, "metrics": (), "run_dir": "runs"}
"""Fields of a job that only the coordinator uses."""


def check_on_devices(job: FederatedJob) -> None:
    """UserError for a simulation whose executors cannot be devices."""
    runtime = job.runtime
    if job.scheme.per != "given":
        raise refused("an executor for each client", "joined executors", repr(runtime.scheme))
    for name, got in (("slow_down", runtime.slow_down), ("unstable", runtime.unstable), ("noise", runtime.noise)):
        if got:
            raise refused("emulation", "joined executors", got, f"runtime.{name}")


def on_devices(job: FederatedJob, start: int) -> FederatedJob:
    """The job for a run that begins with so many devices."""
    return msgspec.structs.replace(job, runtime=msgspec.structs.replace(job.runtime, executors=start))


def request(job: FederatedJob, run: str, logs: Path, stop: Stop) -> RunRequest:
    """The run's call: devices that the job's fleet file names, or all."""
    fleet = job.executor_fleet(0) if job.fleet.endswith(".toml") else None
    return RunRequest(
        run=run,
        devices=(),
        others=() if fleet is None else tuple(fleet.names),
        anyone=fleet is None,
        timeout_s=job.timeout_s,
        threads=job.runtime.threads,
        logs=logs,
        role="executor",
        stop=stop,
    )


class DeviceSums(SumsReceiver):
    """Sums of devices, which receive the job first."""

    def __init__(self, server: Server, job: FederatedJob, run: str, fingerprint: str) -> None:
        super().__init__(server)
        rate = job.local.tabled(job.federated.rounds).learning_rate
        told = msgspec.structs.replace(job, learning_rate=rate, fleet="", coordinator="", **COORDINATORS)
        self._order = TrainClients(run=run, job=msgspec.json.encode(told), fingerprint=fingerprint)

    def guard(self, executor: str, message: AnyMessage) -> None:
        if not (isinstance(message, FromExecutor) and isinstance(message.body, StateReport)):
            super().guard(executor, message)
        elif len(message.tensors) != (isinstance(message.body, StatesWanted) and message.body.writes):
            raise PeerError(f"sent {type(message.body).__name__} with {len(message.tensors)} tensors")

    def hello(self, executor: str) -> AnyMessage | None:
        return self._order


class DeviceHost(FederatedHost):
    """Devices read clients' states from here, and write them."""

    def __init__(
        self,
        machine: Rounds,
        server: Server,
        receiver: DeviceSums,
        run: str,
        timeout_s: float,
        states: KeptStates | None,
        *,
        committed: Callable[[RoundRecord, RoundMeasure], Callable[[], None] | None],
        note: Callable[[str], None],
    ) -> None:
        policy = ConnectionPolicy(run=run, timeout_s=timeout_s, acceptor=SiteAcceptor, out=SiteConnection)
        super().__init__(machine, server, receiver, policy, committed=committed, note=note)
        self._states = states

    def asked_for_states(self, device: str, report: StateReport, tensors: Sequence[Tensor]) -> None:
        try:
            if self._states is None:
                raise PeerError("asked for states in a run without any")
            answer = self._states.carry_out(report, tensors)
        except PeerError as e:
            self.session.refused(device, str(e))
            return
        if answer is not None:
            body, states = answer
            sent = {"states": states} if states.numel() else {}
            self.put(device, ToExecutor(run=self.run, body=body, tensors=headers_of(sent)), list(sent.values()))
