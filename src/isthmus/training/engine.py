"""How a stage computes: forward, backward (remote autodiff), update, state. The seam for other frameworks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, Protocol, cast

import msgspec
import torch
from torch import Tensor, nn

from isthmus.accelerators import HOST, Accelerator
from isthmus.accelerators.copies import to_device
from isthmus.errors import InternalError
from isthmus.graph.opgraph import Op, Ref
from isthmus.graph.partition import StageGraph
from isthmus.protocol.finite import OnNonFinite
from isthmus.training.faults import raise_if_jobs
from isthmus.training.gradients import added, gradient_dtype, keep_layout, no_gradient
from isthmus.training.kernels import Kernels
from isthmus.training.learning_rate import LearningRate
from isthmus.training.loss_accumulator import LossAccumulator
from isthmus.training.optim import OptimizerConfig, Optimizers, clip, gradient_norms
from isthmus.training.program import Program, RunsOperators
from isthmus.training.scaling import LOSS_SCALE, LossScale, LossScaling
from isthmus.training.stored import Sent, in_memory, viewed
from isthmus.wire_types import Count, Many, NotNegative, Seed

ALIGNED_BYTES = 64  # where memory of torch's own begins
LARGE_BYTES = 1 << 24  # of parameters that a stage trains, from which gradients are taken one by one


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that all stages of a job share."""

    optimizers: Many[OptimizerConfig] = (OptimizerConfig(),)
    learning_rate: LearningRate = LearningRate()
    clip_norm: NotNegative = 0.0  # largest global gradient norm; 0 turns clipping off
    steps: Count = 1
    micro_batches: Count = 1
    micro_batch_size: Count = 1
    seed: Seed = 0
    non_finite: OnNonFinite = "stop"
    """With `skip` a loss that is not finite has gradients of NaN: every stage and replica that they reach knows it."""
    kernels: Kernels = Kernels()  # set for the whole process, by the code that makes the engine
    loss_scaling: LossScaling | None = None
    """Gradients are computed larger than they are, as float16 needs it; steps that are not finite are left out."""


