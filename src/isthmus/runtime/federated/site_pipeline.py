"""The pipeline of a site that is a fleet: a descent is a few runs over its devices, with weights given and taken.

A round's steps with batches of one size are one run. Devices that are lost meanwhile are replaced, or the run is
planned again without them, as in any run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from isthmus.federated.pipeline import MeanLoss, PipelineConfig, Segment
from isthmus.federated.resident import Resident
from isthmus.run_files import CHECKPOINTS
from isthmus.runtime.coordinator.backend import LocalBackend, local_places
from isthmus.runtime.coordinator.run import RunOptions, Watcher, check_outcome, run_plan
from isthmus.runtime.federated.pipeline_plans import Key, PipelinePlans
from isthmus.runtime.processes.device_processes import ForkServers
from isthmus.training.checkpoint import OPTIMIZER, latest_checkpoint, read_tensors
from isthmus.training.weights import parameter_names, weights_of

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
