"""Messages about data that stay on the devices: their descriptions, and which are equal."""

from __future__ import annotations

from isthmus.data import DataSpec
from isthmus.data.description import DataDescription
from isthmus.runtime.messages.message import Message


class DescribeData(Message, frozen=True, kw_only=True):
    """Coordinator to device: what are the data like that a job names? `run` tells questions apart."""

    data: DataSpec
    heldout: bool
    """Whether held-out samples are needed."""


class DataDescribed(Message, frozen=True, kw_only=True):
    """Device to coordinator: a description, or why there is none."""

    description: DataDescription | None = None
    failure: str = ""


class CompareData(Message, frozen=True, kw_only=True):
    """Coordinator to device: another device has described data of the same job. Show it a proof that yours are equal;
    who is shown one says whether it holds, and shows its own."""

    device: str
    """What the coordinator calls the one that is asked."""
    other: str
    own: str
    """What the device gave as a digest of its data."""
    others: str
    """What the other device gave."""
    shown: str = ""
    """The other's proof; empty for the device that shows first."""


class DataCompared(Message, frozen=True, kw_only=True):
    """Device to coordinator: its proof; or that the data are not equal; or why it cannot tell."""

    proof: str = ""
    equal: bool = True
    """False only where a proof was shown that does not hold."""
    failure: str = ""


DataMessage = DescribeData | DataDescribed | CompareData | DataCompared
