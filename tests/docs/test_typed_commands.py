"""Every command that a page types exists with its options, is run by a test, or has a reason why not."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from isthmus.cli.app import commands
from tests.docs.test_pages import DOCS, LONG, PAGE
from tests.docs.typed_commands import LEFT_OUT, ROOT, Typed, all_typed, reason, typed

RUN = {(DOCS / page).resolve() for page in (*LONG, PAGE, "start/install.md")}


@cache
def every() -> list[Typed]:
    return all_typed()


def error_of(command: Typed) -> str | None:
    """What the command line says to a command, without running it."""
    words = [word for word in shlex.split(re.sub(r"[<>] .*", "", command.text)) if word != "..."]
    known: dict[str, Any] = commands()
    if words[1].startswith("-"):
        return None  # of `isthmus` itself
    if words[1] not in known:
        return f"no command {words[1]}"
    options = {name for parameter in known[words[1]].params for name in (*parameter.opts, *parameter.secondary_opts)}
    wrong = [word for word in words[2:] if word.startswith("--") and word.partition("=")[0] not in options]
    if wrong:
        return f"no option {wrong[0]}"
    if command.shown == "sentence":
        return None  # a sentence may leave out arguments
    try:
        known[words[1]].make_context(words[1], words[2:])
    except Exception as error:  # click's, or that of the copy that typer brings along
        return str(error) or type(error).__name__
    return None


def test_every_command_is_one() -> None:
    of_isthmus = [one for one in every() if re.match("isthmus [a-z]", one.text) and "replica NAME" not in one.text]
    ours = [one for one in of_isthmus if one.text != "isthmus device NAME"]  # names of processes
    assert len(ours) > 100
    wrong = [f"{one.page}:{one.line}: {one.text}: {error}" for one in ours if (error := error_of(one))]
    assert not wrong, "\n".join(wrong)


def test_every_script_of_a_benchmark_is_there() -> None:
    """With the options that its page names."""
    found = [(one, shlex.split(one.text.replace("[", "").replace("]", ""))) for one in every()]
    scripts = [(one, words) for one, words in found if words[0] == "python" and words[1].endswith(".py")]
    ours = [(one, words) for one, words in scripts if words[1].startswith("benchmarks/")]
    assert len(ours) > 50
    for one, words in ours:
        source = Path(ROOT / words[1])
        text = "".join(path.read_text(encoding="utf-8") for path in (source, source.parents[1] / "harness.py"))
        missing = [word for word in words[2:] if word.startswith("--") and f'"{word}"' not in text]
        assert not missing, f"{one.page}:{one.line}: {missing}"


def test_every_command_is_run_or_says_why_not() -> None:
    """A block in `bash` stands on a page that is run; of another block each command has a reason."""
    blocks = [one for one in every() if one.shown != "sentence"]
    forgotten = [
        f"{one.page}:{one.line}: {one.text}"
        for one in blocks
        if ((ROOT / one.page).resolve() not in RUN if one.shown == "bash" else reason(one) is None)
    ]
    assert not forgotten, "\n".join(forgotten)


@pytest.mark.parametrize(("place", "start"), [(place, start) for place, starts in LEFT_OUT.items() for start in starts])
def test_no_reason_is_left_over(place: str, start: str) -> None:
    assert any(one.page.startswith(place) and one.text.startswith(start) and one.shown == "" for one in every())


def test_what_is_typed_is_found() -> None:
    page = "Say `isthmus gone`.\n\n```\nisthmus train a.toml \\\n  --gone # why\n```\n\n    isthmus plan JOB\n\nend\n"
    found = list(typed("page.md", page))
    assert [(one.text.split(), one.shown) for one in found] == [
        (["isthmus", "train", "a.toml", "--gone"], ""),
        (["isthmus", "plan", "JOB"], ""),
        (["isthmus", "gone"], "sentence"),
    ]
    assert [error_of(one) for one in found] == ["no option --gone", None, "no command gone"]
