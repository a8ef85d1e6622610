"""A site's process that trains for federated runs. It stays loaded between runs, and continues after a reconnection.

Model, algorithm and data are the site's own. The agent announces runs; a thread trains for one of them at a time.

A site's executor sends what its one client returned, not sums.

A client that is a fleet is a pipeline: its round is cut into segments of steps with batches of one size, each a run
over its devices, with weights given and taken. Devices that are lost meanwhile are replaced, or the run is planned
again without them, as in any run.
"""

from __future__ import annotations

import copy
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from isthmus.accelerators import HOST, open_accelerator
from isthmus.combinations import refused
from isthmus.cost import build_again, layouts_of
from isthmus.data import DataSpec, load_dataset
from isthmus.data.dataset import NothingHeldOut, any_left_out
from isthmus.data.description import DataDescription
from isthmus.errors import IsthmusError, PeerError, UserError
from isthmus.federated.admission import first_state
from isthmus.federated.algorithms import load_algorithm
from isthmus.federated.client_trainer import TrainingTask
from isthmus.federated.emulated_speed import Pacer, SpeedEmulation
from isthmus.federated.evaluation import Evaluator
from isthmus.federated.local import LocalConfig, StepsByRound, what_is_set
from isthmus.federated.pipeline import MeanLoss, PipelineConfig, Segment, mean_loss_spec, round_spec, segments
from isthmus.federated.resident import Resident
from isthmus.federated.secure.masks import WEIGHTS, Vector, joined, parted
from isthmus.federated.secure.site_noise import SiteNoise
from isthmus.federated.secure.site_secrets import Signer, SiteSecrets, digest_of_values
from isthmus.federated.site import OwnData, Site, SiteStates, UpdateRules
from isthmus.federated.states import StateForm
from isthmus.federated.task_spec import (
    SiteConfig,
    SiteLog,
    SiteLogLine,
    TaskSpec,
    allowed_devices,
    described,
    digest_of,
    refusal,
)
from isthmus.fleet import Fleet
from isthmus.graph.metrics import Metrics
from isthmus.job import Job, Prepared, TrainingConfig, checked, fleet_of, prepare
from isthmus.job.settings import RuntimeConfig
from isthmus.models import ModelSpec, build_model
from isthmus.plans import Plan
from isthmus.protocol.federated_messages import (
    ExecutorJoined,
    ExecutorOrder,
    PhaseDropped,
    PhaseId,
    PhaseOpened,
    SumsSent,
    UpdateRefused,
)
from isthmus.protocol.federated_planning import SecureRules
from isthmus.protocol.secure_messages import SealedShare, SecureOrder, SecureReport, SharesRevealed, SiteKeys
from isthmus.protocol.secure_site import COMPLETE_BELOW, LEAST_SUMMED, Revealed, SecureSite
from isthmus.rng import torch_seed
from isthmus.run_files import CHECKPOINTS
from isthmus.runtime.coordinator.backend import LocalBackend, local_places
from isthmus.runtime.coordinator.run import RunOptions, Watcher, check_outcome, run_plan
from isthmus.runtime.federated.executor import Broadcast, Executor, first_message, take_part
from isthmus.runtime.federated.trainer import own_mean_of
from isthmus.runtime.identity import Identity, party_of
from isthmus.runtime.identity.keys import DeviceSigner
from isthmus.runtime.messages.federated import FromExecutor, MaskedValues, SiteValues, TaskMessage
from isthmus.runtime.messages.fleet import StartRun
from isthmus.runtime.messages.run import JoinRun
from isthmus.runtime.processes.device_processes import ForkServers
from isthmus.runtime.processes.signals import ComputeThreads
from isthmus.runtime.transport.channel import dial
from isthmus.runtime.transport.message_sender import MessageSender, headers_of
from isthmus.runtime.transport.reconnection import CoordinatorConnection, OpenConnection, Outage, Retry, direct
from isthmus.session.program import OutOfPhase
from isthmus.session.session import reason_and_fault
from isthmus.training.checkpoint import OPTIMIZER, latest_checkpoint, read_tensors
from isthmus.training.optim import OptimizerConfig
from isthmus.training.weights import parameter_names, weights_of

