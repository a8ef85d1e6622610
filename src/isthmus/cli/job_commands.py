"""`isthmus plan`, `simulate`, `graph`, `describe-data`, `train` and `sweep`: commands of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer

import isthmus
from isthmus import api
from isthmus.cli.console import log, notes, out, print_json, show, show_run
from isthmus.cli.options import (
    FaultOptions,
    JobFile,
    JobOptions,
    JsonOption,
    PictureOption,
    PlanFileOption,
    RunOptions,
    local_path,
    with_groups,
)
from isthmus.combinations import refused
from isthmus.errors import UserError

app = typer.Typer()

STEPS = 4  # steps of a simulation by default


@dataclass(frozen=True)
class PlanQuestions:
    """Questions in place of a plan; one at a time."""

    compare: Annotated[str | None, typer.Option("--compare", help="`all`, or planners parted by commas.")] = None
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            metavar="CHANGE",
            help="Plan again under a change: all, device=NAME, batch=*2, ...; repeatable.",
        ),
    ] = None
    loss_budget: Annotated[
        float | None, typer.Option("--loss-budget", help="Compare boundaries that cost no more loss: 0.02 is 2 %.")
    ] = None
    verify: Annotated[Path | None, typer.Option("--verify", help="Check a plan document, figure by figure.")] = None
    bound_unchecked: Annotated[
        bool, typer.Option("--bound-unchecked", help="With --verify: pass a bound that takes too much work to check.")
    ] = False

    def check(self, job: isthmus.Job, extra: Sequence[str]) -> None:
        """UserError for a question beside another or beside an `extra` option of a plan, and for what the job lacks."""
        names = {"compare": "--compare", "what_if": "--what-if", "loss_budget": "--loss-budget", "verify": "--verify"}
        alone = [option for name, option in names.items() if getattr(self, name) is not None]
        if alone and len(given := [*alone, *extra]) > 1:
            raise UserError(f"plan: got {' and '.join(given)}, expected {alone[0]} without the others")
        if job.sync.mode == "decoupled" and (given := [*alone, *extra]):
            raise refused("one plan", "decoupled", given[0])
        if self.bound_unchecked and self.verify is None:
            raise UserError("plan: --bound-unchecked is for --verify")


@app.command()
@with_groups
def plan(
    job_file: JobFile,
    asked: JobOptions,
    question: PlanQuestions,
    explain: Annotated[bool, typer.Option("--explain", help="Say why the plan looks as it does.")] = False,
    prove: Annotated[str | None, typer.Option("--prove", help="Raise the proven bound for so long, as '60 s'.")] = None,
    picture: PictureOption = None,
    json: JsonOption = False,
) -> None:
    """Plan where each part of the model runs; or compare planners or boundaries, ask what changes do, or check it.

    With --json: the plan document.
    """
    job = asked.pipeline_job(job_file)
    extra = [name for name, on in (("--explain", explain), ("--prove", prove), ("--picture", picture)) if on]
    question.check(job, extra)
    match question:
        case PlanQuestions(compare=str(planners)):
            raise typer.Exit(_compare(job, planners, json=json))
        case PlanQuestions(what_if=list(changes)):
            found = api.what_if.plan_changes(job, changes, _terminal(), isthmus.Stop())
            show(found, lambda: api.output.what_if_table(found), json=json)
        case PlanQuestions(loss_budget=float(budget)):
            choice = api.what_if.plan_boundaries(job, budget, _terminal(), isthmus.Stop())
            show(choice, lambda: api.output.boundary_table(choice), json=json)
        case PlanQuestions(verify=Path() as document):
            raise typer.Exit(_verify(job, document, bound_unchecked=question.bound_unchecked, json=json))
        case _:
            _plan(job, explain=explain, picture=picture, json=json, prove=prove)


@app.command()
@with_groups
def simulate(
    job_file: JobFile,
    asked: JobOptions,
    struck: FaultOptions,
    more: Annotated[
        list[Path] | None, typer.Argument(metavar="JOB.toml", help="More jobs, which wait for their turn.")
    ] = None,
    plan_file: PlanFileOption = None,
    trace_file: Annotated[
        Path | None, typer.Option("--trace", parser=local_path, metavar="FILE", help="Write a Perfetto trace here.")
    ] = None,
    picture: PictureOption = None,
    json: JsonOption = False,
) -> None:
    """Run the plan on a virtual clock: the same machines as a real run, with modelled durations.

    Without --steps it simulates 4; with faults the whole run: when each is detected, how the run recovers, its new
    plans; the exit code is the run's. Of a job with a table [federated]: its rounds, with clients' times by its fleet
    or as measured here; faults are of its sites, of its fleet's devices or of executor-0, executor-1, ...

    Of a job with sync.mode "decoupled": its replicas, to the end.

    Of several jobs: when each ends, as `isthmus serve` runs them one after another; times are since they are handed in.
    """
    api.output.check_file("--picture", picture, ".png")
    api.output.check_file("--trace", trace_file)
    faults = api.pipeline.read_faults(struck.given)
    if more:
        if given := [n for n, on in (("plan", plan_file), ("trace", trace_file), ("picture", picture)) if on]:
            raise UserError(f"simulate: --{given[0]}: got it with {1 + len(more)} jobs, expected one")
        jobs = [asked.any_job(file) for file in (job_file, *more)]
        queue = api.queue_simulation.simulate_jobs(jobs, faults, _terminal(), isthmus.Stop())
        show(queue.summary(), lambda: "\n".join(queue.lines()), json=json)
        raise typer.Exit(queue.exit_code)
    job = asked.any_job(job_file, None, plan=plan_file, trace=trace_file, picture=picture)
    given = tuple(f"--{n}" for n, on in (("plan", plan_file), ("picture", picture)) if on)
    how = api.forecast.Simulating(faults, None if faults else asked.steps or STEPS, plan_file, given)
    found = api.run_job.program_of(job).simulated(how, _terminal(), isthmus.Stop())
    api.output.write_file("--trace", trace_file, lambda path: api.output.write_perfetto([found.trace], path))
    api.output.write_file("--picture", picture, found.draw)
    _show(found, json=json)


@app.command()
def graph(
    job_file: JobFile,
    operators: Annotated[bool, typer.Option("--operators", help="Every operator, not only layers.")] = False,
    json: JsonOption = False,
) -> None:
    """Show what each layer of a job's model computes and keeps. With --json: every operator too."""
    weights = api.make_plan.weigh_model(api.job_overrides.job_of(job_file, command="isthmus graph"))
    show(weights, lambda: api.output.graph_table(weights, operators=operators), json=json)


