"""Weights that devices read from a store: these bytes and no others, as they were, and below URLs that owners name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import isthmus
from isthmus.api.export import ExportOptions, export_model
from isthmus.errors import UserError
from isthmus.job.prepared import cached_capture
from isthmus.models import build_model
from isthmus.protocol.run_messages import PlaceWeights, WeightFile
from isthmus.runtime.coordinator.parameter_store import Placed, WeightFiles
from isthmus.runtime.device import own_files
from isthmus.runtime.device.own_files import is_below, own_weights
from isthmus.stores import Store, StoreFile, store, store_file
from isthmus.training.stored import Sent, in_memory, stored_tensors
from tests.runtime.test_lora_runs import adapter_of, assert_equal, lora_job

from .http_server import web_server
from .s3_server import Gate

FILE = "model.safetensors"
OURS: dict[str, Tensor] = {
    **{f"layer.{n}": torch.randn(60, 40, generator=torch.Generator().manual_seed(n)) for n in range(9)},
    "half": torch.randn(500, generator=torch.Generator().manual_seed(9)).to(torch.bfloat16),
    "one": torch.tensor(2.0),
    "nothing": torch.empty(0, 3),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    save_file(OURS, tmp_path / "model" / FILE)
    return tmp_path / "model"


def values(folder: Path, url: str, names: Sequence[str] = tuple(OURS)) -> dict[str, Sent]:
    """The coordinator's, of a stage with these, of which one is cast."""
    kept = StoreFile.found(url, FILE)
    assert kept is not None
    found = {f"base.{name}": t.named(f"base.{name}") for name, t in stored_tensors(folder / FILE, kept).items()}
    found["base.half"] = found["base.half"].cast(torch.float32)
    return {f"base.{name}": found[f"base.{name}"] for name in names}


def expected(names: Sequence[str] = tuple(OURS)) -> dict[str, Tensor]:
    return {f"base.{name}": OURS[name].float() if name == "half" else OURS[name] for name in names}


def asked(folder: Path, url: str, names: Sequence[str] = tuple(OURS)) -> tuple[WeightFile, ...]:
    return WeightFiles(url).of(values(folder, url, names))


def in_s3(folder: Path, name: str) -> str:
    url = f"s3://bucket/{name}"
    for path in folder.iterdir():
        Store(url).upload(path, path.name)
    return url


@pytest.mark.parametrize("most", [8 << 20, 7000])
@pytest.mark.parametrize("names", [["layer.3", "layer.4", "layer.5"], ["half", "layer.0", "layer.8", "one", "nothing"]])
def test_over_s3_a_stage_takes_its_own_bytes_and_a_request_for_those_that_touch(
    names: Sequence[str], most: int, s3: Gate, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_file, "REQUEST_BYTES", most)
    url = in_s3(folder, tmp_path.name)
    files = asked(folder, url, names)
    s3.served.clear()
    found, lacking = own_weights(files, foreign=True, urls=["s3://bucket"])
    assert not lacking
    assert_equal(found, expected(names))
    got = [(method, size) for method, path, size in s3.served if path.endswith(FILE)]
    assert sum(size for _, size in got) == sum(OURS[name].nbytes for name in names), "and no header"
    spans = 1 if "layer.3" in names else 2
    requests = sum(method == "GET" for method, _ in got)
    assert requests == spans if most > 10_000 else requests > spans
    assert len(got) - requests == 2, "before and after: it is as it was"
    assert all(path.endswith(FILE) for _, path, _ in s3.served), "and nothing is listed"


def test_over_http_too(folder: Path) -> None:
    with web_server(folder) as web:
        files = asked(folder, web.url, ["layer.1", "layer.2", "layer.6"])
        found, lacking = own_weights(files)
        assert not lacking
        assert_equal(found, expected(["layer.1", "layer.2", "layer.6"]))
        assert sorted(end - start for _, start, end in web.ranges) == [60 * 40 * 4, 60 * 40 * 8]


def test_a_server_that_gives_no_parts_of_a_file_is_one_line(folder: Path) -> None:
    with web_server(folder) as web:
        web.whole = True
        files = asked(folder, web.url, ["layer.1"])
        found, lacking = own_weights(files)
    assert not found
    assert "the server gives no parts of a file" in lacking["base.layer.1"]


def test_the_coordinator_sends_what_a_device_does_not_get(folder: Path) -> None:
    ours = values(folder, f"file://{folder}")
    placed, files = Placed(), asked(folder, f"file://{folder}")
    order, sent = placed.split("d0", PlaceWeights(epoch=1), ours, files)
    found, lacking = own_weights(order.files, foreign=True)
    assert not sent and not found and lacking.keys() == ours.keys()
    assert all(
        "lies below no URL of this device's --weights-from or --checkpoints-to: none" in reason
        for reason in lacking.values()
    )
    _, more = placed.lacking("d0", tuple(lacking))
    assert_equal({name: in_memory(value) for name, value in more.items()}, expected())


def make_newer(path: Path) -> None:
    """The clock of a file system stands still for some milliseconds: two changes may have one time."""
    at_ns = path.stat().st_mtime_ns + 1_000_000_000
    os.utime(path, ns=(at_ns, at_ns))