MakePlan = Callable[[Prepared, Fleet, Path | None], Plan]  # (model, fleet, plan document or None) -> a plan to run
Key = tuple[int, int, int]  # seed, round, client


class PipelinePlans:
    """Planned once: for batches of other sizes the same cut is taken."""

    def __init__(
        self,
        config: PipelineConfig,
        model: ModelSpec,
        data: DataSpec,
        samples: DataDescription,
        local: LocalConfig,
        steps: StepsByRound,
        make_plan: MakePlan,
        threads: int = 1,
    ) -> None:
        """`samples` describe the client's data; `steps` are those of `local`. UserError for a fleet or a planner that
        does not exist, a model that cannot be cut, a plan of several replicas, steps of other optimizers than SGD;
        FleetTooSmall where no plan fits."""
        self._config, self._model, self._data, self._local = config, model, data, local
        self._samples, self._make_plan, self._threads = samples, make_plan, threads
        self._steps = steps
        if not local.is_plain:  # a round is several runs, and the last one ends before its step
            field, got = what_is_set(local.optimizer, local.clip_norm)
            raise refused("optimizers", "pipeline clients", got, field)
        self.segments = segments(samples.train, local)  # segments of every round
        self._captured: dict[int, Prepared] = {}
        self._plans: dict[Segment, Plan] = {}
        # The last step keeps its gradients besides: planned is what takes the most memory.
        largest = msgspec.structs.replace(self.segments[0], is_last=True)
        self.uneven = any_left_out(samples.columns)
        self.divides = local.micro_batches == 1 and self.prepared(largest).captured.train.count is not None
        """Whether the sum of a loss is divided by its count in the model, as in one process; over several micro-batches
        the sums are added up before."""
        if self.divides:
            self._model = mean_loss_spec(model, uneven=self.uneven)
            self._captured.clear()
        self.fleet = fleet_of(self._job(largest, (0, 0, 0)))
        document = Path(config.plan) if config.plan else None
        self.first = make_plan(self.prepared(largest), self.fleet, document)  # the cut
        if len(self.first.replicas) > 1:
            raise refused("several replicas", "pipeline clients", f"{len(self.first.replicas)} by {config.planner!r}")

    def prepared(self, segment: Segment, key: Key = (0, 0, 0)) -> Prepared:
        """The job of a segment of the client's round. A model is captured once for batches of one size."""
        job = self._job(segment, key)
        size = job.micro_batch_size
        if size not in self._captured:
            self._captured[size] = prepare(job, self._samples, field="training.micro_batches")
        samples = msgspec.structs.replace(self._samples, train=segment.steps * segment.batch_size)
        return msgspec.structs.replace(self._captured[size], job=job, samples=samples)

    def learning_rate(self, round_: int) -> float:
        """Return the learning rate of all steps of a round."""
        return self._steps.at(round_).learning_rate

    def _job(self, segment: Segment, key: Key) -> Job:
        config, local = self._config, self._local
        training = TrainingConfig(
            steps=segment.steps,
            batch_size=segment.batch_size,
            micro_batches=segment.micro_batches,
            seed=torch_seed(*key),
            shuffle=False,
            precision=local.precision,
            non_finite="ignore",
            keep_checkpoints=1,
        )
        runtime = RuntimeConfig(
            threads=self._threads, emulate=config.emulate, device=config.device, timeout=config.timeout, adapt=False
        )
        # The first step of SGD with momentum keeps its gradient, which is how the last one's comes out of a run.
        rate = self.learning_rate(key[1])
        optimizer = OptimizerConfig(name="sgd", lr=rate, momentum=0.5 if segment.is_last else 0.0)
        return checked(
            Job(
                name="client",
                model=self._model,
                data=round_spec(self._data, segment, key, local),
                fleet=config.fleet,
                planner=config.planner,
                compression=config.compression,
                training=training,
                optimizer=(optimizer,),
                runtime=runtime,
            )
        )

    def plan(self, segment: Segment) -> Plan:
        """The cut of the first plan, with figures for batches of this size."""
        alike = msgspec.structs.replace(segment, first=0, steps=1)
        if alike not in self._plans:
            problem = self.prepared(segment).problem(self.fleet)
            (cut,) = layouts_of(self.first)
            self._plans[alike] = build_again(problem, [cut._replace(micro_batches=segment.micro_batches)], self.first)
        return self._plans[alike]

    def again(self, prepared: Prepared, fleet: Fleet) -> Plan:
        """For devices that are left. FleetTooSmall where none fits."""
        return self._make_plan(prepared, fleet, None)


