"""`isthmus init` and `example`: first files."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from isthmus.cli.console import notes, out
from isthmus.errors import UserError
from isthmus.scaffold import (
    CLIENTS,
    DATA,
    STEPS,
    TASKS,
    FirstJob,
    check_count,
    check_data,
    check_name,
    copy_example,
    example_names,
    name_for,
    task_of,
    write_first_job,
)

app = typer.Typer()

Answer = TypeVar("Answer", str, int)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Where to write; made if need be.")] = Path(),
    task: Annotated[str | None, typer.Option("--task", help=f"What to train: {', '.join(TASKS)}.")] = None,
    data: Annotated[str | None, typer.Option("--data", help="Text files or a glob; or a folder of images.")] = None,
    clients: Annotated[int | None, typer.Option("--clients", min=1, help="Clients of a federated job.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="The run's name.")] = None,
    devices: Annotated[int | None, typer.Option("--devices", min=1, help="How many devices to emulate.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Optimizer steps, or federated rounds.")] = None,
) -> None:
    """Write a job, a fleet and a model of your own to begin with. Asks what no option says, on a terminal."""
    chosen = task_of(_asked("What do you want to train (text, images, federated)?", task, "text", task_of))
    rounds = chosen == "federated"
    if rounds and data not in (None, "digits"):
        raise UserError("--data: got it for a federated job, which begins with digits: change [data] in job.toml")
    if clients is not None and not rounds:
        raise UserError(f"--clients: got it for {chosen}, expected it with --task federated")
    first = FirstJob(
        task=chosen,
        data="" if rounds else _asked(DATA[chosen][0], data, DATA[chosen][1], partial(check_data, chosen)),
        clients=_asked("How many clients?", clients, CLIENTS, check_count) if rounds else CLIENTS,
        name=_asked("What shall the run be called?", name, name_for(folder), check_name),
        devices=_asked("How many executors?" if rounds else "How many devices?", devices, 2, check_count),
        steps=_asked("How many rounds?" if rounds else "How many steps?", steps, STEPS[chosen], check_count),
    )
    for path in write_first_job(folder, first):
        out().print(str(path), highlight=False)
    where = "" if folder.absolute() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    notes().print(f"run it:   {where}isthmus train job.toml")
    notes().print(f"or first: {where}isthmus {'simulate' if rounds else 'plan'} job.toml")


@app.command()
def example(
    name: Annotated[str | None, typer.Argument(help="Which; without it they are listed.")] = None,
    folder: Annotated[Path, typer.Argument(help="Where to copy it.")] = Path(),
) -> None:
    """Copy an example into this folder."""
    for line in example_names() if name is None else copy_example(name, folder):
        out().print(str(line), highlight=False)


def _asked(question: str, given: Answer | None, default: Answer, read: Callable[[str], Answer]) -> Answer:
    """An option's value; else a person's answer on a terminal, asked again until `read` takes it; else the default."""
    if given is not None or not sys.stdin.isatty():
        return default if given is None else given

    def answer(text: str) -> Answer:
        try:
            return read(text)
        except UserError as e:
            raise typer.BadParameter(str(e)) from None

    return typer.prompt(question, default=default, value_proc=answer, err=True)
