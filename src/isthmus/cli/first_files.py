"""`isthmus init` and `example`: first files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from isthmus.cli.console import notes, out
from isthmus.errors import UserError
from isthmus.scaffold import STEPS, TASKS, FirstJob, Task, copy_example, example_names, task_of, write_first_job

app = typer.Typer()

Answer = TypeVar("Answer", str, int)

DATA: Mapping[Task, tuple[str, str]] = {
    "text": ("Which text (a file, a glob, or stdlib for Python's own source)?", "stdlib"),
    "images": ("Which images (a folder with a folder per class, or digits)?", "digits"),
}
"""By task: the question, and its default."""


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Where to write; made if need be.")] = Path(),
    task: Annotated[str | None, typer.Option("--task", help=f"What to train: {', '.join(TASKS)}.")] = None,
    data: Annotated[str | None, typer.Option("--data", help="Text files or a glob; or a folder of images.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="The run's name.")] = None,
    devices: Annotated[int | None, typer.Option("--devices", min=1, help="How many devices to emulate.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Optimizer steps, or federated rounds.")] = None,
) -> None:
    """Write a job, a fleet and a model of your own to begin with. Asks what no option says, on a terminal."""
    chosen = task_of(_asked("What do you want to train (text, images, federated)?", task, "text"))
    if chosen == "federated" and data not in (None, "digits"):
        raise UserError("--data: got it for a federated job, which begins with digits: change [data] in job.toml")
    length = "How many rounds?" if chosen == "federated" else "How many steps?"
    first = FirstJob(
        task=chosen,
        data=_asked(DATA[chosen][0], data, DATA[chosen][1]) if chosen in DATA else "",
        name=_asked("What shall the run be called?", name, folder.absolute().name or "first"),
        devices=_asked("How many devices?", devices, 2),
        steps=_asked(length, steps, STEPS[chosen]),
    )
    for path in write_first_job(folder, first):
        out().print(str(path), highlight=False)
    where = "" if folder.absolute() == Path.cwd() else f"cd {folder} && "
    console = notes()
    console.print(f"run it:   {where}isthmus train job.toml")
    console.print(f"or first: {where}isthmus {'simulate' if chosen == 'federated' else 'plan'} job.toml")


@app.command()
def example(
    name: Annotated[str | None, typer.Argument(help="Which; without it they are listed.")] = None,
    folder: Annotated[Path, typer.Argument(help="Where to copy it.")] = Path(),
) -> None:
    """Copy an example into this folder."""
    if name is None:
        for one in example_names():
            out().print(one, highlight=False)
        return
    for path in copy_example(name, folder):
        out().print(str(path), highlight=False)


def _asked(question: str, given: Answer | None, default: Answer) -> Answer:
    """What an option says; else what a person says, on a terminal; else the default."""
    if given is not None or not sys.stdin.isatty():
        return default if given is None else given
    return typer.prompt(question, default=default, type=type(default), err=True)
