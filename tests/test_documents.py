"""TOML checked against structs: every message names the file, the field, what was got and what was expected."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from isthmus.documents import convert, parse_toml, read_toml
from isthmus.errors import UserError


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    size: Annotated[int, Meta(ge=1)] = 1
    mode: Literal["slow", "fast"] = "slow"
    groups: Literal["each", "all"] | tuple[tuple[str, ...], ...] = "each"


class Whole(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"source": "from"}):
    name: str
    source: str = ""
    wait: str = "600 s"
    part: Part = Part()
    maybe: Part | None = None
    parts: tuple[Part, ...] = ()
    free: dict[str, object] = {}


def test_a_document() -> None:
    text = 'name = "a"\nfrom = "b"\nfree = {anything = [1, {x = 2}]}\n[part]\nsize = 3\n[[parts]]\nmode = "fast"\n'
    found = convert(parse_toml(text, "f.toml"), Whole, "f.toml")
    assert found == Whole(
        name="a", source="b", part=Part(size=3), parts=(Part(mode="fast"),), free={"anything": [1, {"x": 2}]}
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nam = 1", "f: unknown key 'nam': did you mean 'name'?"),
        (
            'name = "a"\nsource = "b"',
            "f: unknown key 'source': expected one of: free, from, maybe, name, part, parts, wait",
        ),
        ('name = "a"\npart.siz = 1', "f: unknown key 'part.siz': did you mean 'part.size'?"),
        ('part.name = "a"', "f: unknown key 'part.name': 'name' belongs to the top of the file, not to 'part'"),
        ('name = "a"\nmaybe.siz = 1', "f: unknown key 'maybe.siz': did you mean 'maybe.size'?"),
        ('name = "a"\nparts = [{}, {siz = 1}]', "f: unknown key 'parts[1].siz': did you mean 'parts[1].size'?"),
        ('name = "a"\npart.size = 0', "f: part.size: expected 'integer' >= 1, got 0"),
        ('name = "a"\nparts = [{}, {size = -2}]', "f: parts[1].size: expected 'integer' >= 1, got -2"),
        ('name = "a"\nwait = 5', 'f: wait: got 5, expected a text with a unit, as "5 s"'),
        ('name = "a"\npart.size = "x"', "f: part.size: expected 'integer', got 'text'"),
        ('name = "a"\npart.mode = "fats"', "f: unknown part.mode 'fats': did you mean 'fast'?"),
        ('name = "a"\npart.groups = "any"', "f: unknown part.groups 'any': expected one of: all, each"),
        ('name = "a"\npart = 3', "f: part: expected 'table', got 'integer'"),
        ("name = 3", "f: name: expected 'text', got 'integer'"),
        ("", "f: missing key 'name'"),
    ],
)
def test_what_a_slip_is_told(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        convert(parse_toml(text, "f"), Whole, "f")
    assert str(caught.value) == message


@pytest.mark.parametrize("text", ["a = = 1", "[a", f"a = {'9' * 5000}", f"a = {'[' * 5000}"])
def test_what_is_no_toml(text: str) -> None:
    with pytest.raises(UserError, match=r"^f: not valid TOML: ") as caught:
        parse_toml(text, "f")
    assert len(str(caught.value).splitlines()) == 1


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "no.toml", "not found"), (tmp_path, "cannot be read: Is a directory")):
        with pytest.raises(UserError, match=rf"job file {path}: {words}"):
            read_toml(path, "job file")
    (tmp_path / "binary").write_bytes(b"a = \xff")
    with pytest.raises(UserError, match=r"not UTF-8 text \(byte 4\)"):
        read_toml(tmp_path / "binary", "job file")


def test_a_document_that_is_too_deep_is_refused(tmp_path: Path) -> None:
    for text in ("a" + ".a" * 60 + " = 1", "a = " + "[" * 60 + "]" * 60):
        (tmp_path / "deep.toml").write_text(text)
        with pytest.raises(UserError, match=r"deep\.toml: got tables and lists 50 deep and more"):
            read_toml(tmp_path / "deep.toml", "job file")
    (tmp_path / "job.toml").write_text("a" + ".a" * 40 + " = 1")
    assert read_toml(tmp_path / "job.toml", "job file")
