"""Checks for obstacles on this machine."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from isthmus.api.states import PORT, state_folder
from isthmus.runtime.service.machine import Finding, examine_machine

__all__ = ["Examined", "Finding", "examine"]


class Examined(NamedTuple):
    findings: list[Finding]
    joined: bool  # whether they are of the way to a coordinator; else of this machine, which has joined no fleet

    @property
    def good(self) -> bool:
        return self.findings[-1].good if self.joined else all(finding.good for finding in self.findings)

    def table(self) -> Table:
        title = "On the way to the coordinator" if self.joined else "This machine, which has joined no fleet"
        drawn = Table("hop", "", "found", "what to do", title=title)
        for finding in self.findings:
            remedy = "" if finding.good and not self.joined else finding.remedy
            drawn.add_row(finding.hop, "ok" if finding.good else "BROKEN", finding.detail, remedy)
        return drawn


def examine(state: Path | None = None, ticket_file: Path | None = None) -> Examined:
    """Before it joined: Python, libraries, accelerators, ports and folders. Afterwards, or with a ticket: each hop of
    the way to the coordinator."""
    folder = state or state_folder("device")
    if ticket_file is None and not any((folder / name).exists() for name in ("key.pem", "membership.json")):
        return Examined(list(examine_machine({"keys of a device": folder, "runs": Path("runs")}, PORT)), joined=False)
    # Imported by name, as it needs torch: what is missing is found above
    return Examined(importlib.import_module("isthmus.api.join").examined(folder, ticket_file), joined=True)