MOMENTUM = "momentum_buffer"
RESPAWN_S = 0.5  # until the process of a lost device is started again: the end of one is noticed sooner


class SitePipeline:
    """Computes descents of one client."""

    def __init__(
        self,
        config: PipelineConfig,
        plans: PipelinePlans,
        resident: Resident,
        folder: Path,
        log: Callable[[str], None] = lambda _: None,
        fork_servers: ForkServers | None = None,
    ) -> None:
        """`resident` has the client's model, whose buffers are read and written. Runs leave their files in `folder`.
        `fork_servers` are kept from run to run, by who ends them.
        UserError for an accelerator that is not here."""
        self._plans, self._resident, self._folder = plans, resident, folder
        self.watcher = Watcher(noted=log)
        self._emulate = config.emulate
        self._module = MeanLoss(resident.module, uneven=plans.uneven) if plans.divides else resident.module
        places = local_places(config.device, plans.fleet.names, {d.name: d.engine for d in plans.fleet.devices})
        self._backend = LocalBackend(places=places, respawn_after_s=RESPAWN_S, fork_servers=fork_servers)
        step_s = plans.first.predicted.expected_s
        log(f"a pipeline over {', '.join(plans.first.used)}: {step_s:.3g} s per step as planned")

    @cached_property
    def _aliases(self) -> Mapping[nn.Parameter, list[str]]:
        """In the module that devices run."""
        return parameter_names(self._module)

    def _trained(self) -> list[nn.Parameter]:
        """In the order of the resident's vector."""
        return [p for p in self._resident.module.parameters() if p.requires_grad]

    def descend(self, model: Tensor, key: Key) -> Tensor:
        """The weights at the end of a client's steps less the model [P]: the bits of one process. `key`: seed, round,
        client. PeerError where the devices that are left cannot go on."""
        parts = self._plans.segments
        start = model.clone()
        self._resident.bind(start)
        for segment in parts[:-1]:
            self._take(self._run(segment, key))
        gradients = self._run(parts[-1], key)
        self._take_buffers(gradients)
        rate = self._plans.learning_rate(key[1])
        return self._change(model, start, gradients, rate, one_step=len(parts) == 1)

    def _run(self, segment: Segment, key: Key) -> Mapping[str, Tensor]:
        """Run the plan; return every variable that the run trained or wrote, and the state of its optimizers."""
        prepared, plan = self._plans.prepared(segment, key), self._plans.plan(segment)
        shutil.rmtree(self._folder / CHECKPOINTS, ignore_errors=True)
        options = RunOptions(
            emulate=self._emulate,
            weights=weights_of(self._module, prepared.captured),
            backend=self._backend,
            replan=partial(self._plans.again, prepared),
        )
        outcome = run_plan(prepared, plan, self._plans.fleet, self._folder, options, self.watcher)
        check_outcome(outcome)
        return read_tensors(latest_checkpoint(self._folder / CHECKPOINTS))

    @torch.no_grad()
    def _take(self, found: Mapping[str, Tensor]) -> None:
        for parameter in self._trained():
            for name in self._aliases[parameter]:
                if name in found:
                    parameter.copy_(found[name])
        self._take_buffers(found)

    @torch.no_grad()
    def _take_buffers(self, found: Mapping[str, Tensor]) -> None:
        for name, buffer in self._module.named_buffers():
            if name in found:
                buffer.copy_(found[name])

    def _change(
        self, model: Tensor, last: Tensor, found: Mapping[str, Tensor], rate: float, *, one_step: bool
    ) -> Tensor:
        """From the weights before the last step and its gradient: as `Resident.arrive` rounds it."""
        change = torch.empty_like(model)
        views = map(self._resident.views, (last, model, change))
        for parameter, weights, begun, to in zip(self._trained(), *views, strict=True):
            names = (f"{OPTIMIZER}{name}.{MOMENTUM}" for name in self._aliases[parameter])
            gradient = next((found[name] for name in names if name in found), None)
            if gradient is None:
                torch.sub(weights, begun, out=to)
            elif one_step:
                torch.mul(gradient, -rate, out=to)
            else:
                torch.sub(weights, begun, out=to).sub_(gradient, alpha=rate)
        return change


