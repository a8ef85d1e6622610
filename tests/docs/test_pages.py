"""What pages tell a reader to type is typed, literally, in an empty folder.

A page's blocks run one after another in one shell: `bash` as it stands, `python` as a script, and a block with a title
is written to the file of that name. Isthmus is installed from a checkout, of which nothing is in reach afterwards,
but for a folder of it where a page says that it begins in one. Only the jobs that `isthmus init` and `isthmus example`
write have fewer steps here, since emulated machines take a quarter of a second for each. `typed_commands.py` has the
commands that are shown and not run, with reasons.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import isthmus
from tests.docs.newcomer import ROOT, make_machine, type_in
from tests.tiers import represented_by

DOCS = ROOT / "docs"
PAGE = "start/first-run.md"
LONG = [
    "../README.md",
    "tutorials/own-model.md",
    "tutorials/federated.md",
    "tutorials/site-owner.md",
    "tutorials/fine-tune.md",
    "serving.md",
    "cookbook.md",
    "audit.md",
    "decoupled.md",
    "emulated-accelerator.md",
    "faults.md",
    "federated.md",
    "gpus.md",
    "plans.md",
    "sweeps.md",
    "sync.md",
    "tutorials/extend.md",
    "wan.md",
]
"""Typed by `make test-long` alone: each starts a dozen processes. `make test` runs the README in this process
(`tests/api/test_python_page.py`)."""
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
END = "END-OF-A-BLOCK"
FROM_CHECKOUT = {"sync.md": "examples", "tutorials/extend.md": "examples", "emulated-accelerator.md": "testing"}
"""These say that their commands are typed in a checkout, and need this folder of it."""
COMPLETE = "_ISTHMUS_COMPLETE=complete_bash COMP_CWORD=1 COMP_WORDS='isthmus si' isthmus"
COMMANDS = [
    (
        "isthmus example gpt-stdlib && isthmus plan gpt-stdlib.toml --prove '0.1 s'",
        ["gpt-stdlib.toml", "One step should take"],
    ),
    ("isthmus models", ["gpt", "hf-gpt2"]),
    ("isthmus describe gpt", ["vocab_size"]),
    (COMPLETE, ["simulate"]),
]
"""What works in an empty folder, and words that it prints."""


def script_of(text: str) -> str:
    lines = ["set -e"]
    for language, title, body in BLOCK.findall(text):
        if title:
            lines.append(f"cat > {title} <<'{END}'\n{body}{END}")
        elif language == "bash":
            lines.append(body)
        elif language == "python":
            lines.append(f"python - <<'{END}'\n{body}{END}")
    return "\n".join(lines)


def script_of_page(page: str) -> str:
    return script_of((DOCS / page).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Isthmus is installed as the page says, in a checkout. What follows is typed elsewhere."""
    for library in ("transformers", "hatchling", "pip"):
        pytest.importorskip(library)
    folder = tmp_path_factory.mktemp("newcomer")
    shell = make_machine(folder)
    printed = type_in(script_of_page("start/install.md"), ROOT, shell)
    assert f"isthmus {isthmus.__version__}" in printed
    return shell


@pytest.mark.long
def test_a_page_works_as_it_is_written(machine: dict[str, str], tmp_path: Path) -> None:
    type_in(script_of_page(PAGE), tmp_path, machine)


@pytest.mark.long
@pytest.mark.parametrize("page", LONG)
def test_a_long_page_works_as_it_is_written(page: str, machine: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    if page in FROM_CHECKOUT:
        shutil.copytree(ROOT / FROM_CHECKOUT[page], tmp_path / FROM_CHECKOUT[page])
    type_in(script_of_page(page), tmp_path, machine)


@pytest.mark.long
def test_nothing_is_read_from_the_checkout(machine: dict[str, str], tmp_path: Path) -> None:
    where = type_in("python -c 'import isthmus; print(isthmus.__file__)'", tmp_path, machine)
    assert "venv" in where and str(ROOT / "src") not in where


@pytest.mark.parametrize(("command", "words"), represented_by(COMMANDS, COMMANDS[-1]))
def test_a_command_needs_no_checkout(command: str, words: list[str], machine: dict[str, str], tmp_path: Path) -> None:
    printed = type_in(command, tmp_path, machine)
    assert all(word in printed for word in words), printed


def test_nothing_that_was_typed_outlives_its_shell(machine: dict[str, str], tmp_path: Path) -> None:
    """`kill` ends the command itself, as for a reader; what a page leaves in the background is ended after it."""
    script = """
    isthmus dashboard . --port 0 > log 2>&1 &
    until grep -q http log; do sleep 0.1; done
    echo $!; readlink /proc/$!/exe
    """
    number, program = type_in(script, tmp_path, machine).split()
    assert "python" in program
    assert not Path(f"/proc/{number}/exe").exists()


def test_the_blocks_of_a_page_in_their_order() -> None:
    blocks = ("bash\ncd x", 'toml title="a.toml"\nb = 1', "python\nprint(1)", "text\nno")
    page = "# A\n" + "words\n".join(f"```{block}\n```\n" for block in blocks)
    expected = f"set -e\ncd x\n\ncat > a.toml <<'{END}'\nb = 1\n{END}\npython - <<'{END}'\nprint(1)\n{END}"
    assert script_of(page) == expected
