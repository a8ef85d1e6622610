"""One contract for every store: memory, a folder, a real S3 server. And what each kind of failure says."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

import pytest

from isthmus.errors import UserError
from isthmus.stores import RemoteStoreError, Store, StoreConfig, is_document
from isthmus.stores.uploader import commits_in, parts_of_commits

from .conftest import ask_for_keys
from .s3_server import Gate


@pytest.fixture(params=["memory", "file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "s3":
        request.getfixturevalue("s3")
    where = tmp_path if request.param == "file" else f"bucket/{tmp_path.name}"
    return Store(f"{request.param}://{where}/runs/first/")


def test_the_contract(store: Store, tmp_path: Path) -> None:
    assert not store.url.endswith("/")
    assert store.names() == [] and store.read("job.json") is None
    store.write("job.json", b"one")
    (tmp_path / "weights").write_bytes(b"\0\1" * 5000)
    store.upload(tmp_path / "weights", "checkpoints/step-000001/stage-0.safetensors")
    assert store.names() == ["checkpoints/step-000001/stage-0.safetensors", "job.json"]
    store.write("job.json", b"another")
    assert store.read("job.json") == b"another"
    store.download("checkpoints/step-000001/stage-0.safetensors", tmp_path / "deep" / "back")
    assert (tmp_path / "deep" / "back").read_bytes() == b"\0\1" * 5000
    other = Store(store.url + "-2")
    other.write("x", b"")
    assert store.names() == ["checkpoints/step-000001/stage-0.safetensors", "job.json"], "no neighbour's"
    store.remove(["job.json", "never.there"])
    assert store.names() == ["checkpoints/step-000001/stage-0.safetensors"]
    with pytest.raises(RemoteStoreError, match=re.escape(f"store {store.url}: never.there cannot be read")):
        store.download("never.there", tmp_path / "nothing")


def test_a_missing_bucket_a_wrong_key_and_no_server(s3: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        RemoteStoreError, match=r"^store s3://missing/x: cannot be read: The specified bucket does not exist"
    ):
        Store("s3://missing/x").names()
    address = os.environ["AWS_ENDPOINT_URL"]
    ask_for_keys(address, asks=True)
    try:
        with pytest.raises(RemoteStoreError, match=r"^store s3://bucket/x: cannot be read: The AWS Access Key Id "):
            Store("s3://bucket/x").names()
    finally:
        ask_for_keys(address, asks=False)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(RemoteStoreError, match=r"^store s3://bucket/x: cannot be read: Unable to locate credentials$"):
        Store("s3://bucket/x").names()


def test_no_server_is_said_before_the_library_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        refused = re.escape(f"store s3://bucket/x: cannot connect to {address}: Connection refused")
        with pytest.raises(RemoteStoreError, match=f"^{refused}$"):
            Store("s3://bucket/x")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        Store("s3://bucket/x")  # a proxy may reach it
        monkeypatch.delenv("http_proxy")
    with pytest.raises(RemoteStoreError, match=r"^store s3://bucket/x: cannot connect to http://127\.0\.0\.1:port: "):
        Store("s3://bucket/x", {"endpoint_url": "http://127.0.0.1:port"})


def test_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for url, library, extra in (
        ("s3://b/x", "s3fs", "s3"),
        ("gs://b/x", "gcsfs", "gs"),
        ("memory://x", "fsspec", "train"),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, library, None)
            with pytest.raises(UserError, match=rf"^store {url} needs {library}: pip install '.\[{extra}\]'"):
                Store(url)
    with pytest.raises(RemoteStoreError, match=r"^store nowhere://x: Protocol not known: nowhere"):
        Store("nowhere://x")
    for url in ("s3://", "memory://", "file:///"):
        with pytest.raises(RemoteStoreError, match=f"^store {url}: names no place"):
            Store(url)


def test_what_a_job_may_say() -> None:
    assert StoreConfig(url="s3://bucket/x", options={"endpoint_url": "http://127.0.0.1:9000"}).every_s == 60
    for given, said in (
        ({"url": "bucket/x"}, "url: got 'bucket/x', expected a URL such as s3://bucket/runs/first"),
        ({"url": "sftp://me:word@host/x"}, "url: got a password, expected it in the environment"),
        ({"url": "s3://b/x", "options": {"secret": "x"}}, "options.secret: expected it in the environment"),
        ({"url": "s3://b/x", "every": "0 s"}, "every: got '0 s', expected a time above 0"),
        ({"url": "s3://b/x", "drain": "soon"}, "drain: got 'soon'"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            StoreConfig(**given)


def test_what_is_complete() -> None:
    whole = ["checkpoints/step-000003/stage-0.safetensors", "checkpoints/step-000003/manifest.json"]
    part, round_ = "checkpoints/step-000006/stage-0.safetensors", "rounds/round-000004.safetensors"
    names = [*reversed(whole), part, round_, "rounds/.round-000005.safetensors.12", "job.json"]
    assert commits_in(names) == {"checkpoints/step-000003": whole, round_: [round_]}
    assert parts_of_commits(names)["checkpoints/step-000006"] == [part]
    assert is_document("job.json") and is_document("sessions/1/trace.jsonl")
    for name in ("../job.json", "/etc/passwd", "sessions/../../x", ".hidden", "checkpoints/step-000001/x", "a//b"):
        assert not is_document(name), name
