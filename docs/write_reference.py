"""Writes the pages that are made from the code: `make reference`."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from isthmus.cli.app import commands
from isthmus.option_docs import OptionDoc
from isthmus.programs.masked import Masked
from isthmus.programs.merger import Merger
from isthmus.programs.pipeline import Pipeline
from isthmus.programs.rounds import Rounds
from isthmus.programs.tokens import Tokens
from isthmus.report.settings_reference import KINDS, TableDoc, option_rows, tables_by_file

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))
python_page = importlib.import_module("python_reference").python_page
together_page = importlib.import_module("together_page").together_page
EXIT_CODES = {
    0: "done, or stopped by a callback",
    1: "failed",
    2: "bad input, or refused by the coordinator",
    3: "the fleet cannot hold the model",
    4: "a device was lost and the run could not go on",
    130: "interrupted, after saving",
}

PROGRAMS = {
    "Pipeline": Pipeline,
    "A service that generates text": Tokens,
    "The merger of decoupled replicas": Merger,
    "The coordinator of federated rounds": Rounds,
    "Secure aggregation, the coordinator": Masked,
}


def pages() -> dict[str, str]:
    """By path in `docs`."""
    return {
        "state-machines.md": machines_page(),
        "journeys.md": journeys_page(),
        "together.md": together_page(),
        "reference/files.md": files_page(),
        "reference/options.md": options_page(),
        "reference/commands.md": commands_page(),
        "reference/python.md": python_page(),
    }


SYMBOL = re.compile(r"\[`([\w.]+)`\]\(\.\./(src/[\w/]+\.py)#L\d+\)")


def journeys_page() -> str:
    """The page as it is, with the lines of today. KeyError for a function that its file does not have."""
    text = (DOCS / "journeys.md").read_text(encoding="utf-8")
    return SYMBOL.sub(lambda link: f"[`{link[1]}`](../{link[2]}#L{_lines(link[2])[link[1]]})", text)


@cache
def _lines(path: str) -> Mapping[str, int]:
    """By name, in what line a function or a method of a file begins."""
    found: dict[str, int] = {}
    for node in ast.parse((DOCS.parent / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node.lineno
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{f.name}": f.lineno for f in node.body if isinstance(f, ast.FunctionDef)}
    return found


def machines_page() -> str:
    parts = [
        "# State machines",
        "This page is made from the machines (`make reference`).",
        "A state machine decides the next action. What happens is a call of one of its methods, and what it wants "
        "done is a call of its port. It knows no clock, socket, thread or tensor. A host implements the port. The "
        "runtime and the simulator are hosts of the same machines.",
        "Reports of peers cross the wire as messages. All machines have the same rule for them "
        "([program.py](../src/isthmus/session/program.py)):",
        "| report | result |\n|---|---|\n"
        "| late: of another plan epoch or of another phase of a round | the machine drops and counts the report (the "
        "sender gets an answer if it waits for one) |\n"
        "| in a phase that its row does not have | the machine raises `OutOfPhase` and does not change; the host "
        "expels the sender |\n"
        "| after the last phase | the machine drops the report |",
        "The phases of a machine are drawn in its file. A machine that takes no reports of peers has no table here: "
        "the worker of a stage ([worker.py](../src/isthmus/protocol/worker.py)) and the member of a fleet "
        "([fleet_membership.py](../src/isthmus/protocol/fleet_membership.py)).",
    ]
    for heading, program in PROGRAMS.items():
        file = f"src/{program.__module__.replace('.', '/')}.py"
        rows = [f"| `{kind.__name__}` | {', '.join(taken.phases)} |" for kind, taken in program.reports.items()]
        parts += [
            f"## {heading}",
            f"`{program.__name__}`, in [{Path(file).name}](../{file}).",
            "\n".join(["| report | phases |", "|---|---|", *rows]),
        ]
    return "\n\n".join(parts) + "\n"


def files_page() -> str:
    """`docs/reference/files.md`."""
    parts = [
        "# Files",
        "Every key of every file that you write. This page is made from the structs that read the files "
        '(`make reference`); a test compares the two. Quantities are texts with a unit: `"20 ms"`, `"100 Mbit/s"`, '
        '`"16 GiB"`, `"10 GFLOPS"`.',
    ]
    for title, tables in tables_by_file().items():
        parts += _page_part(title, tables)
    return "\n\n".join(parts) + "\n"


def options_page() -> str:
    """`docs/reference/options.md`: options of models, data sets, algorithms and trackers."""
    parts = [
        "# Models, data sets, algorithms, trackers",
        "What a job can name, with its options. This page is made from the code (`make reference`). "
        "`isthmus describe NAME` prints the same, and the options of Hugging Face models and of your own "
        "`package.module:callable` too.",
    ]
    for kind, (where, names, describe) in KINDS.items():
        parts.append(f"## {kind.capitalize()}s: `{where}`")
        for name in names():
            if name.startswith("hf-"):
                continue  # options of another library, of the version that is installed
            summary, options = describe(name)
            parts += [f"### `{name}`", summary]
            if options:
                parts.append("\n".join(_markdown(options)))
    return "\n\n".join(parts) + "\n"


def _page_part(title: str, tables: Iterable[TableDoc]) -> Iterator[str]:
    yield f"## {title}"
    for table in tables:
        if table.heading:
            yield f"### `{table.heading}`"
        yield table.summary
        yield "\n".join(_markdown(table.options))


def _markdown(options: Iterable[OptionDoc]) -> Iterator[str]:
    yield "| key | type and default | meaning |"  # three columns fit on a phone
    yield "|---|---|---|"
    for key, kind, default, meaning in option_rows(options):
        yield f"| `{key}` | {_escaped(_type_and_default(kind, default))} | {_escaped(meaning)} |"


def _type_and_default(kind: str, default: str) -> str:
    if default in ("", "required"):
        return f"{kind}, {default}".removesuffix(", ")
    return f"{kind}, `{default}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def commands_page() -> str:
    parts = [
        "# Commands",
        "This page is made from the command line itself (`make reference`). Commands that show or compute something "
        "take `--json`. stdout is data, stderr is progress and errors.",
        "| exit code | meaning |\n|---|---|\n" + "\n".join(f"| {code} | {EXIT_CODES[code]} |" for code in EXIT_CODES),
    ]
    for name, command in commands().items():
        parts += _command(name, command)
    return "\n\n".join(parts) + "\n"


def _command(name: str, command: Any) -> Iterator[str]:  # click's, or that of the copy that typer brings along
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    places = [(a.metavar or a.name.upper(), a.required) for a in arguments]
    usage = " ".join(place if required else f"[{place}]" for place, required in places)
    yield f"## `isthmus {name}`"
    yield command.help.split("\n\n")[0].replace("\n", " ")
    yield f"```\nisthmus {name} {usage}".rstrip() + (" [OPTIONS]" if options else "") + "\n```"
    if arguments:
        rows = [f"| `{a.metavar or a.name.upper()}` | {_meaning(a)} |" for a in arguments]
        yield "\n".join(["| argument | meaning |", "|---|---|", *rows])
    if options:
        yield "\n".join(["| option | default | meaning |", "|---|---|---|", *map(_row, options)])


def _row(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    default = option.default
    given = "required" if option.required else f"`{default}`" if default not in (None, False, (), "") else ""
    return f"| {names} | {given} | {_meaning(option)} |"


def _meaning(parameter: Any) -> str:
    return (parameter.help or "").replace("\\[", "[").replace("|", "\\|")


if __name__ == "__main__":
    for file, text in pages().items():
        (DOCS / file).write_text(text, encoding="utf-8")
        print(DOCS / file, file=sys.stderr)
