"""The reference says what the code accepts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from isthmus.cli.app import commands
from isthmus.errors import UserError
from isthmus.option_docs import option_docs, type_text
from isthmus.report.settings_reference import KINDS, described, summaries, tables_by_file, tables_of

DOCS = Path(__file__).parents[2] / "docs"


def written() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_reference", DOCS / "write_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_those_of_the_code() -> None:
    for name, text in written().pages().items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, f"{name}: run `make reference`"


@pytest.mark.parametrize("file", tables_by_file())
def test_every_key_of_every_file_says_what_it_means(file: str) -> None:
    tables = tables_by_file()[file]
    assert [f"{table.heading} {option.key}" for table in tables for option in table.options if not option.meaning] == []
    assert all(table.summary for table in tables)


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_of_what_is_built_in_says_what_it_means(kind: str) -> None:
    _, names, describe = KINDS[kind]
    ours = [name for name in names() if not name.startswith("hf-")]
    found = {name: describe(name) for name in ours}
    assert all(summary for summary, _ in found.values())
    assert [(name, o.key) for name, (_, options) in found.items() for o in options if not o.meaning] == []


def test_every_argument_and_option_of_a_command_says_what_it_means() -> None:
    parameters = {name: [p for p in command.params if p.name != "help"] for name, command in commands().items()}
    assert [(name, p.name) for name, found in parameters.items() for p in found if not p.help] == []


def test_a_name_is_described_whatever_it_is_of() -> None:
    assert [(one.kind, one.where) for one in described("gpt")] == [("model", "[model] name")]
    assert [one.where for one in described("privacy")] == ["Pipeline job", "Federated job"]
    assert [one.name for one in described("device")] == ["[[device]]"]
    (own,) = described("tests.docs.synthetic_reference:build")
    assert [(o.key, o.type, o.default) for o in own.options] == [("path", "", "required"), ("width", "integer", "8")]
    with pytest.raises(UserError, match="gpt"):
        described("gtp")
    with pytest.raises(UserError, match="cannot import nowhere"):
        described("nowhere:build")
    assert summaries("algorithm")["fedavg"].startswith("Clients run SGD")
    assert summaries("model")["hf-llama"] == "transformers.LlamaForCausalLM with random weights"


class Inner(msgspec.Struct):
    """A table."""

    depth: int = 1
    """How deep."""


class Outer(msgspec.Struct):
    """A file."""

    names: tuple[str, ...] = ()
    """Of all."""
    rate: Annotated[float, Meta(gt=0, le=1)] | None = None
    kind: Literal["a", "b"] = "a"
    inner: tuple[Inner, ...] = ()
    """Several."""
    pair: tuple[int, str] = (1, "x")
    table: dict[str, int] = {}


class Later(Outer):
    rate: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Of the subclass."""


def test_a_struct_in_words() -> None:
    found = {option.key: option for option in option_docs(Outer)}
    assert (found["names"].type, found["names"].default, found["names"].meaning) == ("list of text", "[]", "Of all.")
    assert (found["rate"].type, found["rate"].default) == ("number above 0 and at most 1", "")
    assert (found["kind"].type, found["kind"].default) == ('"a" or "b"', '"a"')
    assert (found["pair"].type, found["pair"].default) == ("[integer, text]", '[1, "x"]')
    assert found["table"].type == "table of integers"
    assert found["inner"].structs == (Inner,)
    assert [(t.heading, t.summary) for t in tables_of(Outer)] == [("", "A file."), ("[[inner]]", "A table.")]
    assert {o.key: o.meaning for o in option_docs(Later)}["rate"] == "Of the subclass."
    assert type_text(int | bool | None) == "integer or true or false"
