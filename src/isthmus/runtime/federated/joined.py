"""An executor on a device that joined a fleet: it trains simulated clients of a job that the fleet's coordinator names.

Code does not come over the link. Model and algorithm are those that are installed here, and the data are those that the
device's owner allows. Where the whole fleet is one owner's, the job may name code of the owner's own.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from isthmus.combinations import refused
from isthmus.data.allowed import allowed
from isthmus.errors import PeerError, UserError
from isthmus.federated.client_trainer import ClientTrainer
from isthmus.federated.job import FederatedJob
from isthmus.federated.state_form import StateForm
from isthmus.federated.states import StateStore
from isthmus.models import model_names
from isthmus.models.registry import is_built_in
from isthmus.protocol.federated_messages import ExecutorJoined
from isthmus.runtime.device.coordinator_link import AWAY_TIMEOUTS
from isthmus.runtime.device.peer_connections import Endpoint
from isthmus.runtime.federated.executor import Executor, first_message, take_part
from isthmus.runtime.federated.fleet_states import RemoteFiles
from isthmus.runtime.federated.trainer import remote_trainer
from isthmus.runtime.identity.blinded_digests import ONE_OWNER
from isthmus.runtime.messages.federated import FromExecutor, StateFileGiven, StatesFound, TrainClients
from isthmus.runtime.messages.run import JoinRun
from isthmus.runtime.processes.memory import ANY_SIZE, keep_freed_pages
from isthmus.runtime.transport.channel import dial
from isthmus.runtime.transport.message_sender import SWITCH_S, MessageSender
from isthmus.runtime.transport.reconnection import CoordinatorConnection, OpenConnection, Outage, Retry, direct


def serve_executor(coordinator: tuple[str, int], site: Endpoint, run: str, timeout_s: float) -> None:
    """Train clients until the coordinator ends the run, or stays away. UserError for a job or data that it may not
    name, or that are others here; the coordinator gets it too."""
    keep_freed_pages(ANY_SIZE, arenas=1)
    sys.setswitchinterval(SWITCH_S)
    connection = CoordinatorConnection(
        lambda: direct(dial(*coordinator, "coordinator", timeout_s, identity=site.identity)),
        lambda: JoinRun(run=run, device=site.device, host="", port=0),
        run=run,
        timeout_s=timeout_s,
        retry=Retry(away_s=AWAY_TIMEOUTS * timeout_s),
        on_lost=_lost,
    )
    take_part(connection, partial(_take_part, site))


def _lost(outage: Outage) -> None:
    if outage.log:
        print(f"{outage.error}; trying again", file=sys.stderr, flush=True)


def _take_part(site: Endpoint, connection: OpenConnection[MessageSender]) -> None:
    """One connection, until it ends or the run does."""
    if (order := first_message(connection, TrainClients, "a job")) is None:
        return
    with _allowed(_job(order), site) as job:
        torch.set_num_threads(job.runtime.threads)
        files: list[RemoteFiles] = []

        def states(form: StateForm) -> StateStore:
            files.append(remote := RemoteFiles(form, connection))
            return StateStore(Path("states"), form, files=remote, unused=remote.unused())

        trainer = remote_trainer(job, order.fingerprint, 0, states, None)
        connection.sender.put(FromExecutor(run=connection.run, body=ExecutorJoined()))
        FleetExecutor(trainer, connection, job.runtime.clients_per_vmap, files).run()


def _job(order: TrainClients) -> FederatedJob:
    try:
        return msgspec.json.decode(order.job, type=FederatedJob)
    except (msgspec.DecodeError, UserError) as e:
        raise PeerError(f"coordinator: sent a job that is none: {e}") from None


@contextlib.contextmanager
def _allowed(job: FederatedJob, site: Endpoint) -> Generator[FederatedJob]:
    """The job as it is trained here. UserError for what this device's owner does not allow."""
    check_device(site)
    if job.data is None:
        raise PeerError("coordinator: sent a job without data")
    if foreign := site.data_key != ONE_OWNER:
        check_code(job)
    with allowed(job.data, site.data_kinds, foreign=foreign) as data:
        data = msgspec.structs.replace(data, folder="")
        runtime = msgspec.structs.replace(job.runtime, device=site.accelerator)
        yield msgspec.structs.replace(job, data=data, runtime=runtime)


def check_device(site: Endpoint) -> None:
    """UserError for a device that trains no clients."""
    if site.island is not None or site.engine != "torch":
        got = f"{site.ranks} ranks" if site.island is not None else f"engine {site.engine!r}"
        raise refused("several ranks, JAX", "joined executors", got)


def check_code(job: FederatedJob) -> None:
    """UserError for code, or weights in files, that somebody else's job names."""
    if not is_built_in(job.model) and (":" in job.model.name or job.model.name not in model_names()):
        raise UserError(
            f"model.name: got {job.model.name!r}, expected a model that is installed here: nothing else is imported "
            "for somebody else (if all is yours: isthmus join --one-owner)"
        )
    if job.model.name == "hf":
        raise UserError("model.name: got 'hf', expected no weights in files: nothing is read for somebody else")
    if ":" in job.federated.algorithm:
        raise UserError(
            f"federated.algorithm: got {job.federated.algorithm!r}, expected one that is installed here: nothing else "
            "is imported for somebody else (if all is yours: isthmus join --one-owner)"
        )


class FleetExecutor(Executor):
    """Its states come over the connection, so the thread that receives trains no client."""

    def __init__(
        self,
        site: ClientTrainer,
        connection: OpenConnection[MessageSender],
        clients_per_vmap: int,
        files: Sequence[RemoteFiles],
    ) -> None:
        """`files`, if there are any, get what the coordinator sends of states."""
        super().__init__(site, connection, clients_per_vmap)
        self._files = files

    def _act(self, brief: bool) -> None:
        super()._act(brief=False)

    def states_came(self, answer: StatesFound | StateFileGiven, tensors: Sequence[Tensor]) -> None:
        for files in self._files:
            files.answers.put((answer, tensors))
