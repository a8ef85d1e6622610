"""Types of fields that another machine fills in: each has bounds, so that a receiver refuses a frame that no honest
sender writes before anything looks at it.

What a field may be in one run is less: the receiver that knows the run checks that. A field with tighter bounds than
these has its own beside its struct.
"""

from __future__ import annotations

import sys
from typing import Annotated, Literal, TypeVar

from msgspec import Meta

_Item = TypeVar("_Item")
_Key = TypeVar("_Key")

MOST_ID = 64
"""Characters of an id: of a run and a question (32 hexadecimal digits), a key (64), a device that joins (64)."""
MOST_NAME = 500
"""Characters of a name out of a model, a data set or a fleet file; the longest paths of modules have about 100."""
MOST_TEXT = 1 << 16
"""Characters of a sentence for people, an operator's schema or a text constant of a graph. Senders shorten reasons."""
MOST_HOST = 255  # characters: a host's name in DNS has at most 253
MOST_ITEMS = 1 << 22
"""Items of a list or table: four million clients, operators or samples. A header of 64 MiB has room for few more."""
MOST_DEVICES = 1 << 20  # and stages, replicas, groups, fragments: a hundred times 10,000 devices
MOST_COUNT = 1 << 48  # steps, rounds, epochs, samples, positions: a step each microsecond for nine years
MOST_CLIENTS = 1 << 31  # clients of a run and states of one: a quarter of mankind
MOST_BYTES = 1 << 60  # bytes, elements of a tensor: an exbibyte
MOST_SECONDS = 1e10  # seconds of a duration: 300 years
MOST_THREADS = 1024  # more than the cores of a machine
MOST_STREAMS = 8  # streams of one link
MOST_DIMS = 64  # dims of a tensor: torch takes no more

Id = Annotated[str, Meta(max_length=MOST_ID)]
Name = Annotated[str, Meta(max_length=MOST_NAME)]
Text = Annotated[str, Meta(max_length=MOST_TEXT)]
Host = Annotated[str, Meta(max_length=MOST_HOST)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=0, le=MOST_COUNT)]  # from 0 on
CountOrNone = Annotated[int, Meta(ge=-1, le=MOST_COUNT)]  # -1 stands for none
Positive = Annotated[int, Meta(ge=1, le=MOST_COUNT)]
Place = Annotated[int, Meta(ge=0, le=MOST_DEVICES)]
"""The number of a stage, worker, replica, group or fragment; or how many there are."""
PlaceOrNone = Annotated[int, Meta(ge=-1, le=MOST_DEVICES)]
Client = Annotated[int, Meta(ge=0, le=MOST_CLIENTS)]
Amount = Annotated[int, Meta(ge=0, le=MOST_BYTES)]  # in bytes, or elements
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""A whole number as torch has it: an operator's constant, or FLOPs."""
Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Threads = Annotated[int, Meta(ge=1, le=MOST_THREADS)]
Streams = Annotated[int, Meta(ge=1, le=MOST_STREAMS)]
Seconds = Annotated[float, Meta(ge=0, le=MOST_SECONDS)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]  # neither infinite nor NaN
NotNegative = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Above = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
Many = Annotated[tuple[_Item, ...], Meta(max_length=MOST_ITEMS)]
Distinct = Annotated[frozenset[_Item], Meta(max_length=MOST_ITEMS)]
Table = Annotated[dict[_Key, _Item], Meta(max_length=MOST_ITEMS)]
Shape = Annotated[tuple[Amount, ...], Meta(max_length=MOST_DIMS)]
WorkerRole = Literal["stage", "replica", "executor"]
"""The work of a device's process: stages of a plan; the whole model, whose changes are merged; clients of a federated
run."""