class SharesOf(NamedTuple):
    """Shares that are revealed."""

    summed: tuple[str, ...]  # the sites of the sum: this one by its name, the others as `NAME:ID`, with their device
    of: tuple[str, ...]  # digests of what this site's part is of


Left = Callable[[PhaseId, str, int, SharesOf | None], None]


@dataclass(frozen=True, kw_only=True)
class SiteLink:
    """A site's connection to the coordinator of a run, and its owner's rules for it."""

    name: str  # the site's
    connection: OpenConnection[MessageSender]
    log: Callable[[str], None]
    left: Left = lambda phase, what, size_bytes, shares: None
    """Called before anything of the site's data leaves it: in which phase, what, how many bytes, and which shares."""
    reports: bool = False  # whether the site's figures go along: no noise covers its update either
    revealed: Revealed = field(default_factory=dict[str, frozenset[str]])  # before
    devices: Mapping[str, str] = field(default_factory=dict[str, str])
    """The id of the only device that its owner's rules allow to have a site's name, by site."""
    check: Callable[[ExecutorOrder | SecureOrder], None] = lambda order: None
    """PeerError for what is not of the run as its owner's rules or word allowed it."""


class SiteExecutor(Executor):
    """Without masks."""

    def __init__(self, site: Site, link: SiteLink) -> None:
        super().__init__(site, link.connection, clients_per_vmap=1)
        self._own = site
        self._log, self._left, self._check = link.log, link.left, link.check
        self._reports = link.reports
        self._latest: PhaseId | None = None  # the phase that was opened here

    def _on_order(self, order: ExecutorOrder | SecureOrder, broadcast: Broadcast) -> None:
        self._check(order)
        self._check_sequence(order)
        match order:
            case PhaseOpened(opening=opening):
                self._own.check_broadcast(broadcast)
                self._latest = opening.phase
            case UpdateRefused(phase=phase, reason=reason):
                self._log(f"the update of round {phase.round + 1} was refused: {reason}")
            case PhaseDropped(phase=phase, again=again):
                what = "is tried again" if again else "closed before this site's update arrived"
                self._log(f"round {phase.round + 1} {what}: this site's update is ignored")
            case _:
                pass

    def _check_sequence(self, order: ExecutorOrder | SecureOrder) -> None:
        """PeerError for a phase that is opened again, or after a later one, and for what belongs to one that was not
        opened. It may be dropped though: an opening is taken back if it waits to be sent."""
        latest = self._latest
        if isinstance(order, PhaseOpened):
            if latest is not None and order.opening.phase <= latest:
                raise PeerError(f"coordinator: opened {order.opening.phase} again, or after {latest}")
        elif not isinstance(order, PhaseDropped) and (latest is None or order.phase > latest):
            raise PeerError(f"coordinator: sent {type(order).__name__} of {order.phase}, which was not opened")

    def _send_sums(self, sums: SumsSent) -> None:
        update = self._own.update
        if update is None or not sums.timed:
            raise UserError("; ".join(r.reason for r in sums.refused) or "the client returned nothing")
        values = SiteValues(weight=update.weight, figures=dict(self._own.figures) if self._reports else {})
        size_bytes = sum(value.nbytes for value in update.values.values())
        what = [f"the update as it is: {', '.join(update.values)}", *values.figures]
        self._left(sums.phase, ", ".join(what), size_bytes, None)
        message = FromExecutor(run=self._run, body=sums, values=values, tensors=headers_of(update.values))
        self._sender.put(message, list(update.values.values()))
        self._sender.flush()  # the values' memory is used again


