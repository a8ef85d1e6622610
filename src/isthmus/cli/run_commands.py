"""`isthmus trace`, `calibrate`, `export` and `audit`: commands of a run's folder."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from isthmus import api
from isthmus.cli.console import log, out, print_json, show
from isthmus.cli.options import FleetFileOption, JsonOption, RunFolder, local_path
from isthmus.errors import UserError

app = typer.Typer()


@app.command()
def trace(run: RunFolder, json: JsonOption = False) -> None:
    """Write a Perfetto trace of a run's sessions (predicted and measured); print how well the newest was predicted."""
    perfetto, found, notes, sessions = api.traces.write_trace(run)
    _warn(notes)
    match found:
        case list():
            document = {"rounds": len(found), "seconds": sum(line.seconds for line in found)}
            table = api.output.rounds_table(found)
        case api.traces.ReplicasTraced():
            document, table = msgspec.to_builtins(found), api.output.replicas_table(found)
        case None:
            document, table = {"comparison": None}, "no step of the newest session can be compared with a prediction"
        case _:
            document, table = {"comparison": msgspec.to_builtins(found)}, api.output.comparison_table(found)
    if json:
        print_json({"perfetto": str(perfetto), **document, "sessions": msgspec.to_builtins(sessions)})
        return
    out().print(table)
    for session in sessions:
        out().print(str(session), highlight=False, soft_wrap=True)
    if sessions:
        out().print("the table is of the newest session, the trace of all", highlight=False)
    out().print(f"{perfetto}: open it in ui.perfetto.dev", highlight=False)


@app.command()
def calibrate(run: RunFolder, target: FleetFileOption = None, json: JsonOption = False) -> None:
    """Write a run's fleet as its first steps showed it: stated speeds times measured factors."""
    fleet = api.run.calibrated(run)
    api.output.write_file("--out", target, lambda path: path.write_text(api.output.dump_fleet(fleet), encoding="utf-8"))
    if json:
        print_json(fleet)
    elif target is None:
        typer.echo(api.output.dump_fleet(fleet))
    log(api.output.fitted_text(fleet))
    if target is not None:
        log(f"wrote {target}: --fleet {target} plans with it")


@app.command()
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or the URL of its store.")],
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIR", parser=local_path, help="Where to write; or see --push.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="LoRA: the whole model, with the adapter added.")] = False,
    push: Annotated[
        str | None, typer.Option("--push", metavar="USER/NAME", help="Push to the Hugging Face hub, in place of DIR.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: a repository that all can read.")] = False,
    max_shard_size: Annotated[
        str | None,
        typer.Option("--max-shard-size", metavar="SIZE", help="Most bytes of a file, as 5GB; Hugging Face models."),
    ] = None,
    format: Annotated[
        Literal["safetensors", "dcp"], typer.Option("--format", help="dcp: a folder of torch.distributed.checkpoint.")
    ] = "safetensors",
    optimizer: Annotated[bool, typer.Option("--optimizer", help="With --format dcp: optimizer state too.")] = False,
    json: JsonOption = False,
) -> None:
    """Write a run's newest checkpoint or last federated round: a Hugging Face directory, or safetensors.

    A Hugging Face directory when the model is one; of LoRA the adapter alone, as peft reads it."""
    options = api.export.ExportOptions(merge=merge, max_shard_size=max_shard_size, format=format, optimizer=optimizer)
    if push is not None and directory is None:
        found, notes, where = api.export.push_model(run, push, options, public=public)
    elif push is None and directory is not None and not public:
        (found, notes), where = api.export.export_model(run, directory, options), str(directory)
    else:
        raise UserError("export: expected either DIR or --push USER/NAME; --public is for --push")
    _warn(notes)
    if json:
        print_json({"directory" if push is None else "url": where, found.unit.removesuffix("s"): found.done})
    else:
        typer.echo(f"{where}: the model after {found.done} {found.unit}")


@app.command()
def audit(
    run: RunFolder,
    step: Annotated[int, typer.Option("--step", min=1, help="Up to which optimizer step.")],
    fleet: Annotated[
        str | None, typer.Option("--fleet", help="A built-in fleet or a fleet TOML, to cut the model for.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compute a run's steps again from the checkpoint before, and compare with what its devices reported.

    The run's job says `fingerprints = true` in [runtime]. Without --fleet the run's own plan is used. Exit code 1: a
    device computed wrong, and is named.
    """
    found = api.audit.audit_run(run, step, fleet, log)
    show(msgspec.structs.asdict(found) | {"holds": found.holds}, lambda: "\n".join(found.lines()), json=json)
    raise typer.Exit(0 if found.holds else 1)


def _warn(lines: Iterable[str]) -> None:
    """Print what could not be read."""
    for line in lines:
        print(line, file=sys.stderr)
