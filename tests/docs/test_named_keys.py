"""Each key, table, option and command that a text of the program names is there."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import typer

from isthmus.cli.app import app
from isthmus.option_docs import OptionDoc
from isthmus.plans import Plan
from isthmus.report.settings_reference import tables_by_file, tables_of
from isthmus.simulator import SimulationOptions

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "src" / "isthmus", ROOT / "testing" / "src" / "isthmus_testing")
FILES = ("json", "jsonl", "pem", "pkl", "png", "py", "safetensors")
"""Endings: `plan.json` is no key."""
NO_KEYS = {
    "model.module": "of torch's DistributedDataParallel",
    "sync.finished": "of what isthmus.sync.attach returns",
    "sync.step": "of what isthmus.sync.attach returns",
    "plan.predicted_step_s": "what trackers call a run's setting",
    "plan.devices": "what trackers call a run's setting",
}
NO_OPTIONS = {
    "--debug": "read before all others",
    "--force": "of kubectl",
    "--head": "of ray",
    "--server-side": "of kubectl",
    "--xla": "of XLA",
}
EXTRAS = re.compile(r"""pip install (-U )?["'][a-z.]+\[[a-z]+\]["']""")


@functools.cache
def tables() -> dict[str, dict[str, OptionDoc]]:
    """By the path of a table, its keys: of files that people write, of plans, and of what `simulate` is given."""
    found: dict[str, dict[str, OptionDoc]] = {}
    others = (table for struct in (Plan, SimulationOptions) for table in tables_of(struct))
    for table in (*(table for file in tables_by_file().values() for table in file), *others):
        found.setdefault(table.heading.strip("[]"), {}).update({option.key: option for option in table.options})
    return found


def is_key(name: str) -> bool:
    """Whether a dotted name is a table, or a key of one. Keys of a table without a struct may be any; a plan's tables
    may be named by their last part."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        path = ".".join(parts[:count])
        for keys in [keys for table, keys in tables().items() if table == path or table.endswith(f".{path}")]:
            rest = parts[count:]
            option = keys.get(rest[0]) if rest else None
            if not rest or (option is not None and (len(rest) == 1 or {"table", "value"} & {*option.type.split()})):
                return True
    return False


@functools.cache
def named() -> tuple[frozenset[str], frozenset[str]]:
    """(options, commands) of the command line."""
    options, commands = set[str](), set[str]()

    def walk(command: Any) -> None:  # typer exports no types of its click
        for parameter in command.params:
            options.update((*parameter.opts, *parameter.secondary_opts))
        for name, inner in getattr(command, "commands", {}).items():
            commands.add(name)
            walk(inner)

    walk(cast("Any", typer.main.get_command(app)))
    return frozenset(options), frozenset(commands)


def texts(source: str) -> Iterator[tuple[int, str]]:
    """The strings of a module with their lines, but for docstrings. What is filled in is U+FFFC."""
    tree = ast.parse(source)
    left_out = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part for part in node.values if isinstance(part, ast.Constant)]
            left_out |= {id(part) for part in parts}
            yield node.lineno, "".join(str(part.value) if part in parts else "\ufffc" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
            yield node.lineno, node.value


@functools.cache
def beginning_with_a_table() -> re.Pattern[str]:
    """Dotted names, but for paths, calls, and attributes of something else."""
    roots = "|".join(sorted({path.partition(".")[0] for path in tables()} - {""}, key=len, reverse=True))
    return re.compile(rf"(?<![\w./-])((?:{roots})(?:\.[a-z_][a-z_0-9]*)+)(?![\w/(.-]*[/(])")


def wrong_keys(text: str) -> list[str]:
    """Dotted names that begin with a table's, or stand before what was got."""
    found = beginning_with_a_table().findall(text)
    found += re.findall(r"^((?!isthmus\.)[a-z_]+(?:\.[a-z_]+)+): (?:got|expected)", text)
    return [n for n in found if n.rpartition(".")[2] not in FILES and n not in NO_KEYS and not is_key(n)]


@functools.cache
def all_texts() -> list[tuple[str, str]]:
    """Of the program, with the places."""
    return [
        (f"{path.relative_to(source)}:{line}", text)
        for source in SOURCES
        for path in sorted(source.rglob("*.py"))
        if "templates" not in path.relative_to(source).parts and path.name != "old_spelling.py"
        for line, text in texts(path.read_text(encoding="utf-8"))
    ]


def wrong_tables(text: str) -> list[str]:
    """Headings. Python's types and indices have a name before the bracket."""
    found = re.findall(r"(?<![\w\]\[])\[{1,2}([a-z_]+(?:\.[a-z_]+)*)\]{1,2}", EXTRAS.sub("", text))
    return [f"[{name}]" for name in found if not is_key(name) and name not in tables()[""]]


def wrong_options(text: str) -> list[str]:
    """In sentences: arguments that other programs are given stand alone."""
    found = re.findall(r"(?<![\w-])(--[a-z][a-z-]*[a-z])", text) if " " in text else []
    return [option for option in found if option not in named()[0] and option not in NO_OPTIONS]


def wrong_commands(text: str) -> list[str]:
    return [name for name in re.findall(r"`isthmus ([a-z][a-z-]+)", text) if name not in named()[1]]


@pytest.mark.parametrize("wrong", [wrong_keys, wrong_tables, wrong_options, wrong_commands])
def test_what_a_text_names_is_there(wrong: Callable[[str], list[str]]) -> None:
    assert [f"{where}: {name}" for where, text in all_texts() for name in wrong(text)] == []


def test_what_is_not_there_is_found() -> None:
    source = "'runtime.gone'\nE(f'runtime.gone: got {n} with [gone], see --gone of `isthmus gone`')"
    ((line, text),) = texts(source)
    assert line == 2 and "\ufffc" in text
    assert wrong_keys(text)[:1] == ["runtime.gone"] and wrong_keys("terms.gone: got 2") == ["terms.gone"]
    assert wrong_tables(text) == ["[gone]"] and wrong_options(text) == ["--gone"] and wrong_commands(text) == ["gone"]
    there = "runtime.clients_per_vmap: got 2 with [[optimizer]] and [sync.decoupled], see --set of `isthmus train`"
    assert not any(wrong(there) for wrong in (wrong_keys, wrong_tables, wrong_options, wrong_commands))
