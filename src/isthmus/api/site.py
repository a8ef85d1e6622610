"""A site's owner: what was asked, what was answered, and what left the site."""

from __future__ import annotations

import time
from pathlib import Path

from rich.table import Table

from isthmus.api.states import state_folder
from isthmus.errors import UserError
from isthmus.federated.task_spec import SiteLog, SiteLogLine
from isthmus.sanitize import sanitize
from isthmus.units import format_size


def log(state: Path | None = None) -> list[SiteLogLine]:
    """Every line of the site whose key is in this folder, the oldest first."""
    return _log_of(state).lines()


def answer(state: Path | None = None, *, yes: bool) -> SiteLogLine:
    """Say yes or no to what a coordinator asked for last; returns the request. A later word replaces an earlier one.
    UserError where nothing was asked, or the answer is the same already."""
    site_log = _log_of(state)
    if (asked := site_log.last_request()) is None or site_log.answer(asked.request) is yes:
        raise UserError("site: nothing waits for an answer")
    site_log.note("allowed" if yes else "refused", asked.job, asked.run, "by the owner", request=asked.request)
    return asked


def _log_of(state: Path | None) -> SiteLog:
    folder = state or state_folder("device")
    if not folder.is_dir():
        raise UserError(f"--state {folder}: no such folder, expected the one of `isthmus join --site`")
    return SiteLog(folder)


def table(lines: list[SiteLogLine]) -> Table:
    found = Table(box=None, pad_edge=False)
    for name in ("time", "job", "event", "round", "bytes", "what"):
        found.add_column(name, justify="right" if name in ("round", "bytes") else "left")
    for line in lines:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line.time_s))
        size = format_size(line.size_bytes) if line.size_bytes else ""
        round_ = "" if line.round is None else str(line.round)
        text = "\n".join(map(sanitize, line.text.splitlines()))
        found.add_row(when, sanitize(line.job), line.event, round_, size, text)
    return found
