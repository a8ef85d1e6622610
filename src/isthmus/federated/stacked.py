"""Several clients of equal numbers of samples at work as one: their vectors stacked, one vmap over all of them.

For small models, where calling torch takes longer than what it computes. The algorithm is the same code: vectors have a
first dim of clients. Sums inside a batched kernel may be taken in another order, so bits differ from one by one (the
numbers agree to 1e-5), and a run keeps to what it began with.

Torch writes the operators down, and what it does for nothing is left out. What is left are the same operators on the
same numbers, so results keep their bits. For small models the list's length is what counts: of a perceptron's step
under vmap a third goes.
"""
# What an operator writes to is known to nobody but its schema.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.dialect.common.cse_pass import CSEPass, get_CSE_banned_ops

from isthmus.errors import UserError
from isthmus.federated.algorithms import ClientUpdate
from isthmus.federated.local import ConfiguredLocal, LocalConfig, RoundSteps, Term
from isthmus.federated.resident import Batch, Resident
from isthmus.rng import orders

Operation = Callable[..., Sequence[Tensor]]
_aten = torch.ops.aten
_SHAPING = (_aten.view.default, _aten.expand.default, _aten._unsafe_view.default)
_ALIKE: dict[object, float] = {_aten.zeros_like.default: 0, _aten.ones_like.default: 1}
_CONSTANT = (_aten.scalar_tensor.default, *_ALIKE)  # operators whose result follows from shapes
_DIRECT, _METHODS = torch._VF, torch._C.TensorBase
"""Where operators have functions of their own, which take half as long to call as through their schemas."""


def written_down(act: Operation, given: Sequence[Tensor]) -> Operation:
    """Trace `act` on tensors of these shapes; no result shares memory with what is given. RuntimeError where it cannot
    be written down."""
    written = make_fx(act)(*given)
    if any(_changes(node) for node in written.graph.nodes):
        return written.forward  # to leave something out might change what another operator finds
    for node in written.graph.nodes:
        if node.op == "call_function" and _is_idle(node):
            node.replace_all_uses_with(node.args[0])
            written.graph.erase_node(node)
    shared = CSEPass(banned_ops=get_CSE_banned_ops())(written)
    assert shared is not None, "the pass gives a copy"
    short = shared.graph_module
    constants = _kept_constants(short, given[0].device)
    _turned_once(short.graph)
    short.graph.eliminate_dead_code()
    short.recompile()
    shared_bounds = {tensor.untyped_storage().data_ptr() for tensor in (*given, *constants)}
    if any(tensor.untyped_storage().data_ptr() in shared_bounds for tensor in short(*given)):
        return make_fx(act)(*given).forward
    return _direct(short, given)


def _direct(module: fx.GraphModule, given: Sequence[Tensor]) -> Operation:
    """The operators called by functions of their own, where that gives the same."""
    graph = copy.deepcopy(module.graph)
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = node.target._schema.name.removeprefix("aten::")
        if hasattr(_DIRECT, name):
            node.target = getattr(_DIRECT, name)
        elif hasattr(_METHODS, name):
            node.op, node.target = "call_method", name
    quick = fx.GraphModule(module, graph)
    try:
        alike = all(torch.equal(a, b) for a, b in zip(module(*given), quick(*given), strict=True))
    except (TypeError, RuntimeError):  # its arguments go by other names there
        alike = False
    return (quick if alike else module).forward


