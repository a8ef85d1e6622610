"""Messages of a service that generates text: coordinator to device, device to device, device to coordinator."""

from __future__ import annotations

from typing import Annotated

import msgspec

from isthmus.graph import StageGraph
from isthmus.protocol.generation import Sampling, StageReport
from isthmus.runtime.messages.assignment import Neighbour
from isthmus.runtime.messages.message import Message

COORDINATOR = -1
"""As the source of a step."""
Natural = Annotated[int, msgspec.Meta(ge=0)]


class ServeStage(Message, frozen=True, kw_only=True):
    """Coordinator to device: serve this stage. With values of its variables that the device has not got yet."""

    epoch: Natural
    stage: Natural
    """In the chain. The last stage chooses tokens, and gives them to the first."""
    device: str
    graph: StageGraph
    token_input: str
    """Name of the op whose value the tokens are."""
    neighbours: tuple[Neighbour, ...] = ()
    flops_per_s: float | None = None
    """Of an emulated device: a step lasts at least its FLOPs / flops_per_s."""
    threads: int = 1
    timeout_s: float = 60.0


class NewPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """What stages have to know of a prompt besides its tokens."""

    sampling: Sampling
    made: Natural = 0
    """Of the step's tokens, how many were generated before: of a prompt that starts again."""
    capacity: Natural
    """Tokens that its caches hold."""


class GenerateStep(Message, frozen=True, kw_only=True):
    """New tokens of one prompt: to the first stage the tokens, from stage to stage what crosses the cut."""

    epoch: Natural
    prompt: Natural
    source: Annotated[int, msgspec.Meta(ge=-1)]
    """A stage, or the coordinator."""
    start: Natural
    """Position of the first token."""
    count: Annotated[int, msgspec.Meta(ge=1)]
    """Tokens."""
    tokens: tuple[Natural, ...] = ()
    new: NewPrompt | None = None
    """With the first step of a prompt."""


class ForgetPrompts(Message, frozen=True, kw_only=True):
    """Coordinator to device: drop their keys and values."""

    epoch: Natural
    prompts: tuple[Natural, ...]


class ServingReport(Message, frozen=True, kw_only=True):
    """Device to coordinator."""

    body: StageReport


ServingOrder = ServeStage | GenerateStep | ForgetPrompts
GenerationMessage = ServeStage | GenerateStep | ForgetPrompts | ServingReport
