"""The S3 server of a module's tests, and the environment in which clients find it."""

from __future__ import annotations

import urllib.request
from collections.abc import Generator

import fsspec
import pytest

from .s3_server import NEVER, Gate, s3_server

BUCKET = "bucket"


@pytest.fixture(scope="module")
def s3() -> Generator[Gate]:
    """Its bucket is called `bucket`. Clients of this process, and of those that it starts, find it."""
    with s3_server() as (address, gate), pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", address)
        patch.setenv("AWS_ACCESS_KEY_ID", "a-key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir(BUCKET)
        yield gate
        # Its state is the process's.
        urllib.request.urlopen(urllib.request.Request(f"{address}/moto-api/reset", method="POST"), timeout=30).close()


def ask_for_keys(address: str, *, asks: bool) -> None:
    """Whether the server refuses keys that it does not know."""
    request = urllib.request.Request(
        f"{address}/moto-api/reset-auth", b"0" if asks else NEVER, {"Content-Type": "text/plain"}
    )
    urllib.request.urlopen(request, timeout=30).close()
