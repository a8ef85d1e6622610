"""The accelerator that these tests run on: `ISTHMUS_GPU`, or the first of this machine."""

import os

import pytest

from isthmus.accelerators import AUTO, Accelerator, open_accelerator


@pytest.fixture(scope="session")
def gpu() -> Accelerator:
    found = open_accelerator(os.environ.get("ISTHMUS_GPU", AUTO), "ISTHMUS_GPU")
    if not found.asynchronous:
        pytest.skip("no accelerator here: `make test-gpu` runs it on a machine that has one")
    return found


@pytest.fixture
def gpu_name(gpu: Accelerator) -> str:
    """As jobs and commands take it."""
    return str(gpu.device)
