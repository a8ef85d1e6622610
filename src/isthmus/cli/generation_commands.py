"""`isthmus generate` and `isthmus serve-model`: text by the model of a run."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from isthmus import api
from isthmus.cli.console import log, print_json
from isthmus.cli.options import FaultOptions, JsonOption, RunFolder, StateOption, with_groups
from isthmus.errors import UserError

app = typer.Typer()


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
    struck = api.fault_simulation.read_faults(faults.given)
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
