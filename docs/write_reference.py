"""Writes the pages of `docs/reference` that are made from the code: `make reference`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isthmus.cli.app import commands
from isthmus.report.settings_reference import kinds_page, reference_page

FOLDER = Path(__file__).parent / "reference"
EXIT_CODES = {
    0: "done",
    1: "failed",
    2: "bad input, or refused by the coordinator",
    3: "the fleet cannot hold the model",
    4: "a device was lost and the run could not go on",
    130: "interrupted, after saving",
}


def pages() -> dict[str, str]:
    """By file name."""
    return {"files.md": reference_page(), "options.md": kinds_page(), "commands.md": commands_page()}


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
    if options:
        yield "\n".join(["| option | default | meaning |", "|---|---|---|", *map(_row, options)])


def _row(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    default = option.default
    given = "required" if option.required else f"`{default}`" if default not in (None, False, (), "") else ""
    meaning = (option.help or "").replace("\\[", "[").replace("|", "\\|")
    return f"| {names} | {given} | {meaning} |"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, text in pages().items():
        (FOLDER / file).write_text(text, encoding="utf-8")
        print(FOLDER / file, file=sys.stderr)
