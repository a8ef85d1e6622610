"""Small plans and fleets, written down rather than planned."""

from collections.abc import Iterable, Sequence

from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.plans import (
    Edge,
    Plan,
    Prediction,
    Replica,
    Schedule,
    SharedParameter,
    Stage,
    StageMemory,
    classic_in_flight,
)

FLOPS_PER_S = 1_000
"""Of every device, so that FLOPs are milliseconds."""
INSTANT = Link(0.0, 1e30)


def names(stages: int) -> list[str]:
    return [f"d{s}" for s in range(stages)]


def make_fleet(stages: int, link: Link = INSTANT) -> Fleet:
    devices = tuple(Device(name=n, region="r", flops_per_s=FLOPS_PER_S, memory_bytes=1) for n in names(stages))
    return Fleet(name="test", devices=devices, links=Links(default=link))


def make_edge(source: int, target: int, size_bytes: int = 8, *, gradients: bool = True) -> Edge:
    value = (f"v{source}",)
    return Edge(
        source=source,
        target=target,
        values=value,
        gradients=value if gradients else (),
        forward_bytes=size_bytes,
        backward_bytes=size_bytes if gradients else 0,
    )


def chain(stages: int, size_bytes: int = 8) -> tuple[Edge, ...]:
    return tuple(make_edge(s, s + 1, size_bytes) for s in range(stages - 1))


def make_plan(
    milliseconds: Sequence[tuple[int, int]],
    edges: Iterable[Edge] | None = None,
    *,
    micro_batches: int = 6,
    in_flight: Sequence[int] | str = "1f1b",
    shared: Iterable[SharedParameter] = (),
    loss_stage: int = -1,
    weights: Sequence[int] = (),
) -> Plan:
    """One stage for each (forward, backward) duration, of whose backward `weights` is apart; a chain unless told
    otherwise."""
    stages = len(milliseconds)
    limits = classic_in_flight(in_flight, stages, micro_batches) if isinstance(in_flight, str) else tuple(in_flight)
    replica = Replica(
        stages=tuple(_stage(s, f, b) for s, (f, b) in enumerate(milliseconds)),
        edges=chain(stages) if edges is None else tuple(edges),
        shared=tuple(shared),
        loss_stage=loss_stage,
        micro_batches=micro_batches,
        schedule=Schedule("zero-bubble" if weights else "1f1b", limits, tuple(weights)),
    )
    return Plan(
        model="drawn",
        fleet="test",
        planner="hand",
        micro_batch_size=1,
        micro_batches=micro_batches,
        replicas=(replica,),
        predicted=Prediction(step_s=0, micro_batches=1, period_s=0, fill_s=0, eq3_step_s=0, bottleneck=""),
    )


def _stage(number: int, forward: int, backward: int) -> Stage:
    return Stage(
        device=f"d{number}",
        first=number,
        last=number,
        first_op=f"op{number}",
        last_op=f"op{number}",
        flops_forward=forward,
        flops_backward=backward,
        parameter_bytes=0,
        memory=StageMemory(weights=0, gradients=0, optimizer=0, activations=0),
    )
