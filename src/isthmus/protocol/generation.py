"""Requests to a service that generates text, and the reports of its stages."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from isthmus.protocol.run_messages import Body
from isthmus.wire_types import Count, Many, NotNegative, Positive, Seed, Text


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen of logits, in the order of transformers: temperature, top-k, top-p."""

    max_tokens: Positive = 16  # new tokens at most
    temperature: NotNegative = 0.0  # 0 takes the likeliest token; logits are divided by any other
    top_k: Count = 0  # draw from so many likeliest tokens; 0: from all
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens that have this probability together."""
    seed: Seed = 0  # the seed of the random numbers: those that torch draws after `torch.manual_seed(seed)`
    stop: Many[Count] = ()  # tokens that end the text


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    number: int  # a number that no other request has
    tokens: tuple[int, ...]
    sampling: Sampling


class StageLoaded(Body, frozen=True, kw_only=True):
    """The stage has its weights and its links."""


class StageUnable(Body, frozen=True, kw_only=True):
    """A link of the stage broke, or could not be made. What a device cannot compute ends its process."""

    reason: Text


class TokenGenerated(Body, frozen=True, kw_only=True):
    """The last stage generated a token."""

    prompt: Count
    place: Count  # how many were generated before it
    token: Count
    last: bool


class PromptFailed(Body, frozen=True, kw_only=True):
    """No token can be chosen: of the last stage."""

    prompt: Count
    reason: Text
    of_request: bool = False  # the request asks for what cannot be; else nothing can be chosen for any request


StageReport = StageLoaded | StageUnable | TokenGenerated | PromptFailed
