"""Real sites of a federated job."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from isthmus.federated.pipeline import PipelineConfig
from isthmus.units import parse_duration


class Deployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sites in place of executors: devices of the fleet that have a client's data each."""

    sites: Annotated[tuple[str, ...], Meta(min_length=1)]
    """Names of the devices that may take part; their order numbers the clients."""
    start: Annotated[int, Meta(ge=1)] | None = None
    """The first round waits for so many of them; for all, where it is not given."""
    wait: str = "5 s"
    """Later, and after a restart: as soon as `federated.participation.minimum` are here, so long for the others."""
    fleets: dict[str, PipelineConfig] = {}
    """For `isthmus simulate`: of sites that are fleets, what their own files say in table [pipeline]."""

    @property
    def wait_s(self) -> float:
        return parse_duration(self.wait, "federated.deployment.wait")
