"""How fast this machine's CPU, or an accelerator of it, computes: the first layers of a job's model as a stage, and its
matrix products and attention; without a job Sky Computing's benchmark, a stack of ten convolutions of 256 channels,
kernel 3, forward and backward; the batch and the images are smaller where theirs (32, 64 x 64) would take minutes; and
what it could do at best, in a product of two large matrices: what training reaches and that are FusionLLM's S and S*,
and their ratio is lambda.

`python -m isthmus.runtime.service.speed ACCELERATOR ENGINE [BYTES]`, with how much memory its owner gives, reads a
`MeasureSpeed` from standard input and prints JSON. All of it is computed by the engine that would compute a stage.

How fast the first layers of a job's model are computed here: as a stage of a run, forward and backward.

Weights and batches are made up here. What a coordinator sends is the stage's graph: its operators are on the allow-list
(`Program`), and the process that computes it has a bound on memory and time.
"""

from __future__ import annotations

import contextlib
import gc
import math
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial

import msgspec
import torch
from torch import Tensor, nn

from isthmus.accelerators import Accelerator, open_accelerator
from isthmus.accelerators.copies import to_device
from isthmus.engines import EngineName, check_engine
from isthmus.errors import IsthmusError
from isthmus.free_memory import available_bytes
from isthmus.graph import Op, Ref, StageGraph
from isthmus.job.settings import DTYPES, Precision
from isthmus.runtime.messages.probe import (
    AttentionShape,
    Kind,
    LayerTrial,
    MatrixProduct,
    MeasureSpeed,
    SpeedSample,
    SyntheticColumn,
)
from isthmus.runtime.processes.memory import limit_memory, machine_memory_bytes
from isthmus.training.engine import TorchEngine
from isthmus.training.faults import is_drivers, is_short_of_memory
from isthmus.training.jax import Function, compute_by_jax, jax_functions
from isthmus.units import format_size

ENOUGH_S = 0.5  # the next stage, of twice the work, is not tried after one that takes this long
_NOTHING = StageGraph(index=0, ops=(), columns=(), receives=(), sends=(), shared_from={}, shared_with={})
Timer = Callable[[Callable[[], object]], float]  # seconds that something takes on the accelerator


def extent(operators: int, whole: int) -> str:
    """Return the text that says which layers are measured."""
    return f"all {whole} operators" if operators == whole else f"the first {operators} of {whole} operators"


def measure_layers(
    accelerator: Accelerator,
    trial: LayerTrial,
    seconds: Timer,
    offered_bytes: int | None = None,
    engine: EngineName = "torch",
) -> tuple[SpeedSample | None, str]:
    """Measure the longest stage that fits and comes soon enough; return its speed, and why there is no longer one,
    unless that is for lack of time. `offered_bytes` are those of the memory that the owner gives."""
    found: SpeedSample | None = None
    for layers in trial.layers:
        these = extent(layers.operators, trial.operators)
        needed, free = layers.memory_bytes, _free_bytes(accelerator, offered_bytes)
        if needed > free:
            return found, f"{these} take {format_size(needed)}, {format_size(free)} are free"
        try:
            taken_s = _taken_s(accelerator, trial, layers.stage, seconds, engine)
        except Exception as e:
            if is_drivers(e):
                raise
            short, text = is_short_of_memory(e), " ".join(str(e).split())[:200]
            text = "out of memory" if short else text if isinstance(e, IsthmusError) else f"{type(e).__name__}: {text}"
            return found, f"{these}: {text}"
        finally:
            gc.collect()
            accelerator.release_cached()
        found = SpeedSample(
            what="layers",
            precision=trial.precision,
            operators=layers.operators,
            seconds=taken_s,
            flops=layers.flops.at(trial.engine.micro_batch_size),
        )
        if taken_s >= ENOUGH_S:
            break
    return found, ""


def _free_bytes(accelerator: Accelerator, offered_bytes: int | None) -> int:
    memory = accelerator.memory()
    free = memory.free + (memory.reserved - memory.allocated if accelerator.asynchronous else 0)
    return free if offered_bytes is None else min(free, offered_bytes)


