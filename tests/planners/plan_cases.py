"""Problems for planner tests: graphs and fleets built by hand, and every cut of them by brute force."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import msgspec

from isthmus.api.make_plan import with_bound
from isthmus.cost import Problem, place
from isthmus.cost.placement import Placement, recomputing
from isthmus.fleet import Device, Fleet, Link, Links, Route
from isthmus.graph import Affine, Flow, Op, OpGraph, Ref, TensorSpec, cuts
from isthmus.plans import Plan, classic_in_flight
from isthmus.protocol import RunSpec
from isthmus.simulator import simulate
from isthmus.trace import steady_step_s


def tensor(*shape: int, dtype: str = "float32", batched: bool = True) -> TensorSpec:
    full = (Affine(1), *shape) if batched else shape
    return TensorSpec(dtype, full, tuple(1 for _ in full))


def operator(name: str, *args: str | Ref, flops: int = 0, saved: int = 0, width: int = 1, **more: object) -> Op:
    refs = tuple(a if isinstance(a, Ref) else Ref(a) for a in args)
    fields = {
        "outputs": (tensor(width),),
        "requires_grad": (True,),
        "flops_forward": Affine(flops),
        "flops_backward": Affine(2 * flops),
        "saved_bytes": Affine(saved),
        **more,
    }
    return Op(name=name, kind="operator", target="aten.test.default", args=refs, **fields)  # type: ignore[arg-type]


def parameter(name: str, *shape: int, trained: bool = True) -> Op:
    return Op(
        name=name,
        kind="parameter",
        target=f"module.{name}",
        outputs=(tensor(*shape, batched=False),),
        requires_grad=(trained,),
    )


def placeholder(name: str, *shape: int, dtype: str = "int64") -> Op:
    return Op(
        name=name, kind="placeholder", target=name, outputs=(tensor(*shape, dtype=dtype),), requires_grad=(False,)
    )


def random_graph(seed: int, operators: int) -> OpGraph:
    """A chain with skips, shared and frozen parameters, integer side values, two-output ops, and free operators."""
    rng = random.Random(seed)
    ops = [placeholder("tokens", 4), placeholder("labels", 1), parameter("tied", rng.randint(1, 40))]
    ops.append(
        Op(
            name="ramp",
            kind="operator",
            target="aten.arange.default",
            outputs=(tensor(2, batched=False),),
            requires_grad=(False,),
            flops_forward=Affine(0, 7),
        )
    )
    made: list[Ref] = [Ref("tokens")]
    for k in range(operators):
        args = [made[-1]]
        if rng.random() < 0.4:
            args.append(rng.choice(made))
        if rng.random() < 0.3:
            args.append(Ref("tied"))
        if rng.random() < 0.2:
            args.append(Ref("ramp"))
        if rng.random() < 0.4:
            ops.append(parameter(f"w{k}", rng.randint(1, 30), trained=rng.random() < 0.8))
            args.append(Ref(f"w{k}"))
        flops, saved, width = rng.randint(1, 20), rng.choice([0, rng.randint(1, 30)]), rng.randint(1, 12)
        double = rng.random() < 0.2
        ops.append(
            operator(
                f"op{k}",
                *args,
                flops=flops,
                saved=saved,
                outputs=(tensor(width), tensor(2, dtype="int64")) if double else (tensor(width),),
                requires_grad=(True, False) if double else (True,),
            )
        )
        made.append(Ref(f"op{k}"))
        if double:
            made.insert(-1, Ref(f"op{k}", 1))
    ops.append(operator("loss", made[-1], "labels", flops=1, outputs=(tensor(batched=False),)))
    working = random.Random(f"working {seed}")  # draws of its own
    ops = [op if op.kind != "operator" else at_work(op, working.choice([0, working.randint(1, 60)])) for op in ops]
    return OpGraph(name=f"random-{seed}", mode="train", ops=tuple(ops), loss=Ref("loss"))


def at_work(op: Op, size_bytes: int) -> Op:
    """The operator with so many bytes per sample that it needs while it runs."""
    return msgspec.structs.replace(op, working_bytes=Affine(size_bytes))


def saving(graph: OpGraph, times: int) -> OpGraph:
    """The graph with operators that save so many times as much for backward: then recomputing pays more often."""
    more = (msgspec.structs.replace(op, saved_bytes=Affine(times * op.saved_bytes.per_sample)) for op in graph.ops)
    return msgspec.structs.replace(graph, ops=tuple(more))


def fleet_of(
    speeds: Sequence[float], seed: int = 0, *, memory: Sequence[int] | None = None, name: str = "hand"
) -> Fleet:
    """Devices of these speeds; every directed link has its own latency and bandwidth."""
    rng = random.Random(seed)
    devices = tuple(
        Device(name=f"d{i}", region="here", flops_per_s=s, memory_bytes=memory[i] if memory else 1 << 40)
        for i, s in enumerate(speeds)
    )
    routes = tuple(
        Route(a.name, b.name, Link(rng.choice([0.0, rng.uniform(0, 2)]), rng.uniform(5, 200)))
        for a, b in itertools.permutations(devices, 2)
    )
    return Fleet(name=name, devices=devices, links=Links(devices=routes))


def problem_of(
    graph: OpGraph, fleet: Fleet, *, micro_batches: int = 4, schedule: str = "1f1b", **more: object
) -> Problem:
    return Problem(
        flow=Flow(graph),
        fleet=fleet,
        micro_batch_size=2,
        micro_batches=micro_batches,
        schedule=schedule,
        **more,  # type: ignore[arg-type]
    )


def every_cut(problem: Problem, order: Sequence[str]) -> Iterator[Placement]:
    """With every choice of stages that recompute, where the problem allows it."""
    positions = [c.position for c in cuts(problem.flow)]
    choices = list(itertools.product((False, True) if problem.recompute else (False,), repeat=len(order)))
    for boundaries in itertools.combinations(positions, len(order) - 1):
        placed = place(problem, order, boundaries)
        for recompute in choices:
            yield recomputing(placed, recompute)


def fits(placed: Placement) -> bool:
    """Whether every stage fits its device with the classic number of micro-batches in flight."""
    problem = placed.problem
    held = classic_in_flight(problem.schedule, len(placed.order), problem.micro_batches)
    return all(
        size.memory(k, again).total <= problem.fleet.device(name).memory_bytes
        for size, again, k, name in zip(placed.sizes, placed.recompute, held, placed.order, strict=True)
    )


def brute_force(problem: Problem, orders: Sequence[Sequence[str]]) -> float:
    """The least closed-form step time over all orders given, all cuts and all choices of what recomputes; infinite
    where nothing fits."""
    return min(
        (p.times.step_s(problem.micro_batches) for order in orders for p in every_cut(problem, order) if fits(p)),
        default=float("inf"),
    )


def simulated_s(problem: Problem, plan: Plan, steps: int = 8) -> float:
    """Seconds of a steady step."""
    spec = RunSpec(steps=steps, micro_batches=plan.micro_batches, micro_batch_size=plan.micro_batch_size)
    return steady_step_s(simulate(plan, problem.fleet, spec), undisturbed=True)


def document(problem: Problem, plan: Plan, counts: Sequence[int] = ()) -> Plan:
    """The plan as commands write it: simulated, and with a bound over these numbers of micro-batches."""
    predicted = msgspec.structs.replace(plan.predicted, steady_s=simulated_s(problem, plan))
    simulated = msgspec.structs.replace(plan, predicted=predicted, constraints=problem.constraints)
    return with_bound(problem, simulated, counts or (problem.micro_batches,))


def all_orders_of(fleet: Fleet) -> list[tuple[str, ...]]:
    return [o for k in range(1, len(fleet.names) + 1) for o in itertools.permutations(fleet.names, k)]


def gpt_graph(layers: int, *, width: int = 64, sequence: int = 32, vocabulary: int = 500, tied: bool = True) -> OpGraph:
    """A decoder of `layers` blocks of about 50 operators, with views, residuals, a mask that is free, and a loss."""
    tokens, wide = sequence, width
    ops = [placeholder("tokens", tokens), placeholder("labels", tokens), parameter("wte", vocabulary, wide)]
    ops.append(
        Op(
            name="mask",
            kind="operator",
            target="aten.tril.default",
            outputs=(tensor(tokens, tokens, batched=False),),
            requires_grad=(False,),
        )
    )

    def add(name: str, *args: str, size: tuple[int, ...] = (tokens, wide), flops: int = 0, saved: int = 0) -> str:
        ops.append(operator(name, *args, flops=flops, saved=saved, outputs=(tensor(*size),), module=name.split(".")[0]))
        return name

    size = tokens * wide
    x = add("embed", "tokens", "wte", saved=8 * tokens)
    for k in range(layers):
        x = _gpt_block(f"h{k}", x, ops, add, (tokens, wide))
    if not tied:
        ops.append(parameter("head", vocabulary, wide))
    x = add("final_norm", x, flops=5 * size, saved=4 * size)
    x = add("logits", x, "wte" if tied else "head", size=(tokens, vocabulary), flops=2 * size * vocabulary)
    x = add("softmax", x, size=(tokens, vocabulary), flops=3 * tokens * vocabulary, saved=4 * tokens * vocabulary)
    ops.append(operator("loss", x, "labels", flops=tokens, outputs=(tensor(batched=False),)))
    return OpGraph(name=f"gpt-{layers}", mode="train", ops=tuple(ops), loss=Ref("loss"))


def _gpt_block(name: str, x: str, ops: list[Op], add, shape: tuple[int, int]) -> str:  # type: ignore[no-untyped-def]
    tokens, wide = shape
    size = tokens * wide
    weights = {"qkv": (3 * wide, wide), "proj": (wide, wide), "up": (4 * wide, wide), "down": (wide, 4 * wide)}
    for weight, dims in weights.items():
        ops.append(parameter(f"{name}.w_{weight}", *dims))
    y = add(f"{name}.norm1", x, flops=5 * size, saved=4 * size)
    y = add(f"{name}.qkv", y, f"{name}.w_qkv", size=(tokens, 3 * wide), flops=6 * size * wide, saved=4 * size)
    heads = [add(f"{name}.{h}", y) for h in "qkv"]
    for step in ("view", "transpose", "scale"):
        heads = [add(f"{h}.{step}", h, flops=size if step == "scale" else 0) for h in heads]
    y = add(f"{name}.scores", heads[0], heads[1], size=(tokens, tokens), flops=2 * size * tokens, saved=8 * size)
    y = add(f"{name}.masked", y, "mask", size=(tokens, tokens), flops=tokens * tokens)
    y = add(f"{name}.softmax", y, size=(tokens, tokens), flops=3 * tokens * tokens, saved=4 * tokens * tokens)
    y = add(f"{name}.dropout", y, size=(tokens, tokens), flops=tokens * tokens, saved=4 * tokens * tokens)
    y = add(f"{name}.mix", y, heads[2], flops=2 * size * tokens, saved=4 * size)
    for step in ("back", "contiguous", "merge"):
        y = add(f"{name}.{step}", y)
    y = add(f"{name}.proj", y, f"{name}.w_proj", flops=2 * size * wide, saved=4 * size)
    y = add(f"{name}.proj_view", y)
    y = add(f"{name}.proj_dropout", y, flops=size, saved=size)
    x = add(f"{name}.add1", x, y, flops=size)
    y = add(f"{name}.norm2", x, flops=5 * size, saved=4 * size)
    y = add(f"{name}.flat", y)
    y = add(f"{name}.up", y, f"{name}.w_up", size=(tokens, 4 * wide), flops=8 * size * wide, saved=4 * size)
    for step in ("half", "cube", "scaled", "tanh", "plus", "times"):
        y = add(f"{name}.gelu_{step}", y, size=(tokens, 4 * wide), flops=4 * size, saved=16 * size)
    y = add(f"{name}.down", y, f"{name}.w_down", flops=8 * size * wide, saved=16 * size)
    for step in ("down_view", "down_dropout"):
        y = add(f"{name}.{step}", y, flops=size if "dropout" in step else 0)
    return add(f"{name}.add2", x, y, flops=size)
