"""The settings of a job's store."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import msgspec

from isthmus.errors import UserError
from isthmus.units import parse_duration

_SECRET = re.compile(r"key|secret|token|passw|credential", re.IGNORECASE)


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a run is kept besides its folder.

    >>> StoreConfig(url="s3://bucket/runs/first").drain_s
    600.0
    """

    url: str
    """The place of this one run: `s3://bucket/runs/first`, `gs://`, `file://`, or another URL of fsspec."""
    every: str = "60 s"
    """Documents that changed are uploaded so often; a checkpoint is uploaded as soon as it is complete."""
    drain: str = "10 min"
    """How long the end of a run waits until everything is uploaded."""
    options: dict[str, str | int | float | bool] = {}
    """Options of fsspec's file system, as `endpoint_url`. Keys come from the environment."""

    def __post_init__(self) -> None:
        if "://" not in self.url:
            raise ValueError(f"url: got {self.url!r}, expected a URL such as s3://bucket/runs/first")
        if urlsplit(self.url).password is not None:
            raise ValueError("url: got a password, expected it in the environment: jobs are uploaded and logged")
        for name in self.options:
            if _SECRET.search(name):
                raise ValueError(f"options.{name}: expected it in the environment: jobs are uploaded and logged")
        try:
            every_s, _ = self.every_s, self.drain_s
        except UserError as e:
            raise ValueError(str(e)) from None
        if every_s <= 0:
            raise ValueError(f"every: got {self.every!r}, expected a time above 0")

    @property
    def every_s(self) -> float:
        return parse_duration(self.every, "every")

    @property
    def drain_s(self) -> float:
        return parse_duration(self.drain, "drain")
