"""The state that a restarted coordinator needs: in the run's folder, written before it takes effect.

Only the owner can read it: over plain TCP, a process that knows the run's name can pose as the run's devices.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from isthmus.plans import Plan
from isthmus.run_files import read_json
from isthmus.runtime.identity.files import write_private

RECORD = "record.json"


class RecoveryRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run: str
    lineage: tuple[tuple[int, int], ...]  # plan epochs that trained, each with the step that it began from
    plan: Plan  # the plan of the newest epoch


def write_record(folder: Path, record: RecoveryRecord) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_private(folder / RECORD, msgspec.json.encode(record))


def read_record(folder: Path) -> RecoveryRecord | None:
    """None when no run was left in the middle here. UserError for what cannot be read."""
    return read_json(folder / RECORD, RecoveryRecord)


def remove_record(folder: Path) -> None:
    (folder / RECORD).unlink(missing_ok=True)