@app.command()
def describe_data(
    job_file: JobFile,
    target: Annotated[
        Path | None,
        typer.Option("--out", parser=local_path, metavar="FILE", help="Write the description here; default: stdout."),
    ] = None,
) -> None:
    """Say what a job's data are like, without showing them: for a machine that plans and has none.

    There `[data] description` names the file.
    """
    api.output.check_file("--out", target)
    text = api.make_plan.describe_data(api.job_overrides.job_of(job_file, command="isthmus describe-data"))
    if target is None:
        typer.echo(text.decode(), nl=False)
        return
    api.output.write_file("--out", target, lambda path: path.write_bytes(text))
    log(f'wrote {target}: [data] description = "{target}" plans with it')


@dataclass(frozen=True)
class FederatedOptions:
    """Options in place of what a federated job says."""

    scheme: Annotated[str | None, typer.Option("--scheme", help="Federated: ours, parrot, fa, sd, rw or sp.")] = None
    executors: Annotated[int | None, typer.Option("--executors", min=1, help="Federated: where clients train.")] = None


@app.command()
@with_groups
def train(
    job_file: JobFile,
    asked: JobOptions,
    how: RunOptions,
    federated: FederatedOptions,
    plan_file: PlanFileOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and plan; train nothing.")] = False,
    json: JsonOption = False,
) -> None:
    """Plan, train over one process per device, compare what was predicted with what was measured.

    A federated job (docs/federated.md) trains clients of a population on executors instead.
    """
    changes = api.job_overrides.FederatedChanges(**vars(federated))
    job, stop = asked.any_job(job_file, changes, plan=plan_file), isthmus.Stop()
    if dry_run:
        api.run_job.check_here(job)
        if (found := api.run_job.program_of(job).rehearsed(_terminal(), stop)) is not None:
            _show(found, json=json)
        assert isinstance(job, isthmus.Job), "rounds are rehearsed"
        return _plan(job, explain=False, picture=None, json=json, prove=None)
    if job.kind == "pipeline":
        api.pipeline.fork_before_threads()
    choices = how.choices(plan_file)
    raise typer.Exit(show_run(lambda terminal: api.run_job.run_job(job, choices, terminal, stop), json=json))