def _taken_s(accelerator: Accelerator, trial: LayerTrial, stage: StageGraph, seconds: Timer, name: EngineName) -> float:
    """Return the seconds of a micro-batch's forward and backward."""
    engine = TorchEngine(stage, _NOTHING, trial.engine, _MadeUp(accelerator, stage), accelerator=accelerator)
    columns = (trial.columns[name] for name in stage.columns)
    batch = {Ref(c.op): to_device(accelerator, _made_up(c, trial.engine.micro_batch_size)) for c in columns}
    if name == "jax":
        compute_by_jax(engine, batch)
    due = {c.value for c in stage.sends if c.gradient}

    def act() -> None:
        sent = engine.forward(0, 0, batch)
        engine.backward(0, [{ref: torch.ones_like(value) for ref, value in sent.items() if ref in due}])

    return seconds(act)


def _made_up(column: SyntheticColumn, size: int) -> Tensor:
    dtype, shape = _dtype(column.spec.dtype), column.spec.shape_at(size)
    draws = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=draws).to(dtype)
    return torch.randint(0, column.limit or 1, shape, generator=draws).to(dtype)


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


class _MadeUp(Mapping[str, Tensor]):
    """Values of a stage's variables, each made when it is asked for: there is no second copy of the weights."""

    def __init__(self, accelerator: Accelerator, stage: StageGraph) -> None:
        self._accelerator = accelerator
        self._ops = {op.target: op for op in stage.variables()}

    def __getitem__(self, name: str) -> Tensor:
        return _value(self._ops[name], self._accelerator.device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._ops)

    def __len__(self) -> int:
        return len(self._ops)


def _value(op: Op, device: torch.device) -> Tensor:
    """Such that a value keeps its size from layer to layer: numbers near zero take a CPU far longer. Whole numbers may
    be indices: none is too large."""
    dtype, shape = _dtype(op.outputs[0].dtype), op.outputs[0].shape_at(1)
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    if len(shape) < 2:
        return torch.ones(shape, dtype=dtype, device=device)
    return torch.randn(shape, device=device).mul_(math.prod(shape[1:]) ** -0.5).to(dtype)


def share_of(trial: LayerTrial, ranks: int) -> LayerTrial:
    """Return the trial of one of so many ranks: its share of a micro-batch, where the graph and the size let it be
    shared."""
    size, rest = divmod(trial.engine.micro_batch_size, ranks)
    if rest or not trial.any_batch:
        return trial
    return msgspec.structs.replace(trial, engine=msgspec.structs.replace(trial.engine, micro_batch_size=size))


ATEN = torch.ops.aten
LAYERS, CHANNELS, KERNEL = 10, 256, 3
SIDES = (8, 16, 32, 64)
LEAST_S = 0.5  # a pass that takes this long is long enough to time
MATRIX_SIDES = (256, 512, 1024, 2048, 4096, 8192, 16384)
LEAST_PRODUCT_S = 0.1  # only the matrix product is timed, so less time is enough for a reliable measurement
COPIED_BYTES = 1 << 26
LEAST_PASSES, MOST_PASSES, PASSES_S = 3, 50, 1.0
LONG_S = 2.0  # work that takes longer than these seconds needs one pass only


class TimedWork(msgspec.Struct, frozen=True, kw_only=True):
    """Work that is timed, as in `Computes`."""

    figures: tuple[SpeedSample, ...]
    shorter: str = ""
    peak_flops_per_s: float
    host_bytes_per_s: float = 0.0
    memory_bytes: int


def seconds(accelerator: Accelerator, act: Callable[[], object]) -> float:
    """Return the seconds of the fastest of some passes, by the hardware's own clock, after one that is not counted. A
    machine that is busy with something else shows its speed in one of them."""
    if _pass_s(accelerator, act) > LONG_S:
        return _pass_s(accelerator, act)
    taken_s: list[float] = []
    while len(taken_s) < LEAST_PASSES or (len(taken_s) < MOST_PASSES and sum(taken_s) < PASSES_S):
        taken_s.append(_pass_s(accelerator, act))
    return max(min(taken_s), 1e-9)


