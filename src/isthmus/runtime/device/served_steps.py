"""Checks the messages that a stage which generates text receives from its coordinator and its neighbours. All is
checked before anything is computed, allocated or kept. PeerError here does not name the sender."""

from __future__ import annotations

from collections.abc import Collection

from isthmus.errors import PeerError
from isthmus.graph.serving import POSITIONS
from isthmus.runtime.messages.generation import COORDINATOR, GenerateStep, NewPrompt, ServeStage


def check_stage(order: ServeStage, epoch: int, weights: Collection[str]) -> None:
    """`epoch`: of the newest stage that was loaded before. `weights` are those at hand, and those of the order."""
    graph = order.graph
    if order.epoch <= epoch:
        raise PeerError(f"sent a stage of epoch {order.epoch}, after one of epoch {epoch}")
    if order.stage != graph.index:
        raise PeerError(f"sent stage {order.stage} with the graph of stage {graph.index}")
    if absent := sorted(weights_of(order) - set(weights)):
        raise PeerError(f"sent stage {order.stage} without its weights {', '.join(absent)}")
    needed = {c.source for c in graph.receives} | {c.target for c in graph.sends}
    needed |= {0} if graph.loss is not None and order.stage > 0 else set()
    others = [neighbour.stage for neighbour in order.neighbours]
    if order.stage in others or len(set(others)) < len(others) or not needed.issubset(others):
        raise PeerError(f"sent stage {order.stage} with neighbours {others}, expected {sorted(needed)}")


def weights_of(order: ServeStage) -> set[str]:
    """Names of the variables that the stage has to be given."""
    return {op.target for op in order.graph.variables() if op.target != POSITIONS}


def check_step(order: ServeStage, step: GenerateStep) -> None:
    """Whether this stage may get such a step at all."""
    new, first = step.new, not order.graph.receives
    if (step.start == 0) != (new is not None):
        raise PeerError(f"sent a step at position {step.start} {'with' if new else 'without'} its prompt's settings")
    if step.start + step.count > order.context:
        raise PeerError(f"sent a step of {step.count} tokens at {step.start}, the model has {order.context} positions")
    if new is not None:
        _check_new(order, step, new)
    if len(step.tokens) != (step.count if first else 0):
        raise PeerError(f"sent {len(step.tokens)} tokens in a step of {step.count} to stage {order.stage}")
    if strange := [token for token in step.tokens if token >= order.vocabulary]:
        raise PeerError(f"sent token {strange[0]}, the model has 0 to {order.vocabulary - 1}")
    if first:
        _check_source(order, step)


def _check_new(order: ServeStage, step: GenerateStep, new: NewPrompt) -> None:
    most = new.sampling.max_tokens
    if new.made >= min(most, step.count):
        raise PeerError(f"sent {step.count} tokens of which {new.made} were generated, the request is for {most}")
    if new.capacity != min(order.context, step.count - new.made + most) or step.count > new.capacity:
        raise PeerError(f"sent {step.count} tokens, {new.made} of them generated of {most}, for {new.capacity}")


def _check_source(order: ServeStage, step: GenerateStep) -> None:
    """Prompts come of the coordinator, and each further token of the last stage."""
    last = max((neighbour.stage for neighbour in order.neighbours), default=order.stage)
    if step.source != (last if step.new is None else COORDINATOR) or (step.new is None and step.count != 1):
        raise PeerError(f"sent {step.count} tokens at {step.start} as of stage {step.source}")