def test_a_file_that_has_changed_is_lacking_whenever_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{folder}"
    files = asked(folder, url)
    ranges = Store.ranges

    def changes(self: Store, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        found = ranges(self, name, spans)
        save_file({**OURS, "one": torch.tensor(3.0)}, folder / FILE)
        make_newer(folder / FILE)
        return found

    monkeypatch.setattr(Store, "ranges", changes)
    for words in ("it has changed", "it has changed"):  # while it is read, and before
        found, lacking = own_weights(files)
        assert not found and lacking.keys() == expected().keys()
        assert all(words in reason and "\n" not in reason for reason in lacking.values())
    monkeypatch.setattr(Store, "ranges", ranges)
    kept = values(folder, url)["base.one"]
    make_newer(folder / FILE)
    with pytest.raises(UserError, match="it has changed"):
        in_memory(kept)


@pytest.mark.parametrize("change", [{"offset": 1 << 40}, {"dtype": "load"}, {"cast": "load"}, {"shape": (1 << 40,)}])
def test_what_no_file_holds_is_not_asked_for(change: dict[str, object], folder: Path) -> None:
    (file,) = asked(folder, f"file://{folder}", ["one"])
    (tensor,) = file.tensors
    lies = msgspec.structs.replace(file, tensors=(msgspec.structs.replace(tensor, **change),))
    found, lacking = own_weights([lies])
    assert not found and lacking.keys() == {"base.one"}, lacking


def test_a_stage_that_nobody_wants_any_more_is_not_read_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_file, "REQUEST_BYTES", 1000)
    said = iter([False, True])
    assert own_weights(asked(folder, f"file://{folder}"), stopped=lambda: next(said)) == ({}, {})


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/models-private/a",
        "s3://bucket/models",  # the folder itself is no file
        "s3://bucket/models/../private/a",
        "s3://bucket/models/./a",
        "s3://bucket/models//a",
        "s3://bucket/models/%2e%2e/private/a",
        "s3://bucket/models/a::file:///etc/passwd",
        "s3://bucket/models/a?versionId=1",
        "s3://bucket/models/a#b",
        "s3://bucket/models/a b",
        "s3://bucket/models/\\..\\a",
        "s3://bucket/models/\u2024\u2024/a",
        "simplecache::s3://bucket/models/a",
        "S3://bucket/models/a",
        "http://bucket/models/a",
        "/bucket/models/a",
        "http://169.254.169.254/latest/meta-data",
        "file:///etc/passwd",
    ],
)
def test_another_owners_coordinator_reads_no_url_that_the_owner_does_not_name(url: str, folder: Path) -> None:
    assert not is_below(url, ["s3://bucket/models", "s3://bucket/models/"])
    assert is_below("s3://bucket/models/a/b.safetensors", ["s3://bucket/models"])
    (file,) = asked(folder, f"file://{folder}", ["one"])
    model, _, name = url.rpartition("/")
    named = msgspec.structs.replace(file, model=model, file=name)
    found, lacking = own_weights([named], foreign=True, urls=["s3://bucket/models"])
    assert not found and lacking


def test_a_file_of_the_owners_folder_alone_may_be_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = asked(folder, f"file://{folder}", ["one"])
    assert own_weights([file], foreign=True, urls=[f"file://{folder}"])[0].keys() == {"base.one"}
    monkeypatch.setattr(own_files, "StoreFile", lambda *_: pytest.fail("nothing is asked for"))
    for name in (f"../model/{FILE}", f"/{FILE}", f"x::file://{folder}/{FILE}"):
        found, _ = own_weights([msgspec.structs.replace(file, file=name)], foreign=True, urls=[f"file://{folder}"])
        assert not found


def test_a_store_that_does_not_answer_for_the_config_is_not_asked_again(tmp_path: Path) -> None:
    job = lora_job(tmp_path, "llama")
    options = {**job.model.options, "path": "http://127.0.0.1:9/model"}
    remote = msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, options=options))
    with pytest.raises(UserError) as caught:
        cached_capture(remote, {}, lambda: pytest.fail("it was captured"))
    assert str(caught.value).startswith("hf option 'path': store http://127.0.0.1:9/model: config.json cannot be read")


@pytest.mark.parametrize("slow", ["config.json", FILE])
def test_a_hub_that_answers_slowly_is_one_line(slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a byte in a tenth of a second no timeout of a library ends it."""
    monkeypatch.setattr(store, "ANSWER_S", 0.5)
    monkeypatch.setattr(store, "SLOWEST", 1e9)
    lora_job(tmp_path, "llama")
    spec = lora_job(tmp_path, "llama").model
    with web_server(tmp_path / "base") as web:
        web.slow = slow
        options = {**spec.options, "path": web.url}
        with pytest.raises(UserError) as caught:
            build_model(msgspec.structs.replace(spec, options=options))
    said = str(caught.value)
    assert said.startswith(f"hf option 'path': store {web.url}: {slow} cannot be read: no answer in ")


@pytest.mark.long
def test_a_run_whose_devices_read_s3_is_that_of_the_folder(
    s3: Gate, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = lora_job(tmp_path, "llama")
    options = {**job.model.options, "path": in_s3(tmp_path / "base", tmp_path.name)}
    remote = msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, options=options))
    expected = isthmus.train(job, run=tmp_path / "here")
    s3.served.clear()
    found = isthmus.train(remote, run=tmp_path / "there")
    assert [point.loss for point in found.losses] == [point.loss for point in expected.losses]
    assert_equal(adapter_of(tmp_path / "there"), adapter_of(tmp_path / "here"))
    said = capfd.readouterr().err
    assert "come from the coordinator" not in said and "holds the whole pretrained model" not in said
    base = tmp_path / "base" / FILE
    got = sum(size for _, path, size in s3.served if path.endswith(FILE))
    size, header = base.stat().st_size, min(t.offset for t in stored_tensors(base).values())
    assert got == size - header + 2 * (8 + header), "each tensor once; to plan and to begin the header"
    for name in ("here", "there"):
        export_model(tmp_path / name, tmp_path / f"{name}-merged", ExportOptions(merge=True))
    merged = [(tmp_path / f"{name}-merged" / FILE).read_bytes() for name in ("here", "there")]
    assert merged[0] == merged[1]