def _pass_s(accelerator: Accelerator, act: Callable[[], object]) -> float:
    begun = accelerator.record(timed=True)
    act()
    ended = accelerator.record(timed=True)
    ended.synchronize()
    return begun.seconds_to(ended)


ByEngine = Callable[[Function], Function]  # makes an engine's function of one of torch's operators


def by_torch(function: Function) -> Function:
    return function


def measure(
    accelerator: Accelerator, asked: MeasureSpeed, offered_bytes: int | None = None, engine: EngineName = "torch"
) -> TimedWork:
    """`offered_bytes` is what its owner gives of the memory."""
    by_engine = jax_functions(accelerator) if engine == "jax" else by_torch
    figures: list[SpeedSample] = []
    shorter = ""
    memory = accelerator.memory()
    host_bytes = machine_memory_bytes() if (available := available_bytes()) is None else available
    if asked.trial is not None:
        asked.trial.engine.kernels.use(accelerator)
        found, shorter = measure_layers(
            accelerator, asked.trial, lambda act: seconds(accelerator, act), offered_bytes, engine
        )
        figures += [found] if found is not None else []
    precisions: tuple[Precision, ...] = ("fp32",)
    if accelerator.asynchronous:  # a CPU's bf16 is computed by other kernels from one to the next machine: layers tell
        precisions = "fp32", "bf16"
    for precision in precisions:
        with contextlib.suppress(RuntimeError) if precision == "bf16" else contextlib.nullcontext():
            figures += measure_operators(accelerator, asked, precision, by_engine)
            if not any(figure.precision == precision for figure in figures):
                figures += measure_convolutions(accelerator, precision, by_engine)
    return TimedWork(
        figures=tuple(figures),
        shorter=shorter,
        peak_flops_per_s=measure_peak(accelerator, by_engine),
        host_bytes_per_s=measure_copies(accelerator) if accelerator.asynchronous else 0.0,
        memory_bytes=memory.free + memory.reserved if accelerator.asynchronous else host_bytes,
    )


def conv_flops(side: int, batch: int = 1) -> int:
    """Return the FLOPs of one pass: forward, and twice as much backward (but for the first layer's input, which needs
    no gradient)."""
    forward = 2 * batch * CHANNELS * CHANNELS * KERNEL * KERNEL * side * side
    return forward * (3 * LAYERS - 1)


def measure_convolutions(
    accelerator: Accelerator, precision: Precision, by_engine: ByEngine = by_torch
) -> list[SpeedSample]:
    """Passes of the largest size that is needed and fits, the best of all sizes; none where no size fits."""
    found: list[SpeedSample] = []
    with _where_it_fits():
        layers = [nn.Conv2d(CHANNELS, CHANNELS, KERNEL, padding=1) for _ in range(LAYERS)]
        variables = [tuple(layer.to(accelerator.device, DTYPES[precision]).parameters()) for layer in layers]
        convolution = by_engine(lambda x, weight, bias: (ATEN.conv2d.default(x, weight, bias, [1, 1], [1, 1]),))

        def act(images: torch.Tensor) -> None:
            for weight, bias in variables:
                (images,) = convolution(images, weight, bias)
            images.square().mean().backward()

        for side in SIDES:
            images = torch.randn(1, CHANNELS, side, side).to(accelerator.device, DTYPES[precision])
            taken_s = seconds(accelerator, partial(act, images))
            found.append(SpeedSample(what="convolutions", precision=precision, flops=conv_flops(side), seconds=taken_s))
            if taken_s >= LEAST_S:
                break
    return sorted(found, key=lambda figure: figure.flops_per_s)[-1:]