class SecureSiteExecutor(SiteExecutor):
    """Keys and shares go around in the thread that receives, while the main thread trains. Each may be the one that
    masks the update: whichever comes last."""

    def __init__(
        self,
        site: Site,
        link: SiteLink,
        rules: SecureRules,
        signer: Signer,
        noise: SiteNoise | None = None,
        fewest: int = LEAST_SUMMED,
    ) -> None:
        """`noise` is added to an update before it is masked. A sum of fewer than `fewest` neighbours is refused."""
        super().__init__(site, link)
        self._name, self._signer, self._noise = link.name, signer, noise
        self._secure = SecureSite(self, link.name, rules.share, link.revealed, fewest)
        self._allowed = link.devices
        self._stepping = threading.Lock()
        self._secrets: SiteSecrets | None = None
        self._vector: Vector | None = None  # the update, before it is masked
        self._sizes: dict[str, int] = {}
        self._models: dict[PhaseId, str] = {}
        """The digest of the model that each phase was opened with: a client may be trained for one while another is
        opened."""

    def _on_order(self, order: ExecutorOrder | SecureOrder, broadcast: Broadcast) -> None:
        super()._on_order(order, broadcast)
        if isinstance(order, PhaseOpened):
            phase = order.opening.phase
            self._models[phase] = f"model {digest_of_values(broadcast, ('model',))} pass {phase.number}"
        self._step(lambda: self._secure.ordered(order))

    def _step(self, step: Callable[[], None]) -> None:
        with self._stepping:
            try:
                step()
            except OutOfPhase as e:
                raise PeerError(f"coordinator: {e}") from None

    def _send_sums(self, sums: SumsSent) -> None:
        """In the main thread: the update is trained, and is sent when the shares are here."""
        of: tuple[str, ...] = ()
        if sums.timed:
            # As it was trained: clips, scales and noise of the coordinator's choice make no other one of it.
            of = (self._models[sums.phase], f"update {digest_of_values(self._own.trained)}")
            partial = self.site.partial
            weights, values = partial.weights(), partial.tensors(whole=True)
            if self._noise is not None:
                self._noise.cover(values, min(map(partial.unit, values)))
            values[WEIGHTS] = torch.tensor([weights.total, weights.clients])
            vector = joined(values)
            with self._stepping:
                self._vector, self._sizes = vector, {name: len(value) for name, value in values.items()}
        self.site.clear()
        self._step(lambda: self._secure.trained(sums, of))

    # What the policy of masks asks

    def device_of(self, keys: SiteKeys) -> str:
        try:
            device = party_of(keys.certificate).id
        except ValueError:
            raise PeerError(f"coordinator: keys of {keys.site} have no certificate that can be read") from None
        if (allowed := self._allowed.get(keys.site, device)) != device:
            raise PeerError(f"coordinator: {keys.site} has device {device}, approval.sites allows {allowed}")
        return device

    def make_keys(self, phase: PhaseId) -> SiteKeys:
        self._secrets = SiteSecrets(self._name, self._run, phase, self._signer)
        return self._secrets.public()

    def deal(self, peers: Sequence[SiteKeys], threshold: int) -> list[SealedShare]:
        return self._own_secrets.deal(peers, threshold)

    def open_shares(self, phase: PhaseId, shares: Sequence[SealedShare]) -> tuple[str, ...]:
        if owners := self._own_secrets.open(shares):
            what = f"the shares that {', '.join(owners)} dealt cannot be opened"
            self._log(f"round {phase.round + 1}: {what}: this site's update is left out")
        return owners

    def reveal(
        self, phase: PhaseId, seeds: Sequence[str], keys: Sequence[str], parties: Sequence[str], of: Sequence[str]
    ) -> SharesRevealed:
        of_seeds, of_keys = self._own_secrets.reveal(seeds, keys)
        what = f"the seeds of {', '.join(seeds)}" + (f", the keys of {', '.join(keys)}" if keys else "")
        self._left(phase, f"shares of {what}", 0, SharesOf(tuple(parties), tuple(of)))
        return SharesRevealed(phase=phase, seeds=tuple(of_seeds), keys=tuple(of_keys))

    def send(self, report: SecureReport) -> None:
        self._sender.put(FromExecutor(run=self._run, body=report))

    def send_masked(self, sums: SumsSent, peers: Sequence[str]) -> None:
        assert self._vector is not None, "the update is ready"
        self._own_secrets.mask(self._vector, peers)
        devices = (f"{peer} ({self._own_secrets.devices[peer][:8]})" for peer in peers)
        noise = "" if self._noise is None else ", with noise"
        self._left(sums.phase, f"the update{noise}, masked with {', '.join(devices)}", self._vector.nbytes, None)
        self._put_sums(sums, parted(self._vector, self._sizes))
        self._sender.flush()  # the vector's memory goes

    def send_none(self, sums: SumsSent) -> None:
        self._put_sums(sums, {})

    def forget_secrets(self) -> None:
        self._secrets = self._vector = None

    def distrust(self, reason: str) -> None:
        raise UserError(f"secure aggregation: the coordinator {reason}: this site leaves the run")

    @property
    def _own_secrets(self) -> SiteSecrets:
        assert self._secrets is not None, "they were made when the phase was opened"
        return self._secrets

    def _put_sums(self, sums: SumsSent, tensors: Mapping[str, Tensor]) -> None:
        message = FromExecutor(run=self._run, body=sums, values=MaskedValues(), tensors=headers_of(tensors))
        self._sender.put(message, list(tensors.values()))


