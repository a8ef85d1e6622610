"""A site's process that trains for federated runs. It stays loaded between runs, and continues after a reconnection.

Model, algorithm and data are the site's own. The agent announces runs; a thread trains for one of them at a time.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from isthmus.accelerators import HOST, open_accelerator
from isthmus.data import load_dataset
from isthmus.data.dataset import NothingHeldOut
from isthmus.data.description import DataDescription
from isthmus.errors import IsthmusError, UserError
from isthmus.federated.admission import first_state
from isthmus.federated.algorithms import load_algorithm
from isthmus.federated.client_trainer import TrainingTask
from isthmus.federated.emulated_speed import Pacer, SpeedEmulation
from isthmus.federated.evaluation import Evaluator
from isthmus.federated.local import StepsByRound
from isthmus.federated.resident import Resident
from isthmus.federated.secure.site_noise import SiteNoise
from isthmus.federated.site import OwnData, Site, SiteStates, UpdateRules
from isthmus.federated.site_log import SiteLog, SiteLogLine
from isthmus.federated.states import StateForm
from isthmus.federated.task_spec import SiteConfig, TaskSpec, allowed_devices, described, digest_of, refusal
from isthmus.graph.metrics import Metrics
from isthmus.models import build_model
from isthmus.protocol.federated_messages import ExecutorJoined, PhaseId
from isthmus.protocol.secure_site import COMPLETE_BELOW, LEAST_SUMMED
from isthmus.runtime.federated.executor import first_message, take_part
from isthmus.runtime.federated.pipeline_plans import MakePlan, PipelinePlans, SitePipeline
from isthmus.runtime.federated.site_executor import SecureSiteExecutor, SharesOf, SiteExecutor, SiteLink
from isthmus.runtime.federated.trainer import own_mean_of
from isthmus.runtime.identity import Identity
from isthmus.runtime.identity.keys import DeviceSigner
from isthmus.runtime.messages.federated import FromExecutor, TaskMessage
from isthmus.runtime.messages.fleet import StartRun
from isthmus.runtime.messages.run import JoinRun
from isthmus.runtime.processes.device_processes import ForkServers
from isthmus.runtime.processes.signals import ComputeThreads
from isthmus.runtime.transport.channel import dial
from isthmus.runtime.transport.message_sender import MessageSender
from isthmus.runtime.transport.reconnection import CoordinatorConnection, OpenConnection, Outage, Retry, direct
from isthmus.session.session import reason_and_fault

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
        site = Site(
            TrainingTask(algorithm=algorithm, local=task_spec.local, seed=task_spec.seed, rounds=task_spec.rounds),
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
