"""Requests to a site, its owner's answers, and the values that left it: a file of its own, one line each.

site-log.jsonl, in the folder of the site's key
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import msgspec

from isthmus.protocol.federated_messages import PhaseId
from isthmus.protocol.secure_site import round_key
from isthmus.run_files import LinesFile

SITE_LOG = "site-log.jsonl"
SiteEvent = Literal["asked", "allowed", "refused", "sent"]


class SiteLogLine(msgspec.Struct, frozen=True, kw_only=True):
    time_s: float  # since 1970, by the site's clock
    event: SiteEvent
    """`asked`: a coordinator asks for a run. `allowed`, `refused`: the answer. `sent`: something left the site."""
    job: str
    run: str  # name under which the site keeps its client's states
    text: str  # in words: what is asked for, who answered, what was sent
    request: str = ""
    """Digest of what the owner is asked, of which this is the question or the answer; empty where rules decide."""
    round: int | None = None  # from 1 on, of what was sent
    pass_: int = msgspec.field(default=1, name="pass")  # the pass of that round, from 1 on
    size_bytes: int = 0
    summed: tuple[str, ...] = ()
    """The sites in a sum of which shares were revealed: those whose updates are in the sum, others than this one with
    the ids of their devices, `NAME:ID`."""
    of: tuple[str, ...] = ()  # digests of the model that this site trained from, and of its update


class SiteLog(LinesFile[SiteLogLine]):
    """Two processes may add lines: the site's, and the owner's command."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / SITE_LOG, SiteLogLine, "site log")

    def note(
        self,
        event: SiteEvent,
        job: str,
        run: str,
        text: str,
        *,
        request: str = "",
    ) -> None:
        """Add a question or an answer of now. UserError when it cannot be written."""
        self.add(SiteLogLine(time_s=time.time(), event=event, job=job, run=run, text=text, request=request))

    def answer(self, request: str) -> bool | None:
        """The last answer to a request; None where there is none."""
        answers = [line for line in self.lines() if line.request == request and line.event in ("allowed", "refused")]
        return answers[-1].event == "allowed" if answers else None

    def revealed(self, run: str) -> dict[str, frozenset[str]]:
        """The sites of the sum for which this one revealed shares: by rounds of this run, and by what they revealed of
        in any."""
        found: dict[str, frozenset[str]] = {}
        for line in (line for line in self.lines() if line.summed and line.round is not None):
            assert line.round is not None, "it is a line of a round"
            rounds = (round_key(PhaseId(line.round - 1, number=line.pass_ - 1)),) if line.run == run else ()
            found |= dict.fromkeys((*rounds, *line.of), frozenset(line.summed))
        return found

    def last_request(self) -> SiteLogLine | None:
        """Return the last request to the owner, answered or not."""
        asked = [line for line in self.lines() if line.event == "asked" and line.request]
        return asked[-1] if asked else None
