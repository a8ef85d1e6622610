"""A hub that nobody reaches is asked once: its library alone would ask it six times, with half a minute between."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from isthmus.data import DataSpec, load_dataset
from isthmus.errors import UserError
from isthmus.models import ModelSpec, build_model
from isthmus.stores import hub_silence

huggingface_hub = pytest.importorskip("huggingface_hub")
pytest.importorskip("datasets")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Generator[list[str]]:
    """The requests to a hub that closes each without a word."""
    found: list[str] = []
    server = socket.create_server(("127.0.0.1", 0))

    def close_each() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                if not (said := connection.recv(1 << 16)):
                    return
                found.append(said.decode().partition("\r")[0])

    thread = threading.Thread(target=close_each)
    thread.start()
    # Read from the environment when the library is imported, which other tests may have done.
    address, constants = f"http://127.0.0.1:{server.getsockname()[1]}", huggingface_hub.constants
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    yield found
    socket.create_connection(server.getsockname()).close()
    thread.join()
    server.close()


def model() -> object:
    return build_model(ModelSpec(name="hf", options={"path": "nobody/nothing", "task": "causal-lm"}))


def data() -> object:
    return load_dataset(DataSpec(kind="hub", options={"path": "nobody/nothing", "text": "text"}), "train")


@pytest.mark.parametrize("load", [model, data])
def test_a_silent_hub_is_asked_once(load: Callable[[], object], asked: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load()
    said = str(caught.value)
    assert f"the hub {huggingface_hub.constants.ENDPOINT} does not answer: " in said and "\n" not in said
    assert "nobody/nothing" in said and "nothing in the cache" in said
    assert len([line for line in asked if "/nobody/nothing/" in line]) == 1


def test_a_hub_that_is_not_to_be_asked_is_not(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert not hub_silence("nobody/nothing", "config.json", "model")
    assert not [line for line in asked if "/nobody/nothing/" in line]
