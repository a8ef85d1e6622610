"""Commands of runs: of a run's folder, `isthmus trace`, `calibrate`, `export` and `audit`; text by its model,
`generate` and `serve-model`; and all runs of a folder as a table, and in a browser."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from isthmus import api
from isthmus.cli.console import log, out, print_json, show
from isthmus.cli.options import (
    FaultOptions,
    FleetFileOption,
    JsonOption,
    RunFolder,
    StateOption,
    local_path,
    with_groups,
)
from isthmus.errors import UserError

app = typer.Typer()


@app.command()
def trace(run: RunFolder, json: JsonOption = False) -> None:
    """Write a Perfetto trace of a run's sessions (predicted and measured); print how well the newest was predicted."""
    perfetto, found, notes, sessions = api.run.write_trace(run)
    _warn(notes)
    match found:
        case list():
            document = {"rounds": len(found), "seconds": sum(line.seconds for line in found)}
            table = api.output.rounds_table(found)
        case api.run.ReplicasTraced():
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
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, the URL of its store, or a DCP folder.")],
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

    A Hugging Face directory when the model is one; of LoRA the adapter alone, as peft reads it. Of a folder of
    torch.distributed.checkpoint the model's tensors, as safetensors: a job may begin with them."""
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
        typer.echo(f"{where}: {found.words}")


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


@dataclass(frozen=True)
class ChainOptions:
    """Where the model runs."""

    objective: Annotated[
        Literal["latency", "throughput"] | None,
        typer.Option("--objective", help="Plan anew, for time per token or tokens/s; default: as the run's plan."),
    ] = None
    at_once: Annotated[int, typer.Option("--at-once", min=1, help="Requests in flight; others wait.")] = 16
    joined: Annotated[
        str | None,
        typer.Option("--joined", metavar="HOST[:PORT]", help="Devices that joined compute; `isthmus serve` was there."),
    ] = None
    address: Annotated[
        list[str] | None, typer.Option("--address", help="HOST[:PORT] by which they reach it; may be repeated.")
    ] = None
    state: StateOption = None

    @property
    def choices(self) -> api.generation.ServingChoices:
        joined = api.generation.joined_at(self.joined, self.address or (), self.state)
        return api.generation.ServingChoices(objective=self.objective, at_once=self.at_once, joined=joined)


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen."""

    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="New tokens at most.")] = 64
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, help="0 takes the likeliest token; others draw.")
    ] = 0.0
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Draw from so many likeliest tokens; 0: all.")] = 0
    top_p: Annotated[float, typer.Option("--top-p", min=0, max=1, help="Draw from so much probability.")] = 1.0
    seed: Annotated[int, typer.Option("--seed", min=0, help="The seed of the random numbers.")] = 0

    @property
    def sampling(self) -> api.generation.Sampling:
        return api.generation.sampling_of(**vars(self))


@app.command()
@with_groups
def generate(
    run: RunFolder,
    where: ChainOptions,
    how: SamplingOptions,
    faults: FaultOptions,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="What the text begins with; repeatable: answered side by side.")
    ] = None,
    tokens: Annotated[
        list[str] | None, typer.Option("--tokens", metavar="IDS", help="Token ids in place of a text, as 1,2,3.")
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Compute nothing: predict when tokens come, also under faults.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Let a run's model continue a text, on the run's devices: stages with key-value caches on emulated links.

    Of one prompt the answer appears as it comes. A device that is lost is replaced.
    """
    prompts, sampling = api.generation.prompts_of(prompt or (), tokens or ()), how.sampling
    struck = api.pipeline.read_faults(faults.given)
    if simulate:
        found = api.generation.simulate_generation(run, where.choices, prompts, sampling.max_tokens, struck, log)
        _show_simulated(found, json=json)
        found.check()
        return
    if struck:
        raise UserError(f"{struck[0].option}: got it without --simulate, expected both")
    streams = len(prompts) == 1 and bool(prompt) and not json
    with api.generation.served_run(run, where.choices, log, prompts) as service:
        if streams:
            typer.echo(prompts[0], nl=False)
            try:
                found = api.generation.generate(service, prompts, sampling, lambda p: typer.echo(p.text, nl=False))
            finally:
                typer.echo()
        else:
            found = api.generation.generate(service, prompts, sampling)
    if json:
        print_json(found.document())
    elif not streams:
        typer.echo("\n".join(answer.shown() for answer in found.answers))
    found.check()
    log(f"{found.tokens_per_s:.3g} tokens/s")


def _show_simulated(found: api.generation.SimulatedServing, *, json: bool) -> None:
    if json:
        print_json(found.document())
        return
    for time_s, text in found.notes:
        typer.echo(f"{time_s:.1f} s: {text}")
    for line in found.without_effect_lines():
        typer.echo(line)
    for number, answer in enumerate(found.answers, 1):
        typer.echo(f"answer {number}: {answer.described()}")
    typer.echo(f"predicted: {found.tokens_per_s:.3g} tokens/s")


@app.command()
@with_groups
def serve_model(
    run: RunFolder,
    where: ChainOptions,
    host: Annotated[str, typer.Option("--host", help="Listen here; not on loopback: with a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 7435,
) -> None:
    """Answer OpenAI's HTTP requests with a run's model, on the run's devices, until Ctrl-C.

    /v1/completions, /v1/chat/completions where the tokenizer has a template, /v1/models; with streaming.
    """
    server = importlib.import_module("isthmus.endpoint.server")
    listener = server.open_port(host, port)  # before devices begin
    with listener.socket, api.generation.served_run(run, where.choices, log) as service:
        server.serve(service, listener, typer.echo)


@app.command()
def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", parser=local_path, help="A folder of runs, or a run's.")
    ] = Path("runs"),
    remove: Annotated[
        list[Path] | None, typer.Option("--remove", metavar="RUN", help="Remove this run's folder; repeatable.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the runs of a folder, the newest first: state, steps and loss; or remove some.

    A run is named as in the list, or by its folder. One that works is not removed.
    """
    for name in remove or ():
        path = name if name.is_absolute() or name.exists() else folder / name
        api.folder.RunFolder(path).remove()
        log(f"removed {path}")
    if not remove:
        listed = importlib.import_module("isthmus.dashboard.run_list")
        found = listed.runs_in(folder)
        show(found, lambda: listed.runs_table(folder, found), json=json)


@app.command()
def dashboard(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a folder of runs.")] = Path("runs"),
    fleet: Annotated[bool, typer.Option("--fleet", help="The fleet that is served here, and its jobs' runs.")] = False,
    state: StateOption = None,
    host: Annotated[str, typer.Option("--host", help="Listen here; not on loopback: with a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 7434,
) -> None:
    """Show runs in a browser, while they work and afterwards, until Ctrl-C; prints the page's address.

    It reads run folders and writes nothing.
    """
    sources, server = (importlib.import_module(f"isthmus.dashboard.{name}") for name in ("run_folder", "server"))
    source = sources.FleetSource(state) if fleet else sources.FolderSource(run)
    server.serve(source, host, port, typer.echo)