def _changes(node: fx.Node) -> bool:
    """Return whether it writes to one of its inputs."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_idle(node: fx.Node) -> bool:
    """A shape that is what it was, or a product with 1 (the beta of `addmm`)."""
    given = node.args[0] if node.args else None
    if not isinstance(given, fx.Node):
        return False
    before, after = given.meta.get("tensor_meta"), node.meta.get("tensor_meta")  # none where several tensors come out
    if before is None or after is None or (before.shape, before.dtype) != (after.shape, after.dtype):
        return False
    return node.target in _SHAPING or (node.target is _aten.mul.Scalar and node.args[1:] == (1,))


def _kept_constants(module: fx.GraphModule, device: torch.device) -> list[Tensor]:
    """Make constants once. For gradients only the loss's shape is needed, so that most of it is left out with them."""
    found: list[Tensor] = []
    for node in module.graph.nodes:
        meta = node.meta.get("tensor_meta")
        if node.op != "call_function" or node.target not in _CONSTANT or meta is None:
            continue
        like = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)
        value = _ALIKE.get(node.target, node.args[0])
        assert isinstance(value, bool | int | float), "a scalar is given as a number"
        found.append(like.fill_(value))
        name = f"constant_{len(found)}"
        setattr(module, name, found[-1])
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(module.graph.create_node("get_attr", name))
        module.graph.erase_node(node)
    return found


def _turned_once(graph: fx.Graph) -> None:
    """Remove transpositions that are turned back."""
    for node in graph.nodes:
        before = node.args[0] if node.args else None
        if node.target is not _aten.transpose.int or not isinstance(before, fx.Node):
            continue
        if before.target is _aten.transpose.int and before.args[1:] in (node.args[1:], node.args[:0:-1]):
            node.replace_all_uses_with(before.args[0])


def get_ready() -> None:
    """Load what writing down needs: 800 modules, which copies of this process then have in common."""
    make_fx(torch.neg)(torch.zeros(1))


TRIED = (8, 32, 128)  # numbers of clients that a measurement tries, in this order, until more is slower
PAYS = 1.2  # so many times faster it must be to give up one by one
SLOWER = 1.1  # so many times: what is done once for all of them, orders and sums, is not measured, and speaks for more
LIKELY = 5  # shapes that are traced before the first round
HOT = 20  # calls with the same shapes after which they are traced: that takes as long as a hundred calls
APART, ROUNDING = 0.05, 1e-6
"""Two ways to train one client may differ by this share of a value's norm, as long training amplifies roundings, and
by so much in every number."""
Parts = Sequence[Tensor]
Shapes = tuple[bool | torch.Size, ...]  # after whether labels are counted


