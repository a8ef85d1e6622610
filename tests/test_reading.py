"""Whatever lies in a file's place, or in a document, is one error that names it."""

from __future__ import annotations

import base64
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
import pytest

from isthmus.api.folder import RunFolder
from isthmus.api.run import Run
from isthmus.data import DataSpec
from isthmus.data.description import read_description
from isthmus.data.tokenizer import load_tokenizer
from isthmus.disclosure import SPENT, read_spent
from isthmus.documents import read_lines
from isthmus.errors import UserError
from isthmus.graph import decode
from isthmus.overrides import read_overrides
from isthmus.plans import load_plan
from isthmus.reading import open_file, parse_json, parse_msgpack, printable, read_file, read_json
from isthmus.run_files import MANIFEST
from isthmus.run_files import read_json as document_of_run
from isthmus.runtime.federated.trainer import _begun  # pyright: ignore[reportPrivateUsage]
from isthmus.runtime.identity.roster import PREFIX, decode_ticket
from isthmus.runtime.service.status_file import read_status
from isthmus.stores.store import Store
from isthmus.stores.uploader import OWNER, read_owner
from isthmus.trace import read_jsonl
from isthmus.training.checkpoint import read_manifest

DEEP = b"[" * 100_000
DAMAGED = {
    "deep": DEEP,
    "deep in an object": b'{"a": ' + DEEP,
    "deep in a field that nobody reads": b'{"version": 1, "zzz": ' + DEEP,
    "no UTF-8": b'{"name": "\xff"}',
    "a number of 9,000 digits": b"9" * 9000,
    "cut": b'{"a": [1, ',
    "empty": b"",
    "another kind": b'"text"',
    "zeros": bytes(99),
}


class StoreOf:
    """Holds one document."""

    url = "memory://"

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, name: str) -> bytes:
        assert name == OWNER
        return read_file(self._path)


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a plan": ("plan.json", load_plan),
    "a run's job": ("job.json", lambda path: RunFolder(path.parent).job()),
    "a run's kind": ("job.json", lambda path: RunFolder(path.parent).kind),
    "a run's graph": ("graph.json", lambda path: RunFolder(path.parent).captured_graph()),
    "a document of a run": ("any.json", lambda path: document_of_run(path, dict[str, object])),
    "a run's comparison": ("summary.json", lambda path: Run(path.parent).comparison),
    "a run's epsilon": (SPENT, lambda path: read_spent(path.parent)),
    "a checkpoint": (MANIFEST, lambda path: read_manifest(path.parent)),
    "a trace": ("trace.jsonl", read_jsonl),
    "a description": ("d.json", lambda path: read_description(path, DataSpec(kind="npz"), heldout=False)),
    "a federated run": ("job.json", lambda path: _begun(path.parent)),
    "a tokenizer": ("tokenizer_config.json", lambda path: load_tokenizer(str(path.parent))),
}
BY_CONTENT: dict[str, Callable[[bytes], object]] = {
    "JSON": lambda text: parse_json(text, dict[str, object], "it"),
    "MessagePack": lambda _: parse_msgpack(b"\x91" * 100_000, object, "it"),
    "a graph": decode,
}


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("reader", READERS)
def test_a_damaged_file_is_one_line_that_names_it(reader: str, damage: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    if reader == "a tokenizer":
        if damage == "no UTF-8":
            pytest.skip("it is in a field of which nothing is read")
        words = pytest.importorskip("tokenizers")
        words.Tokenizer(words.models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_bytes(DAMAGED[damage])
    with pytest.raises(UserError, match=r"^[^\n]+$") as raised:
        read(tmp_path / name)
    assert str(tmp_path) in str(raised.value) and "recursion" not in str(raised.value)


@pytest.mark.parametrize("reader", [name for name in READERS if name not in ("a run's comparison", "a tokenizer")])
def test_a_pipe_in_a_files_place_is_not_waited_for(reader: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="cannot be read: is no file"):
        read(tmp_path / name)


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("reader", BY_CONTENT)
def test_damaged_content_is_one_error(reader: str, damage: str) -> None:
    with pytest.raises(UserError, match="cannot be read: "):
        BY_CONTENT[reader](DAMAGED[damage])


@pytest.mark.parametrize("damage", DAMAGED)
def test_what_may_be_missing_is_missing_where_it_is_damaged(damage: str, tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b'{"run": "a", "session": "b"}\n' + DAMAGED[damage] + b"\n")
    kind = msgspec.defstruct("Kind", [("run", str), ("session", str)])
    notes: list[str] = []
    assert len(read_lines(tmp_path / "lines", kind, notes.append)) == 1
    assert len(notes) == (0 if damage == "empty" else 1) or damage == "empty"
    (tmp_path / "coordinator.json").write_bytes(DAMAGED[damage])
    assert read_status(tmp_path) is None
    with pytest.raises(UserError, match=rf"store memory://: {OWNER}: cannot be read"):
        read_owner(cast("Store", StoreOf(tmp_path / "coordinator.json")))


def test_a_ticket_that_is_nested_too_deeply_is_no_ticket() -> None:
    data = b"\x81\xa1z" + b"\x91" * 1500
    text = base64.urlsafe_b64encode(data + zlib.crc32(data).to_bytes(4, "big")).decode().rstrip("=")
    with pytest.raises(UserError, match=r"^ticket: "):
        decode_ticket(PREFIX + text)


@pytest.mark.parametrize("value", ["[" * 5000, "9" * 5000])
def test_what_is_no_value_of_toml_is_text(value: str) -> None:
    assert read_overrides([f"a={value}"]) == {"a": value}


def test_what_is_no_file_cannot_be_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/null"), Path("a\0b")):
        with pytest.raises(OSError):
            open_file(path)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none", dict)


def test_a_name_that_is_no_utf8_is_printable() -> None:
    assert printable(os.fsdecode(b"a\xff")) == "a\\xff" and printable("naïve") == "naïve"