class Engine(Protocol):
    """One stage on one device. Keys are `Ref`s of the graph; every tensor is for one micro-batch and lies where the
    accelerator computes, for the stream on which the engine is called."""

    @property
    def accelerator(self) -> Accelerator: ...

    @property
    def owned(self) -> Sequence[str]:
        """Trainable parameters that this stage updates, by their own names, in the order of `collect`'s norms."""
        ...

    def forward(self, step: int, micro_batch: int, inputs: Mapping[Ref, Tensor]) -> dict[Ref, Tensor]:
        """Run the stage; returns the values to send, and keeps what the backward needs."""
        ...

    def backward(self, micro_batch: int, gradients: Sequence[Mapping[Ref, Tensor]]) -> dict[Ref, Tensor]:
        """Gradients of the received values, from those of the sent: one mapping per consumer stage, last first."""
        ...

    def evaluate(self, micro_batch: int, inputs: Mapping[Ref, Tensor]) -> dict[Ref, Tensor]:
        """Forward of the evaluation graph: keeps nothing."""
        ...

    def count(self, step: int) -> float:
        """Items that the training loss of the step has counted. The host waits for the last forward."""
        ...

    @property
    def loss(self) -> float:
        """Sum of training losses of the step that is updated next. The host waits for the last forward."""
        ...

    @property
    def last_loss(self) -> Tensor:
        """Return the loss of the last forward, where it was computed."""
        ...

    def shared_values(self, names: Sequence[str], step: int | None = None) -> dict[str, Tensor]:
        """Compute-type values of owned parameters (op names): those of a training step, or the newest."""
        ...

    def set_shared(self, values: Mapping[str, Tensor]) -> None:
        """Take this step's values of shared parameters of other stages."""

    def take_shared_gradients(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Gradients (`gradient_dtype`) of other stages' shared parameters, summed over the step's micro-batches."""
        ...

    def add_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Add gradients from users of tied weights, or from all replicas, to those of owned parameters (op names)."""

    def take_gradients(self, names: Sequence[str]) -> dict[str, Tensor | None]:
        """The summed gradients of owned parameters (op names), which the engine forgets; None where there is none."""
        ...

    def parameters(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors that the optimizer updates, of owned parameters (op names)."""
        ...

    def set_parameters(self, values: Mapping[str, Tensor]) -> None:
        """Put other values into owned parameters (op names)."""

    def collect(self, count: float | None) -> Tensor:
        """Final gradients of the step; returns the norms of owned parameters, -1 where there is no gradient. None at
        all where nobody asks: gradients are not clipped, and may be anything."""
        ...

    def gradients(self) -> dict[str, Tensor]:
        """Those of owned parameters after `collect`, under their own names; `update` clips them in place."""
        ...

    def update(self, step: int, norms: Tensor | None) -> None:
        """Apply the optimizers; to clip, `norms` are those of the whole model in the order of `OpGraph.trainable`."""

    def skip_update(self) -> None:
        """Forget the collected gradients: weights and optimizer state stay as they are."""

    @property
    def loss_scale(self) -> LossScale | None:
        """Return how many times too large gradients are before `collect`, if at all; `update` and `skip_update` move
        it."""
        ...

    def take_loss(self) -> tuple[float, float] | None:
        """(sum of losses, sum of counts) of the training step that ends, if this stage has the loss."""
        ...

    def take_evaluation_loss(self) -> tuple[float, ...] | None:
        """The same for evaluation, and after them sums and counts of metrics."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Weights, written buffers and optimizer state that this stage owns, under the module's own names."""
        ...


class AtStep(NamedTuple):
    """The variables of a training step by op name, and the sums that it adds to."""

    variables: Mapping[str, Tensor]
    gradients: dict[str, Tensor]
    losses: LossAccumulator


class Flight(NamedTuple):
    """A micro-batch between its forward and its backward."""

    at: AtStep
    leaves: dict[Ref, Tensor]
    roots: dict[Ref, Tensor]
    loss: Tensor | None


class Again(NamedTuple):
    """The inputs for a second forward of a micro-batch. Written buffers are those from before the first."""

    at: AtStep
    step: int
    inputs: Mapping[Ref, Tensor]
    written: Mapping[Ref, Tensor]


class TorchEngine:
    """Torch as the engine.

    What training never changes is held as it was placed, without a copy: frozen parameters, and what the evaluation
    graph alone uses. On the CPU that of a file stays there, as pages that are read when they are used.
    Buffers that the forward writes are copied for each micro-batch, since another micro-batch's backward may still need
    the values of before; what an evaluation writes is dropped.

    The order of every sum is that of eager autograd: torch runs backward nodes in the reverse order of their
    creation, so gradients from later stages come first, and parameters sum over micro-batches in order.

    A stage that recomputes drops what autograd saved as soon as its forward is done. Both forwards run with autograd
    on: kernels may be chosen by it, and the bits must be the same. Without it the first would save less, but what the
    second saves is needed all the same, and only one of a stage's tasklets runs at a time.
    """

    def __init__(
        self,
        train: StageGraph,
        evaluation: StageGraph,
        config: EngineConfig,
        weights: Mapping[str, Sent],
        *,
        accelerator: Accelerator = HOST,
        recompute: bool = False,
        frozen: bool = False,
        replaced: Mapping[str, Callable[..., object]] = {},
    ) -> None:
        """`weights` hold every variable of both graphs, under the module's own names; optimizer state may join them.
        Nobody is to change those of them that are frozen.

        A `frozen` stage has no backward: its parameters get no gradient from here, and zeros go back. `replaced` as
        `Program` takes it, for training.
        """
        self.train = train
        self.evaluation = evaluation
        self.config = config
        self.recompute = recompute
        self.frozen = frozen
        self.accelerator = accelerator
        self.device = accelerator.device
        self._variables: dict[str, Tensor] = {}
        self._master: dict[str, nn.Parameter] = {}
        """Trainable parameters that this stage owns, of type `gradient_dtype`, under their own names."""
        self.trainable: dict[str, str] = {}
        """Trainable parameters used here, owned here or by another stage: op name -> own name, in the graph's order."""
        self._written = tuple(dict.fromkeys(name for op in train.ops for name in op.mutates))
        trains = {o.name for o in train.variables() if any(o.requires_grad)}
        variables = {o.name: o for o in (*evaluation.variables(), *train.variables())}
        for op in variables.values():
            self._hold(op, weights, trains=op.name in trains)
        self.owned = tuple(self._master)
        self._optimizers = Optimizers(config.optimizers, self._master, config.learning_rate, config.steps)
        state = {name: in_memory(weights[name]) for name in weights.keys() - {o.target for o in variables.values()}}
        self._optimizers.load(state, accelerator)
        scaling = config.loss_scaling
        self.loss_scale = LossScale(scaling, state.get(LOSS_SCALE)) if scaling is not None else None
        self._gradients: dict[str, Tensor] = {}
        self.flights: dict[int, Flight | Again] = {}
        self._tallies = {"train": LossAccumulator(accelerator), "eval": LossAccumulator(accelerator)}
        size = config.micro_batch_size
        self.eager = Program(train, "train", batch=size, accelerator=accelerator, seed=config.seed, replaced=replaced)
        self.program: RunsOperators = self.eager  # the program of training steps
        self.eager_evaluation = Program(evaluation, "eval", batch=size, accelerator=accelerator, seed=config.seed)
        self.evaluation_program: RunsOperators = self.eager_evaluation
        seed = 1.0 if train.count is not None else 1.0 / config.micro_batches
        self._seed_gradient = torch.full((), seed, device=self.device)
        self._prepare(state)

    def _prepare(self, state: Mapping[str, Tensor]) -> None:
        """Called once the variables are held: engines that compute otherwise set up what they need besides."""

    def _hold(self, op: Op, weights: Mapping[str, Sent], *, trains: bool) -> None:
        if op.target not in weights:
            raise InternalError(f"stage {self.train.index}: no value was placed for {op.kind} {op.target!r}")
        dtype = cast(torch.dtype, getattr(torch, op.outputs[0].dtype))
        placed = in_memory if trains or self.accelerator.asynchronous else viewed
        value = to_device(self.accelerator, placed(weights[op.target]).detach())
        if not trains:
            # Elements with gaps between them are copied: kernels are chosen by strides.
            gaps = value.stride() != torch.empty_like(value, device="meta").stride()
            self._variables[op.name] = value.to(dtype, copy=gaps or op.name in self._written)
            return
        self.trainable[op.name] = op.target
        if op.name in self.train.shared_from:
            self._variables[op.name] = value.to(dtype, copy=True).requires_grad_()
            return
        master = nn.Parameter(value.to(gradient_dtype(dtype), copy=True))
        self._master[op.target] = master
        self._variables[op.name] = master if master.dtype == dtype else value.to(dtype, copy=True).requires_grad_()

    def in_own_memory(self) -> None:
        """Copy the weights that lie in the pages of a file, which begin anywhere."""
        for name, value in self._variables.items():
            if value.data_ptr() % ALIGNED_BYTES and name not in self.trainable:
                self._variables[name] = value.clone()

    def forward(self, step: int, micro_batch: int, inputs: Mapping[Ref, Tensor]) -> dict[Ref, Tensor]:
        at = self.at(step)
        before = Again(at, step, dict(inputs), {Ref(name): self._variables[name] for name in self._written})
        flight, values = self._run(self.program, micro_batch, before)
        self._variables |= {name: values[Ref(name)].detach() for name in self._written}
        self._tally(at.losses, values, self.train)
        if flight.roots or flight.loss is not None:
            self.flights[micro_batch] = before if self.recompute or self.frozen else flight
        return {c.value: values[c.value].detach() for c in self.train.sends}

    def at(self, step: int) -> AtStep:
        variables = {name: self._variables[name] for name in self.trainable}
        return AtStep(variables, self._gradients, self._tallies["train"])

    def _run(self, program: RunsOperators, micro_batch: int, start: Again) -> tuple[Flight, dict[Ref, Tensor]]:
        due = {c.value for c in self.train.receives if c.gradient}
        leaves = {ref: t.detach().requires_grad_() for ref, t in start.inputs.items() if ref in due}
        values = self._values("train")
        values |= {ref: t.clone() for ref, t in start.written.items()}
        values |= start.inputs
        values |= leaves
        program.run(values, start.step, micro_batch)
        loss = values[self.train.loss] if self.train.loss is not None else None
        roots = {c.value: values[c.value] for c in self.train.sends if c.gradient}
        return Flight(start.at, leaves, roots, loss), values

    def backward(self, micro_batch: int, gradients: Sequence[Mapping[Ref, Tensor]]) -> dict[Ref, Tensor]:
        flight = self.flights.pop(micro_batch, None)
        if flight is None:  # nothing on this stage needs a gradient
            return {}
        if isinstance(flight, Again):
            if self.frozen:
                return {c.value: torch.zeros_like(flight.inputs[c.value]) for c in self.train.receives if c.gradient}
            flight, _ = self._run(self.program, micro_batch, flight)
        roots: list[Tensor] = []
        seeds: list[Tensor] = []
        if flight.loss is not None and flight.loss.requires_grad:
            roots.append(flight.loss)
            seeds.append(self._loss_gradient(flight.loss.detach()))
        for ref, root in flight.roots.items():
            seed, *others = [g[ref] for g in gradients if ref in g]
            for other in others:
                seed = seed + other
            roots.append(root)
            seeds.append(seed)
        if not roots:
            return {ref: torch.zeros_like(leaf) for ref, leaf in flight.leaves.items()}
        try:
            found = self._differentiate(flight.at, roots, seeds, list(flight.leaves.values()))
        except Exception as e:
            raise_if_jobs(f"the backward of stage {self.train.index}", e)
            raise
        leaf_gradients = zip(flight.leaves.items(), found, strict=True)
        return {ref: torch.zeros_like(leaf) if g is None else g for (ref, leaf), g in leaf_gradients}

    def try_out(self, program: RunsOperators, inputs: Mapping[Ref, Tensor]) -> None:
        """A micro-batch forward and backward, of which nothing is kept: for who wants to know how long it takes."""
        written = {Ref(name): self._variables[name] for name in self._written}
        at = AtStep({name: self._variables[name] for name in self.trainable}, {}, self._tallies["train"])
        flight, _ = self._run(program, 0, Again(at, 0, inputs, written))
        roots = [*flight.roots.values(), *([flight.loss] if flight.loss is not None else [])]
        roots = [root for root in roots if root.requires_grad]
        if roots and not self.frozen:
            wanted = [*flight.leaves.values(), *flight.at.variables.values()]
            torch.autograd.grad(roots, wanted, [torch.ones_like(root) for root in roots], allow_unused=True)

    def _differentiate(
        self, at: AtStep, roots: Sequence[Tensor], seeds: Sequence[Tensor], leaves: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """The leaves' gradients, laid out as autograd gives them; those of parameters are added up.

        On an accelerator, and of a large stage, each of these is added and forgotten as soon as it is known: all at
        once take the memory of the weights. A call of Python for each costs a small model on the CPU a tenth of its
        time.
        """
        if not self.accelerator.asynchronous and sum(v.nbytes for v in at.variables.values()) < LARGE_BYTES:
            wanted = [*leaves, *at.variables.values()]
            found = cast("tuple[Tensor | None, ...]", torch.autograd.grad(roots, wanted, seeds, allow_unused=True))
            for name, gradient in zip(at.variables, found[len(leaves) :], strict=True):
                self._accumulate(at, name, gradient)
            return found[: len(leaves)]
        for variable in at.variables.values():
            variable.grad = None  # of a step that was collected and not updated with
        failed: list[Exception] = []
        kept: dict[int, Tensor] = {}
        taking = [
            v.register_post_accumulate_grad_hook(partial(self._take, at, name, failed))
            for name, v in at.variables.items()
        ]
        taking += [leaf.register_hook(partial(keep_layout, kept, number, leaf)) for number, leaf in enumerate(leaves)]
        try:
            torch.autograd.backward(roots, seeds, inputs=[*leaves, *at.variables.values()])
        finally:
            for hook in taking:
                hook.remove()
        if failed:
            raise failed.pop()
        return [kept.get(number, leaf.grad) for number, leaf in enumerate(leaves)]

    def _take(self, at: AtStep, name: str, failed: list[Exception], variable: Tensor) -> None:
        """Errors are kept: where a device is written in Python torch ends the process for one that leaves a hook."""
        gradient, variable.grad = variable.grad, None
        if failed:
            return
        try:
            self._accumulate(at, name, gradient)
        except Exception as e:
            failed.append(e)

    def _loss_gradient(self, loss: Tensor) -> Tensor:
        seed = self._seed_gradient
        if self.loss_scale is not None:
            seed = seed * self.loss_scale.value
        if self.config.non_finite == "skip":
            seed = torch.where(torch.isfinite(loss), seed, math.nan)
        return seed.to(loss)

    def _accumulate(self, at: AtStep, name: str, found: Tensor | None) -> None:
        if found is None:
            return
        dtype = gradient_dtype(found.dtype)
        if name in at.gradients:
            at.gradients[name] = added(at.gradients[name], found)
        elif found.is_sparse:
            at.gradients[name] = found.to(dtype).clone()
        else:
            # Gradients may share memory (those of a sum's terms): the sum over micro-batches needs its own. It has the
            # parameter's strides, as torch's backward has it: a norm sums in the order of memory.
            at.gradients[name] = torch.empty_like(at.variables[name], dtype=dtype).copy_(found)

    def evaluate(self, micro_batch: int, inputs: Mapping[Ref, Tensor]) -> dict[Ref, Tensor]:
        values = self._values("eval")
        values |= {Ref(name): values[Ref(name)].clone() for op in self.evaluation.ops for name in op.mutates}
        values |= inputs
        with torch.no_grad():
            self.evaluation_program.run(values, 0, micro_batch)
        self._tally(self._tallies["eval"], values, self.evaluation)
        return {c.value: values[c.value] for c in self.evaluation.sends}

    def _values(self, mode: Literal["train", "eval"]) -> dict[Ref, Tensor]:
        """Not detached: some kernels are chosen by requires_grad, even where no gradient is taken."""
        return {Ref(name): t for name, t in self._variables.items()}

    def _tally(self, losses: LossAccumulator, values: Mapping[Ref, Tensor], stage: StageGraph) -> None:
        if stage.loss is not None:
            losses.add(values[stage.loss], values[stage.count] if stage.count is not None else None)

    def count(self, step: int) -> float:
        return self.at(step).losses.sums()[1]

    @property
    def loss(self) -> float:
        return self._tallies["train"].sums()[0]

    @property
    def last_loss(self) -> Tensor:
        return self._tallies["train"].last

    def take_loss(self) -> tuple[float, float] | None:
        return self._tallies["train"].take() if self.train.loss is not None else None

    def take_evaluation_loss(self) -> tuple[float, ...] | None:
        return self._tallies["eval"].take_all() if self.evaluation.loss is not None else None

    def shared_values(self, names: Sequence[str], step: int | None = None) -> dict[str, Tensor]:
        return {n: self._variables[n].detach() for n in names}

    def set_shared(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self._variables[name].copy_(value)

    def take_shared_gradients(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {n: self._gradients.pop(n) if n in self._gradients else no_gradient(self._variables[n]) for n in names}

    def add_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            mine = self._gradients.get(name)
            self._gradients[name] = gradient.clone() if mine is None else mine.add_(gradient)

    def take_gradients(self, names: Sequence[str]) -> dict[str, Tensor | None]:
        return {name: self._gradients.pop(name, None) for name in names}

    def parameters(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: self._master[self.trainable[name]].detach() for name in names}

    def set_parameters(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self._master[self.trainable[name]].copy_(value)
        self._refresh()

    def collect(self, count: float | None) -> Tensor:
        self._tallies["train"].begin()  # on its way while the update runs
        for name, own in self.trainable.items():
            if name in self.train.shared_from or name not in self._gradients:
                continue
            gradient = self._gradients.pop(name)
            if self.loss_scale is not None:
                gradient.mul_(1.0 / self.loss_scale.value)
            self._master[own].grad = gradient if count is None else gradient.div_(count or 1.0)
        if self.config.clip_norm <= 0 and self.config.non_finite == "ignore" and self.loss_scale is None:
            return torch.empty(0, device=self.device)
        return gradient_norms([p.grad for p in self._master.values()], self.device)

    def update(self, step: int, norms: Tensor | None) -> None:
        if norms is not None and self.config.clip_norm > 0:
            given = [g for n in self.owned if (g := self._master[n].grad) is not None]
            clip(given, norms, self.config.clip_norm)
        try:
            self._optimizers.step(step)
        except Exception as e:
            raise_if_jobs("the optimizer's step", e)
            raise
        self._refresh()
        if self.loss_scale is not None:
            self.loss_scale.updated()

    def skip_update(self) -> None:
        self._optimizers.drop_gradients()
        if self.loss_scale is not None:
            self.loss_scale.left_out()

    def _refresh(self) -> None:
        """Where the optimizer updates a wider copy, compute with the new values."""
        with torch.no_grad():
            for name, own in self.trainable.items():
                if own in self._master and self._variables[name] is not self._master[own]:
                    self._variables[name].copy_(self._master[own])

    def state(self) -> dict[str, Tensor]:
        found = {name: p.detach() for name, p in self._master.items()}
        found |= {op.target: self._variables[op.name] for op in self.train.variables() if op.name in self._written}
        if self.loss_scale is not None:
            found[LOSS_SCALE] = self.loss_scale.state()
        return found | self._optimizers.state()

    def gradients(self) -> dict[str, Tensor]:
        return {n: g for n in self.owned if (g := self._master[n].grad) is not None}