def measure_operators(
    accelerator: Accelerator, asked: MeasureSpeed, precision: Precision, by_engine: ByEngine = by_torch
) -> Iterator[SpeedSample]:
    """A model's products, and its attention, each as often as the model has it; forward. What does not fit into memory
    is left out."""
    kinds: tuple[Kind, ...] = ("products", "attention")
    for what in kinds:
        flops, taken_s = 0, 0.0
        for operator in (o for o in asked.operators if isinstance(o, MatrixProduct) == (what == "products")):
            with _where_it_fits():
                one_s = seconds(accelerator, _act(accelerator, operator, DTYPES[precision], by_engine))
                flops, taken_s = flops + operator.flops, taken_s + operator.count * one_s
        if flops:
            yield SpeedSample(what=what, precision=precision, flops=flops, seconds=taken_s)


def _act(
    accelerator: Accelerator, operator: MatrixProduct | AttentionShape, dtype: torch.dtype, by_engine: ByEngine
) -> Callable[[], object]:
    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=accelerator.device).to(dtype)

    if isinstance(operator, MatrixProduct):
        a, b = made(operator.batch, operator.m, operator.k), made(operator.batch, operator.k, operator.n)
        return partial(by_engine(lambda a, b: (ATEN.bmm.default(a, b),)), a, b)
    o = operator
    queries, keys = made(o.batch, o.heads, o.queries, o.size), made(o.batch, o.key_heads, o.keys, o.size)
    values = made(o.batch, o.key_heads, o.keys, o.value_size)
    how = {"enable_gqa": o.heads != o.key_heads}
    if o.masked:
        masked = by_engine(lambda q, k, v, mask: (ATEN.scaled_dot_product_attention.default(q, k, v, mask, **how),))
        return partial(masked, queries, keys, values, made(o.queries, o.keys))
    how["is_causal"] = o.causal
    plain = by_engine(lambda q, k, v: (ATEN.scaled_dot_product_attention.default(q, k, v, **how),))
    return partial(plain, queries, keys, values)


@contextlib.contextmanager
def _where_it_fits() -> Generator[None]:
    """Leave out the work inside if memory is too short for it."""
    try:
        yield
    except (RuntimeError, MemoryError) as e:
        if not is_short_of_memory(e):
            raise


def measure_peak(accelerator: Accelerator, by_engine: ByEngine = by_torch) -> float:
    """FLOP/s of the product of two large square matrices: of the first size that is long enough, or the largest that
    fits."""
    found, product = 0.0, by_engine(lambda a, b: (ATEN.mm.default(a, b),))
    for side in MATRIX_SIDES:
        taken_s = LEAST_PRODUCT_S
        with _where_it_fits():
            a, b = (torch.randn(side, side).to(accelerator.device) for _ in range(2))
            taken_s = seconds(accelerator, partial(product, a, b))
            found = 2 * side**3 / taken_s
        if taken_s >= LEAST_PRODUCT_S:
            break
    return found


def measure_copies(accelerator: Accelerator) -> float:
    """Bytes/s between the accelerator and buffers of the host that copies reach without waiting, the slower way."""
    accelerator.release_cached()
    size_bytes = max(1, min(COPIED_BYTES, accelerator.memory().free // 4))
    here = accelerator.host_buffer(size_bytes)
    here.zero_()
    there = torch.empty(size_bytes, dtype=torch.uint8, device=accelerator.device)
    up_s = seconds(accelerator, lambda: there.copy_(here, non_blocking=True))
    down_s = seconds(accelerator, lambda: here.copy_(there, non_blocking=True))
    return size_bytes / max(up_s, down_s)


if __name__ == "__main__":
    wanted = msgspec.json.decode(sys.stdin.buffer.read(), type=MeasureSpeed)
    name, engine, offered = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else None
    if offered is not None and name == "cpu":  # a driver maps more than it uses
        limit_memory(offered)
    torch.set_num_threads(wanted.threads)
    found = measure(open_accelerator(name), wanted, offered, check_engine("engine", engine))
    sys.stdout.buffer.write(msgspec.json.encode(found))