@app.command()
def sweep(
    sweep_file: Annotated[Path, typer.Argument(metavar="SWEEP.toml", help="The job, settings and seeds.")],
    resume: Annotated[bool, typer.Option("--resume", help="Train what is not done yet; points may be added.")] = False,
    run: Annotated[Path | None, typer.Option("--run", help="The sweep's folder; default RUN_DIR/NAME.")] = None,
    at_once: Annotated[int | None, typer.Option("--at-once", min=1, help="So many runs at the same time.")] = None,
    json: JsonOption = False,
) -> None:
    """Train a job under several settings and seeds, several runs at once; a table with mean and deviation.

    A run that fails does not stop the others. Ctrl-C saves every run and ends.
    """
    found = isthmus.sweep(sweep_file, resume=resume, run=run, at_once=at_once, note=log)
    document = {"sweep": str(found.path), "rows": found.rows, "results": found.results}
    show(document, lambda: api.output.sweep_table(found.name, found.results), json=json)
    log(f"sweep folder: {found.path}")
    if found.outcome == "interrupted":
        log(f"interrupted: isthmus sweep {sweep_file} --resume")
    raise typer.Exit({"done": 0, "interrupted": 130}.get(found.outcome, 1))


def _terminal() -> api.terminal.Terminal:
    return api.terminal.Terminal(out(), notes())


def _plan(job: isthmus.Job, *, explain: bool, picture: Path | None, json: bool, prove: str | None) -> None:
    """With `json` the plan document; with `explain` too, both in one object. UserError where no PNG can be written."""
    if job.sync.mode == "decoupled":
        replicas = api.decoupled.plan_replicas(job)
        if json:
            print_json(replicas.summary())
            return
        for name, own in replicas.plans.items():
            out().print(f"Replica {name}", style="bold", highlight=False)
            out().print(api.output.plan_table(own, replicas.devices(name), replicas.graph))
        out().print("\n".join(replicas.lines()), highlight=False, soft_wrap=True)
        return
    api.output.check_file("--picture", picture, ".png")
    found = api.make_plan.plan_job(job, _terminal(), isthmus.Stop(), words=explain, prove=prove)
    plan, fleet, explanation = found.plan, found.fleet, found.explanation
    api.output.write_file("--picture", picture, lambda path: api.output.draw_plan(plan, fleet, path))
    if json:
        document = {"plan": plan, "explanation": explanation, "leaving": found.leaving}
        print_json(plan if explanation is None else document)
        return
    out().print(api.output.plan_table(plan, fleet, found.graph))
    if explanation is not None:
        out().print(api.output.explanation_text(explanation))
    for line in found.leaving:
        out().print(line, highlight=False, soft_wrap=True)


def _compare(job: isthmus.Job, planners: str, *, json: bool) -> int:
    """The exit code: 0, or where every planner refused that of the first refusal."""
    found, refusals = api.make_plan.compare_planners(job, planners, _terminal(), isthmus.Stop())
    show(found, lambda: api.output.compared_table(found), json=json)
    return 0 if len(refusals) < len(found.rows) else refusals[0].exit_code


def _verify(job: isthmus.Job, document: Path, *, bound_unchecked: bool, json: bool) -> int:
    """The exit code: 0 when every figure holds, 1 when one does not, or when the bound could not be checked unless
    `bound_unchecked` allows it."""
    plan = api.output.load_plan(document)
    verdict = api.make_plan.verify_plan(job, plan, _terminal().note)
    holds = verdict.holds(bound_unchecked=bound_unchecked)
    stated = {"holds": holds, **msgspec.to_builtins(verdict)}
    show(stated, lambda: api.output.verdict_table(verdict, plan, str(document)), json=json)
    return 0 if holds else 1


def _show(found: api.forecast.Forecast, *, json: bool) -> NoReturn:
    """Show what was simulated; the exit code is the run's."""
    if json:
        print_json(found.summary())
    else:
        shown = [found.table(), "\n".join(found.lines())]
        out().print(*filter(None, shown), sep="\n", highlight=False)
    raise typer.Exit(found.exit_code)
