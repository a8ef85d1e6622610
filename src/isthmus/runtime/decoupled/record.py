"""The record of a run of decoupled replicas."""

from __future__ import annotations

from pathlib import Path

import msgspec

from isthmus.protocol.decoupled_events import MergeChanges
from isthmus.run_files import LinesFile

MERGES = "merges.jsonl"


class MergeLine(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float  # since the run began
    merge: MergeChanges


def merges_file(run: Path) -> LinesFile[MergeLine]:
    return LinesFile(run / MERGES, MergeLine, "merges")
