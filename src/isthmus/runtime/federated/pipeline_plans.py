"""How a client that is a fleet is cut: the job of each segment of its round, its model captured, its plan.

The pipeline of a site that is a fleet: a descent is a few runs over its devices, with weights given and taken.

A round's steps with batches of one size are one run. Devices that are lost meanwhile are replaced, or the run is
planned again without them, as in any run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from isthmus.combinations import refused
from isthmus.cost import build_again, layouts_of
from isthmus.data import DataSpec
from isthmus.data.dataset import any_left_out
from isthmus.data.description import DataDescription
from isthmus.federated.local import LocalConfig, StepsByRound, what_is_set
from isthmus.federated.pipeline import MeanLoss, PipelineConfig, Segment, mean_loss_spec, round_spec, segments
from isthmus.federated.resident import Resident
from isthmus.fleet import Fleet
from isthmus.job import Job, Prepared, TrainingConfig, checked, fleet_of, prepare
from isthmus.job.settings import RuntimeConfig
from isthmus.models import ModelSpec
from isthmus.plans import Plan
from isthmus.rng import torch_seed
from isthmus.run_files import CHECKPOINTS
from isthmus.runtime.coordinator.backend import LocalBackend, local_places
from isthmus.runtime.coordinator.run import RunOptions, Watcher, check_outcome, run_plan
from isthmus.runtime.processes.device_processes import ForkServers
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
