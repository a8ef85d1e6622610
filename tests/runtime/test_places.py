"""`[runtime] device`: where the device processes of a run on this machine compute."""

from pathlib import Path

import pytest

from isthmus.errors import UserError
from isthmus.runtime.coordinator import backend
from isthmus.runtime.coordinator.backend import local_places
from tests.runtime.commands import edited, isthmus, refused, write_job

DEVICES = ("a", "b", "c")


def chosen(asked: str | dict[str, str]) -> list[str]:
    found = local_places(asked, DEVICES)
    return [found[device].accelerator if device in found else "cpu" for device in DEVICES]


def test_one_name_is_every_devices() -> None:
    assert chosen("cpu") == ["cpu", "cpu", "cpu"]
    assert chosen("checked:1") == ["checked:1", "checked:1", "checked:1"]


def test_auto_deals_accelerators_out_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "accelerator_names", lambda: ("cuda:0", "cuda:1"))
    assert chosen("auto") == ["cuda:0", "cuda:1", "cuda:0"]
    monkeypatch.setattr(backend, "accelerator_names", tuple)
    assert chosen("auto") == ["cpu", "cpu", "cpu"]


def test_a_table_leaves_the_cpu_to_others() -> None:
    assert chosen({"b": "checked"}) == ["cpu", "checked:0", "cpu"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("tpu:0", ["runtime.device", "'tpu:0'", "auto, cpu"]),
        ("cpu:1", ["runtime.device", "'cpu:1'"]),
        ("checked:x", ["runtime.device", "a kind and a number"]),
        ({"a": "tpu"}, ["runtime.device.a", "'tpu'"]),
        ({"aa": "cpu"}, ["runtime.device", "'aa'", "did you mean 'a'"]),
    ],
)
def test_what_is_not_there_is_named(asked: str | dict[str, str], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        local_places(asked, DEVICES)
    assert all(word in str(error.value) for word in words), error.value


def test_a_run_ends_before_it_begins(tmp_path: Path) -> None:
    job = edited(write_job(tmp_path), ("[training]", '[runtime]\ndevice = "tpu:3"\n[training]'))
    refused(isthmus("train", job), 2, "runtime.device", "'tpu:3'", "cpu")