ANSWER_S = 0.5  # between looks for the owner's answer


class SiteRunner:
    """The agent's `RunStarter` of a site. `fail` receives an error that ends the site's part, such as a task that its
    owner does not allow."""

    def __init__(
        self,
        config: SiteConfig,
        name: str,
        folder: Path,
        *,
        log: Callable[[str], None],
        fail: Callable[[IsthmusError], None],
        plan: MakePlan,
    ) -> None:
        """`folder` has the site's key, and states of clients under it. UserError for data that cannot be read, a
        device that is not here."""
        self._config = config
        self._name = name
        self._folder = folder
        self._log = log
        self._fail = fail
        self._accelerator = open_accelerator(config.device, "device") if config.pipeline is None else HOST
        self._plan = plan
        self._data = OwnData(load_dataset(config.data, "train"))
        self._fork_servers = ForkServers()  # fork servers of a site that is a fleet
        self._warm: tuple[TaskSpec, Site] | None = None
        self._training = threading.Lock()
        self._work: tuple[CoordinatorConnection[MessageSender], threading.Thread] | None = None
        self._site_log = SiteLog(folder)
        self._ruled: set[str] = set()  # requests that the owner's rules allowed, and the log has
        self._threads = ComputeThreads()  # threads of this run, and of earlier runs that are still trained for

    def start_run(self, call: StartRun, coordinator: tuple[str, int]) -> None:
        if self._work is not None and self._work[0].run == call.run and self._work[1].is_alive():
            return  # only the agent's own connection was lost
        self.end()
        connection = CoordinatorConnection(
            lambda: direct(dial(*coordinator, "coordinator", call.timeout_s, identity=Identity(self._folder))),
            lambda: JoinRun(run=call.run, device=self._name, host="", port=0),
            run=call.run,
            timeout_s=call.timeout_s,
            retry=Retry(log_s=0.0),
            on_lost=self._lost,
        )
        self._work = connection, self._threads.start(lambda: self._attend(connection), f"run {call.run}")

    def stop_run(self, run: str) -> None:
        if self._work is not None and self._work[0].run == run:
            self.end()

    def end(self) -> None:
        """A client that trains is trained to its end, by then for nobody."""
        if self._work is not None:
            self._work[0].close()
            self._work = None

    def leave(self) -> None:
        """At the end of the process: a client that trains is stopped where it is."""
        self.end()
        self._threads.end()
        self._fork_servers.end()

    def _lost(self, outage: Outage) -> None:
        if outage.log:
            self._log(f"{outage.error}; trying again")

    def _attend(self, connection: CoordinatorConnection[MessageSender]) -> None:
        """A run, over as many connections as it takes."""
        torch.set_num_threads(self._config.threads)  # each thread has a number of its own
        try:
            with self._training:
                take_part(connection, self._take_part)
        except IsthmusError as e:
            self._fail(e)
        except Exception as e:  # the user's own algorithm or model
            self._fail(UserError(reason_and_fault(e)[0]))
        else:
            if not connection.over.is_set():
                self._log("the run is over")

    def _take_part(self, connection: OpenConnection[MessageSender]) -> None:
        """One connection, until it ends or the run does."""
        message = first_message(connection, TaskMessage, "a task specification")
        if message is None:
            return
        task_spec = message.task_spec
        task_spec.check_site(self._name)
        if not self._is_allowed(task_spec, connection.ended):
            return
        site = self._site(task_spec)
        stated = task_spec.aggregation.most_samples or self._data.samples
        connection.sender.put(FromExecutor(run=connection.run, body=ExecutorJoined(samples=stated)))
        link = SiteLink(
            name=self._name,
            connection=connection,
            log=self._log,
            left=partial(self._note_sent, task_spec),
            reports=task_spec.privacy is None,
            revealed=self._site_log.revealed(task_spec.run),
            devices=allowed_devices(self._config.approval),
            check=partial(task_spec.check_order, passes=site.passes, samples=stated),
        )
        self._executor(site, task_spec, link).run()

    def _is_allowed(self, task_spec: TaskSpec, ended: threading.Event) -> bool:
        """Return whether the owner's file and rules allow the run; where the owner is to be asked, wait for the answer.
        False where the run is over before. UserError for a no."""
        self._config.check(task_spec)
        request, rules = digest_of(task_spec), self._config.approval
        note = partial(self._site_log.note, job=task_spec.job, run=task_spec.run)
        metrics, plain = self._config.metrics, task_spec.privacy is None and not task_spec.aggregation.secure
        text = described(task_spec, ("loss", *Metrics(metrics).names) if metrics and plain else ())
        if (broken := refusal(rules, task_spec)) is not None:
            note("refused", text=f"by rule: {broken}")
            raise UserError(broken)
        answer = self._site_log.answer(request)
        if answer is None and not rules.ask:  # rules may change: an answer by rule holds for this process alone
            if request not in self._ruled:
                note("asked", text=text)
                note("allowed", text="by rule")
                self._ruled.add(request)
            return True
        if answer is None:
            note("asked", text=text, request=request)
            self._log(f"a coordinator asks for:\n{text}")
            self._log(f"answer with `isthmus site yes --state {self._folder}`, or no")
        while (answer := self._site_log.answer(request)) is None:
            if ended.wait(ANSWER_S):
                return False
        if not answer:
            raise _said_no(task_spec)
        return True

    def _note_sent(
        self, task_spec: TaskSpec, phase: PhaseId, what: str, size_bytes: int, shares: SharesOf | None
    ) -> None:
        """Before it is sent. UserError where the owner has said no since."""
        if self._config.approval.ask and self._site_log.answer(digest_of(task_spec)) is False:
            raise _said_no(task_spec)
        line = SiteLogLine(
            time_s=time.time(),
            event="sent",
            job=task_spec.job,
            run=task_spec.run,
            text=what,
            round=phase.round + 1,
            pass_=phase.number + 1,
            size_bytes=size_bytes,
            summed=() if shares is None else shares.summed,
            of=() if shares is None else shares.of,
        )
        self._site_log.add(line)

    def _executor(self, site: Site, task_spec: TaskSpec, link: SiteLink) -> SiteExecutor:
        if (rules := task_spec.secure_rules) is None:
            return SiteExecutor(site, link)
        privacy, noise = task_spec.privacy, None
        if privacy is not None and privacy.noise == "sites":
            noise = SiteNoise(privacy, rules.fewest)
        knows_all = len(task_spec.sites) < COMPLETE_BELOW
        fewest = rules.fewest if knows_all else LEAST_SUMMED
        return SecureSiteExecutor(site, link, rules, DeviceSigner(Identity(self._folder)), noise, fewest)

    def _site(self, task_spec: TaskSpec) -> Site:
        """The one of before where the same is asked for: nothing is built or read twice."""
        if self._warm is not None and self._warm[0] == task_spec:
            return self._warm[1]
        algorithm = task_spec.around(load_algorithm(self._config.algorithm))
        task_spec.check_samples(self._data.samples)
        data = self._data.without(task_spec.owner_column)
        torch.manual_seed(task_spec.seed)
        module = build_model(self._config.model)
        first = first_state(algorithm, Resident(module).vector())
        pipeline = self._pipeline(task_spec, module, data)
        states = None if first is None else SiteStates(self._folder / "states" / task_spec.run, StateForm(first))
        local = task_spec.local
        if pipeline is not None:
            local = msgspec.structs.replace(local, precision="fp32")  # its devices compute in the other one
        site = Site(
            TrainingTask(algorithm=algorithm, local=local, seed=task_spec.seed, rounds=task_spec.rounds),
            module,
            data,
            states,
            pacer=Pacer(SpeedEmulation(eta=self._config.slow_down).clock()),
            log=self._log,
            accelerator=self._accelerator,
            rules=UpdateRules(
                stated_samples=task_spec.aggregation.most_samples,
                clip=task_spec.clip(algorithm),
                masked=task_spec.aggregation.secure,
            ),
        )
        site.pipeline = None if pipeline is None else pipeline.descend
        if self._config.metrics:
            site.evaluator = self._evaluator(module, data)
        site.averages_buffers = task_spec.privacy is None and task_spec.aggregation.rule == "declared"
        if pipeline is None:
            site.warm_up(task_spec.client)
            if text := own_mean_of(lambda: build_model(self._config.model), data.columns, task_spec.local):
                self._log(text)
        self._warm = (task_spec, site)
        self._log(f"at work for {task_spec.job} as client {task_spec.client}: {self._data.samples} samples")
        return site

    def _evaluator(self, module: nn.Module, data: OwnData) -> Evaluator:
        """On this site's held-out data, or where it has none on those that train. UserError for a metric that cannot be
        had."""
        try:
            held = load_dataset(self._config.data, "heldout")
            samples = held.batch(range(len(held)), list(data.columns))
        except NothingHeldOut:
            samples = data.load(0)
        metrics, where = Metrics(self._config.metrics), self._accelerator
        made = Evaluator(Resident(copy.deepcopy(module)), samples, metrics=metrics, accelerator=lambda: where)
        made.check()
        return made

    def _pipeline(self, task_spec: TaskSpec, module: nn.Module, data: OwnData) -> SitePipeline | None:
        """Return the pipeline of a site that is a fleet; None for any other site."""
        if (config := self._config.pipeline) is None:
            return None
        site, samples = self._config, DataDescription(columns=dict(data.columns), train=data.samples)
        steps = StepsByRound(task_spec.local, task_spec.rounds)
        plans = PipelinePlans(config, site.model, site.data, samples, task_spec.local, steps, self._plan, site.threads)
        return SitePipeline(config, plans, Resident(module), self._folder / "pipeline", self._log, self._fork_servers)


def _said_no(task_spec: TaskSpec) -> UserError:
    return UserError(f"approval: this site's owner said no to the run of {task_spec.job}")
