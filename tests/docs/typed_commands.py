"""Commands that pages tell a reader to type: where each stands, and which are shown without being run, and why.

A block in `bash` is run literally (`test_pages.py`). A block without a language only shows its commands: each of them
has its reason in LEFT_OUT. Commands within a sentence are parsed (`test_typed_commands.py`), as all others are.
"""

from __future__ import annotations

import re
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
HISTORY = ("CHANGELOG.md", "docs/reference/", "docs/decisions/", "tests/")
"""No pages to type from: the reference is made from the commands themselves."""
PROGRAMS = ("isthmus", "torchrun", "ray", "curl", "python", "python3", "python3.11", "pip", "make", "git", "ISTHMUS_")
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?:^|\n)\n((?:    [^\n]+\n)+)")
SPAN = re.compile(r"`(isthmus [a-z-]+(?: [^`]*)?)`")

ELSEWHERE = "needs other machines: tests/fleet_service joins devices over loopback"
CLUSTER = "needs a cluster of that kind: tests/launchers has its double"
HARDWARE = "needs a GPU, or hardware that is named here as an example"
BUCKET = "needs a bucket or the hub: tests/stores has doubles of both"
LONG = "takes minutes to hours: the page of the benchmark says how long"
ITSELF = "is what CI runs (.ci/run)"
SITES = "needs three machines, and a ticket that is pasted: tutorials/site-owner.md types the same on one machine"
INSTALLS = "installs from the network: start/install.md is typed"

LEFT_OUT = {
    "CONTRIBUTING.md": {"git clone": ITSELF, "make": ITSELF},
    "README.md": {"make": ITSELF, "pip": INSTALLS, "isthmus": "docs/start/first-run.md types the same"},
    "benchmarks/faults": {"make test-faults": LONG, "ISTHMUS_FAULT": LONG},
    "benchmarks/": {
        "python": LONG,
        "isthmus plan benchmarks/mixed": "tests/planners plans both fleets of the benchmark",
    },
    "docs/clusters.md": {
        "isthmus up job.toml --on": CLUSTER,
        "isthmus up examples/two-machines.toml --on ray": CLUSTER,
        "torchrun": CLUSTER,
        "ray": CLUSTER,
    },
    "docs/correctness.md": {"python -m tests.federated.drawn_privacy": "takes long: tests/federated runs a short one"},
    "docs/dashboard.md": {
        "pip": INSTALLS,
        "isthmus train": "shows a page until Ctrl-C: tests/dashboard",
        "isthmus dashboard": "shows a page until Ctrl-C: tests/dashboard",
    },
    "docs/decoupled.md": {
        "isthmus train everything.toml": LONG,
        "isthmus serve": ELSEWHERE,
        "isthmus join": ELSEWHERE,
        "isthmus submit": ELSEWHERE,
    },
    "docs/engines.md": {"python3.11": "needs a second Python", "ISTHMUS_OTHER_PYTHON": "needs a second Python"},
    "docs/federated.md": {
        "isthmus serve": SITES,
        "isthmus submit": ELSEWHERE,
        "isthmus up": CLUSTER,
        "isthmus join": SITES,
        "ray": CLUSTER,
        "isthmus train fed-digits.toml --set runtime.backend=ray": CLUSTER,
    },
    "docs/jobs.md": {"isthmus export out start": "needs a folder of another program: tests/api/test_export.py"},
    "docs/index.md": {"pip": INSTALLS, "isthmus": "docs/start/first-run.md types the same"},
    "docs/gpus.md": {
        "isthmus probe --device cuda:1": HARDWARE,
        "isthmus probe host/0": ELSEWHERE,
        "ISTHMUS_CHECKED": "tests/accelerators sets both variables",
        "isthmus join": ELSEWHERE,
    },
    "docs/planning-time.md": {"isthmus plan JOB": "JOB stands for a job of the reader's"},
    "docs/pipeline-clients.md": {"isthmus serve": SITES, "isthmus join": SITES, "isthmus simulate": SITES},
    "docs/serving.md": {"isthmus serve": ELSEWHERE, "isthmus generate": ELSEWHERE, "curl": "needs a served model"},
    "docs/start/install.md": {"git clone": INSTALLS, "pip": INSTALLS},
    "docs/stores.md": {"pip": INSTALLS, "isthmus": BUCKET},
    "docs/two-machines.md": {"isthmus": ELSEWHERE, "torchrun": ELSEWHERE},
    "testing/README.md": {"pip": "docs/emulated-accelerator.md types the same"},
}
"""By page, or folder of pages, the beginnings of commands that are shown and not run, with the reason."""


class Typed(NamedTuple):
    page: str
    line: int
    text: str
    shown: str
    """The block's language, "" for a block without one, or "sentence"."""


def pages() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return sorted(page for page in listed if not page.startswith(HISTORY) and (ROOT / page).is_file())


def typed(page: str, text: str) -> Iterator[Typed]:
    """All commands of a page. Continued lines are one command, comments are cut off."""
    rest = text
    for block in FENCE.finditer(text):
        blank = re.sub(r"[^\n]", " ", block[0])
        rest = rest[: block.start()] + blank + rest[block.end() :]
        if block[2] in ("", "bash"):
            yield from _lines(page, text[: block.start(3)].count("\n") + 1, block[3], block[2])
    for block in INDENTED.finditer(rest):
        yield from _lines(page, rest[: block.start(1)].count("\n") + 1, block[1], "")
    for span in SPAN.finditer(rest):
        yield Typed(page, rest[: span.start()].count("\n") + 1, span[1], "sentence")


def _lines(page: str, first: int, body: str, language: str) -> Iterator[Typed]:
    joined = re.sub(r"\\\n *", "\\\n", textwrap.dedent(body))
    for number, line in enumerate(re.split(r"(?<!\\)\n", joined), first):
        for command in re.sub(r"\s+#.*$", "", line.replace("\\\n", " ")).split(" && "):
            program, _, rest = command.strip().partition(" ")
            if rest and (program in PROGRAMS or program.startswith("ISTHMUS_")):
                yield Typed(page, number, command.strip(), language)


def reason(command: Typed) -> str | None:
    """Why a command is not run."""
    found = (
        why for place, starts in LEFT_OUT.items() if command.page.startswith(place) for why in _among(starts, command)
    )
    return next(found, None)


def _among(starts: dict[str, str], command: Typed) -> Iterator[str]:
    yield from (why for start, why in starts.items() if command.text.startswith(start))


def all_typed() -> list[Typed]:
    return [one for page in pages() for one in typed(page, (ROOT / page).read_text(encoding="utf-8"))]