class Stacked:
    """Gradients of many models of one shape at once.

    Going through vmap, grad and the module's code takes longer than the arithmetic. For shapes that come often the
    operators are therefore written down once, and run from that list: the same operators, the same bits.
    """

    def __init__(self, resident: Resident) -> None:
        self._resident = resident
        self._names = list(resident.names)
        self._calls: Counter[Shapes] = Counter()
        self._traced: dict[Shapes, Operation] = {}

    def up(self, tensor: Tensor) -> Tensor:
        """Where the models are."""
        return self._resident.up(tensor)

    def gradient(self, weights: Tensor, batch: Batch) -> Tensor:
        """Gradients of the models' mean losses, [models, P], for weights [models, P] and columns [models, batch,
        ...]."""
        parts = self._gradients(weights, batch)(*self._resident.views(weights), *batch.values())
        return torch.cat([part.reshape(len(part), -1) for part in parts], dim=1)

    def descend(self, weights: Tensor, batches: Iterable[Batch], rate: float) -> None:
        """weights <- weights - rate x gradient, of each batch in turn, without a tensor of the whole gradient in
        between."""
        views = self._resident.views(weights)
        for batch in batches:
            for view, part in zip(views, self._gradients(weights, batch)(*views, *batch.values()), strict=True):
                view.sub_(part, alpha=rate)

    def _gradients(self, weights: Tensor, batch: Batch) -> Operation:
        shapes = self._shapes(weights, batch)
        if (traced := self._traced.get(shapes)) is not None:
            return traced
        self._calls[shapes] += 1
        return self._untraced(list(batch)) if self._calls[shapes] < HOT else self.trace(weights, batch)

    def trace(self, weights: Tensor, batch: Batch) -> Operation:
        """Write down the operators for these shapes now. What looks at numbers, as masks of transformers, cannot be."""
        act, given = self._untraced(list(batch)), [*self._resident.views(weights), *batch.values()]
        try:
            found = written_down(act, given)
        except RuntimeError:
            found = act
            act(*given)  # whose error it is, if it is not one of writing down
        self._traced[self._shapes(weights, batch)] = found
        return found

    def _shapes(self, weights: Tensor, batch: Batch) -> Shapes:
        return self._resident.uneven, weights.shape, *(column.shape for column in batch.values())

    def _untraced(self, columns: Sequence[str]) -> Operation:
        names, resident, module = self._names, self._resident, self._resident.module

        def loss(parameters: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
            def call(**columns: Tensor) -> object:  # casts for each micro-batch: their gradients are added up uncast
                own = {name: value.to(resident.computes) for name, value in parameters.items()}
                return functional_call(module, own, (), columns)

            return resident.mean_loss(batch, call)

        gradient = vmap(grad(loss))

        def gradients(*given: Tensor) -> Parts:
            parameters, batch = given[: len(names)], given[len(names) :]
            found = gradient(dict(zip(names, parameters, strict=True)), dict(zip(columns, batch, strict=True)))
            return [found[name] for name in names]

        return gradients


def rows_for(count: int) -> int:
    """Return how many rows so many clients are given: few different numbers, so that each soon comes often enough to be
    traced, and at most three rows for nothing up to 32, a quarter above. Powers of two up to 8, then multiples of an
    eighth of the next power."""
    power = 1 << (count - 1).bit_length()
    step = power // 8
    return power if power <= 8 else -(-count // step) * step


def likely_shapes(
    sizes: NDArray[np.int64], clients: int, clients_per_vmap: int, batch_size: int
) -> list[tuple[int, int]]:
    """(rows, samples) of the batches that a phase of `clients` will have most often, where `sizes` (population,) are
    the
    samples of clients that are drawn evenly: within a deviation of what is expected of each size. At most `LIKELY`."""
    found: dict[tuple[int, int], float] = {}
    for size, count in zip(*np.unique_counts(sizes), strict=True):
        share = int(count) / len(sizes)
        expected, deviation = clients * share, math.sqrt(clients * share * (1 - share))
        if expected + deviation < 2:
            continue  # of this size there is hardly ever more than one
        least, most = (min(max(round(expected + sign * deviation), 2), clients_per_vmap) for sign in (-1, 1))
        steps = {min(size, batch_size), size % batch_size} - {0}
        for shape in {(rows_for(n), int(step)) for n in range(least, most + 1) for step in steps}:
            found[shape] = max(found.get(shape, 0.0), expected)
    return sorted(found, key=lambda shape: (-found[shape], shape))[:LIKELY]


class StackedLocal(ConfiguredLocal):
    """The `Local` of several clients in one round. Their data is one client's samples after another's, as many each."""

    def __init__(
        self,
        stacked: Stacked,
        config: LocalConfig,
        data: Batch,
        *,
        steps: RoundSteps,
        seed: int,
        round_: int,
        clients: Sequence[int],
    ) -> None:
        super().__init__(config, steps, len(next(iter(data.values()))) // len(clients))
        self._stacked = stacked
        self._clients = len(clients)
        self._rows = data
        self._used = config.used(self.samples)
        drawn = orders(seed, round_, clients, self.samples, config.epochs)
        drawn += np.arange(0, len(clients) * self.samples, self.samples)[:, None, None]
        self._orders = stacked.up(torch.from_numpy(np.ascontiguousarray(drawn.swapaxes(0, 1))).flatten(1))
        """[epochs, rows], of the rows of all clients."""

    def start(self, model: Tensor) -> Tensor:
        return model.expand(self._clients, -1).clone()

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of all clients in step: each one's own permutation."""
        for order in self._orders:
            yield from self._slices({name: column.index_select(0, order) for name, column in self._rows.items()})

    def _slices(self, rows: Batch) -> Iterator[Batch]:
        size, used = self._config.batch_size, self._used
        columns = self._columns(rows)
        if used == self.samples <= size:
            yield columns
            return
        for start in range(0, used, size):
            yield {name: column[:, start : min(start + size, used)] for name, column in columns.items()}

    def _columns(self, rows: Batch) -> Batch:
        """[clients, samples, ...] of each."""
        return {name: c.view(self._clients, self.samples, *c.shape[1:]) for name, c in rows.items()}

    def gradient(self, weights: Tensor, batch: Batch) -> Tensor:
        return self._stacked.gradient(self._of_each(weights), batch)

    def descend(self, model: Tensor, term: Term | None = None) -> Tensor:
        weights = self.start(model)
        if term is None:
            self._stacked.descend(weights, self.batches(), self.learning_rate)
            return weights.sub_(model)
        for batch in self.batches():
            gradient = self.gradient(weights, batch)
            term(gradient, weights)
            weights.sub_(gradient, alpha=self.learning_rate)
        return weights.sub_(model)

    def full_gradient(self, weights: Tensor) -> Tensor:
        weights = self._of_each(weights)
        total = torch.zeros_like(weights)
        columns = self._columns(self._rows)
        for part in self._config.parts(self.samples):
            batch = {name: column[:, part] for name, column in columns.items()}
            total.add_(self._stacked.gradient(weights, batch), alpha=(part.stop - part.start) / self.samples)
        return total

    def _of_each(self, weights: Tensor) -> Tensor:
        """Return the broadcast, a row for each client."""
        return weights.expand(self._clients, -1)


def check_alike(alone: ClientUpdate, several: ClientUpdate) -> None:
    """UserError where a client that was trained by itself returned other values than as the first of several: the
    algorithm mixes clients, by a sum over all dims say. Kernels that sum in another order differ by far less."""
    for name, value in alone.values.items():
        one, first = value.double().flatten(), several.values[name][0].double().flatten()
        off = float((one - first).norm()) if one.shape == first.shape else math.inf
        norm = float(one.norm())
        if off > APART * norm + ROUNDING * math.sqrt(len(one)) and value.dtype in (torch.float32, torch.float64):
            what = f"algorithm: {name!r} of a client trained together with others is off by {off:.3g} of {norm:.3g}"
            raise UserError(
                f"{what}: expected operations elementwise or over the last dim (or runtime.clients_per_vmap = 1)"
            )


def best_clients_per_vmap(resident: Resident, columns: Batch, most: int = TRIED[-1], *, repeats: int = 5) -> int:
    """Return how many clients are trained together fastest, by measurement on one batch, of `most` that an executor has
    in a round; 1 where the model does not allow it.

    Models that draw random numbers or keep running means are trained one by one: each client must have its own.
    """
    if most == 1 or resident.draws(columns):
        return 1
    resident.descend(start := resident.vector(), columns, 0.0, out=start)
    changed = resident.buffer_changes({})
    resident.set_buffers({})
    if changed:
        return 1
    model, stacked = resident.vector(), Stacked(resident)
    wait = resident.accelerator.synchronize
    plain_s = _quickest_s(lambda: resident.gradient(model, columns), wait, repeats)
    found, found_s = 1, plain_s / PAYS
    for count in sorted({min(count, rows_for(most)) for count in TRIED}):
        weights = model.expand(count, -1).clone()
        batch = {name: column.expand(count, *column.shape).clone() for name, column in columns.items()}
        try:
            stacked.trace(weights, batch)
        except RuntimeError:  # an operation without a batching rule, or control flow on values
            return 1
        each_s = _quickest_s(lambda w=weights, b=batch: stacked.gradient(w, b), wait, repeats) / count
        if each_s >= (found_s if found == 1 else found_s * SLOWER):
            break
        found, found_s = count, min(each_s, found_s)
    return found


def _quickest_s(act: Callable[[], object], wait: Callable[[], None], repeats: int) -> float:
    """`wait` is for what was begun to be done."""
    act()
    wait()
    found: list[float] = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        act()
        wait()
        found.append(time.perf_counter() - start_s)
    return min(found)
