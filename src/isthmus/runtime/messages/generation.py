"""Messages of a service that generates text: coordinator to device, device to device, device to coordinator."""

from __future__ import annotations

import msgspec

from isthmus.graph import StageGraph
from isthmus.protocol.generation import Sampling, StageReport
from isthmus.runtime.messages.assignment import Neighbour
from isthmus.runtime.messages.message import Message
from isthmus.wire_types import Count, Many, Name, NotNegative, Place, PlaceOrNone, Positive, Seconds, Text, Threads

COORDINATOR = -1  # as the source of a step


class ServeStage(Message, frozen=True, kw_only=True):
    """Coordinator to device: serve this stage. With values of its variables that the device has not got yet."""

    epoch: Count
    stage: Place  # in the chain. The last stage chooses tokens, and gives them to the first.
    device: Name
    graph: StageGraph
    token_input: Text  # name of the op whose value the tokens are
    vocabulary: Positive  # tokens are below it
    context: Positive  # tokens of a prompt and its answer together, at most
    neighbours: Many[Neighbour] = ()
    flops_per_s: NotNegative | None = None
    """The speed of an emulated device: a step lasts at least its FLOPs / flops_per_s."""
    threads: Threads = 1
    timeout_s: Seconds = 60.0


class NewPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A new prompt, without its tokens, as stages must know it."""

    sampling: Sampling
    made: Count = 0  # how many of the step's tokens were generated before, for a prompt that starts again
    capacity: Count  # tokens that its caches hold


class GenerateStep(Message, frozen=True, kw_only=True):
    """New tokens of one prompt: to the first stage the tokens, from stage to stage what crosses the cut."""

    epoch: Count
    prompt: Count
    source: PlaceOrNone  # a stage, or the coordinator
    start: Count  # position of the first token
    count: Positive  # tokens
    tokens: Many[Count] = ()
    new: NewPrompt | None = None  # with the first step of a prompt


class ForgetPrompts(Message, frozen=True, kw_only=True):
    """Coordinator to device: drop their keys and values."""

    epoch: Count
    prompts: Many[Count]


class ServingReport(Message, frozen=True, kw_only=True):
    """Device to coordinator."""

    body: StageReport


ServingOrder = ServeStage | GenerateStep | ForgetPrompts
GenerationMessage = ServeStage | GenerateStep | ForgetPrompts | ServingReport
