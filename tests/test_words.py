"""No private word where the field has one: names, docstrings, messages, options and pages.

Words that a newcomer does not know (PROSE) stand in no page, README, help or message, but in the glossary: there names
in code are not looked at.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.docs.test_named_keys import all_texts

ROOT = Path(__file__).parent.parent
TEXT = (".py", ".md", ".toml", ".yml")
PLACES = ("src", "testing", "docs", "examples", "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "mkdocs.yml")


class Word(msgspec.Struct, frozen=True):
    """`pattern` finds it in any case, also within an identifier; `say` is the field's term.

    `allowed` gives the reason why it may stand in files whose path begins so.
    """

    pattern: str
    say: str
    allowed: dict[str, str] = {}


WORDS = [
    Word("nurser(y|ies)", "fork server"),
    Word("leash", "parent-death pipe"),
    Word("crew", "worker pool, backend"),
    Word("bulletin", "status file"),
    Word("worksite|workshop", "client trainer, site runner"),
    Word("births?|bears?|bore|born", "spawn request, spawn, spawned"),
    Word("braid(s|ed|er)?|strands?", "multi-stream, streams"),
    Word("patience", "timeout"),
    Word(
        "lend(s|er|ers)?|lent|borrow(s|ed|er|ers)?|loans?", "owner and user of tied weights; donor and joiner of state"
    ),
    Word("newcomers?", "joiner; new user"),
    Word("conductors?|conducting", "coordinator"),
    Word("intake", "update receiver"),
    Word("heed(s|ed)?", "on_message"),
    Word("dealer|dealing", "scheduler, assignment"),
    Word("homeless|rehouse[sd]?", "orphaned, reassign"),
    Word("strangers?", "unknown peer"),
    Word("parked|parking", "waiting for a relay"),
    Word("remarks?", "log line"),
    Word("faded", "staleness weight"),
    Word("pins", "fixed placement", {"docs/dependencies.md": "a file pins a version"}),
    Word("seats?", "worker id"),
    Word("receptions?", "acceptor"),
    Word(
        "gauge|renewal",
        "rate estimator, replan policy",
        {"src/isthmus/runtime/service": "a certificate is renewed", "src/isthmus/trackers/prometheus": "its own term"},
    ),
    Word("hopeless", "will not converge"),
    Word("of one mind", "must match"),
    Word("counts? nowhere", "is ignored"),
    Word("beside the work", "in the background"),
    Word("by way of the coordinator", "relayed"),
    Word("whoever|whomever", "the device, process or person that is meant"),
    Word("is waited for", "wait, timeout"),
    Word("(was|were|is|are|be) told|tells? of", "receives, is notified, logs, reports"),
    Word("last words", "exit grace"),
    Word("let go of", "close, release"),
    Word("here and there|comes to a good end", "say which; finishes cleanly"),
]


GLOSSARY = "docs/glossary.md"
MADE = "docs/state-machines.md"
"""Made from names of phases and events."""
PROSE = [
    Word("tasklets?", "task"),
    Word("makespans?", "longest executor, longest device"),
    Word("closed forms?", "formula"),
    Word("attained", "the bound is reached"),
    Word("overran", "took longer than"),
    Word("twins?", "naive reference, copy of the model"),
    Word("paces", "speeds"),
    Word("stolen", "reassigned", {"docs/security.md": "a key is stolen"}),
    Word("part(y|ies)", "peer; site, for an owner of data"),
    Word("closed by (all|the)", "ended by; nothing where all have answered"),
    Word("proven (within|at most)", "no plan can be faster than; this one takes"),
    Word("(best|no|every) possible plans?", "plan with one stage per device: an interleaved one may be faster"),
    Word("its bits are others", "it rounds differently"),
    Word("bytes short", "a size with its unit", {"src/isthmus/runtime/transport": "of a frame on the wire"}),
    Word("certificates? (is|are|of) (the|a|every|any) (plan|bound|proof)s?", "proof"),
    Word("who is another|are a ring|promised windows", "a device with another identity; windows wrap around"),
    Word("no way to the loss meets", "it reaches the loss without passing a trained parameter"),
]
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`|\]\([^)\n]*\)", re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    known = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PLACES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return [Path(name) for name in known if name.endswith(TEXT) and (ROOT / name).is_file()]


PAGES = {path: (ROOT / path).read_text(encoding="utf-8") for path in pages()}
LOWER = {path: text.lower() for path, text in PAGES.items()}


@functools.cache
def prose() -> list[tuple[str, str]]:
    """(place, line) of pages without their code, and of messages and help."""
    pages = {str(path): text for path, text in PAGES.items() if path.suffix == ".md"}
    found = [
        (f"{name}:{number}", line)
        for name, text in pages.items()
        if name not in (GLOSSARY, MADE)
        for number, line in enumerate(CODE.sub(lambda code: "\n" * code[0].count("\n"), text).splitlines(), 1)
    ]
    return [*found, *((f"src/isthmus/{place}", text) for place, text in all_texts() if " " in text)]


@pytest.mark.parametrize("word", PROSE, ids=lambda word: word.pattern)
def test_a_word_that_newcomers_do_not_know_stands_in_no_sentence(word: Word) -> None:
    finder = re.compile(rf"(?<![\w-])(?:{word.pattern})(?![\w])", re.IGNORECASE)
    places = [(place, line) for place, line in prose() if finder.search(line)]
    found = [f"{place}: {line.strip()}" for place, line in places if not place.startswith((*word.allowed,))]
    assert not found, f"say {word.say}:\n" + "\n".join(found)
    unused = [start for start in word.allowed if not any(place.startswith(start) for place, _ in places)]
    assert not unused, f"allowed for nothing: {unused}"


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word.pattern)
def test_a_private_word_stands_nowhere(word: Word) -> None:
    finder = re.compile(rf"(?<![A-Za-z])(?:{word.pattern})(?![a-z])", re.IGNORECASE)
    allowed = dict.fromkeys(word.allowed, 0)
    found: list[str] = []
    for path, text in PAGES.items():
        if not re.search(word.pattern, LOWER[path]):  # ten times as fast as `finder`, which looks behind everywhere
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if not finder.search(line):
                continue
            place = next((start for start in allowed if str(path).startswith(start)), None)
            if place is None:
                found.append(f"{path}:{number}: {line.strip()}")
            else:
                allowed[place] += 1
    assert not found, f"say {word.say}:\n" + "\n".join(found)
    assert all(allowed.values()), f"allowed for nothing: {allowed}"


def documented(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Docstrings, and strings after attributes, each with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def test_no_docstring_begins_with_a_word_that_stands_for_its_subject() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for folder in ("src", "testing")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in documented(ast.parse(path.read_text(encoding="utf-8")))
        if re.match(r"(Of|What|By|As|That|Whose?)\b", text)
    ]
    assert not found, "a sentence with a subject, or a phrase with its noun first:\n" + "\n".join(found)
