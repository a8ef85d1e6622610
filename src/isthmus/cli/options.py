"""Options that several commands have: single ones, and groups of them. Only light modules are imported here."""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from isthmus import api
from isthmus.api.states import PORT
from isthmus.documents import check_is_local
from isthmus.errors import UserError
from isthmus.overrides import read_overrides

if TYPE_CHECKING:
    from isthmus import FederatedJob, Job
    from isthmus.api.job_overrides import Changes, FederatedChanges
    from isthmus.api.run_session import Choices
    from isthmus.api.serving_fleet import Serving


def local_path(text: str | Path) -> Path:
    """Return the path of an option that is written to. BadParameter, which names the option, for the address of a
    remote store."""
    try:
        check_is_local("", str(text))
    except UserError as e:
        raise typer.BadParameter(str(e).removeprefix(": ")) from None
    return Path(text)


JobFile = Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job: model, data, training.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of this job.")]
RunOption = Annotated[Path | None, typer.Option("--run", help="The run's folder; default RUN_DIR/NAME.")]
DashboardOption = Annotated[bool, typer.Option("--dashboard", help="Show it in a browser: prints the page's address.")]
PlanFileOption = Annotated[Path | None, typer.Option("--plan", help="A plan document, in place of planning.")]
PictureOption = Annotated[
    Path | None,
    typer.Option("--picture", parser=local_path, metavar="FILE", help="Draw the plan, or the run with faults: a PNG."),
]
FleetFileOption = Annotated[
    Path | None,
    typer.Option("--out", parser=local_path, metavar="FILE", help="Write the fleet here; default: stdout."),
]
TimeoutOption = Annotated[str, typer.Option("--timeout", help="Silence after which a peer is lost.")]
StateOption = Annotated[
    Path | None,
    typer.Option(
        "--state",
        parser=local_path,
        metavar="DIR",
        help="Folder with the fleet's keys; default ~/.local/state/isthmus/fleet.",
    ),
]
DeviceStateOption = Annotated[
    Path | None,
    typer.Option(
        "--state",
        parser=local_path,
        metavar="DIR",
        help="Folder of the key; default ~/.local/state/isthmus/device.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


def command_to_go_on() -> str:
    """The command that was typed, as one that goes on with the run in the folder that `{run}` stands for."""
    words, skip = ["isthmus"], False
    for word in sys.argv[1:]:
        if not skip and word.partition("=")[0] not in ("--resume", "--run", "--debug"):
            words.append(word)
        skip = word == "--run"
    return f"{shlex.join(words)} --resume --run {{run}}"


@dataclass(frozen=True)
class JobOptions:
    """Options in place of what a job says; None: as it says."""

    fleet: Annotated[str | None, typer.Option("--fleet", help="A built-in fleet or a fleet TOML.")] = None
    planner: Annotated[str | None, typer.Option("--planner", help="See `isthmus planners`.")] = None
    devices: Annotated[int | None, typer.Option("--devices", min=1, help="Thin the fleet to so many devices.")] = None
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Optimizer steps, in place of the job's.")] = None
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Federated: in place of the job's.")] = None
    objective: Annotated[
        Literal["time", "cost"] | None,
        typer.Option("--objective", help="What to minimise: a step's time, or its price."),
    ] = None
    max_step: Annotated[
        str | None, typer.Option("--max-step", help="With --objective cost: no step longer than that, as '300 ms'.")
    ] = None
    max_price: Annotated[
        float | None, typer.Option("--max-price", help="With --objective time: what 1,000 steps may cost.")
    ] = None
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="In place of what the job says: training.steps=50; repeatable."
        ),
    ] = None

    def pipeline_job(self, path: Path) -> Job:
        """UserError for a federated job."""
        return self._changes.of(api.job_overrides.job_of(path, read_overrides(self.overrides or ())))

    def any_job(self, path: Path, federated: FederatedChanges | None = None, **others: object) -> Job | FederatedJob:
        """UserError for options of another kind of job; `others` are further ones that a federated job lacks."""
        given, options = read_overrides(self.overrides or ()), {f"--{name}": value for name, value in others.items()}
        return api.job_overrides.read_job(path, self._changes, federated, given, others=options)

    def refuse_without_job(self, others: Mapping[str, object]) -> None:
        """UserError for an option that says something of a job; `others` are further ones."""
        own = {f"--{field.name.replace('_', '-')}": getattr(self, field.name) for field in fields(self)}
        for option, value in {**own, "--set": own.pop("--overrides"), **others}.items():
            if value:
                raise UserError(f"{option}: got it without a job, expected JOB.toml: `isthmus submit` hands in others")

    @property
    def _changes(self) -> Changes:
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "overrides"}
        return api.job_overrides.Changes(**given)


@dataclass(frozen=True)
class ServeOptions:
    """Where a coordinator listens, and how it is reached."""

    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = PORT
    address: Annotated[
        list[str] | None, typer.Option("--address", help="HOST[:PORT] by which devices reach it; may be repeated.")
    ] = None
    timeout: TimeoutOption = "60 s"
    renew_after_absence: Annotated[
        str,
        typer.Option(
            "--renew-after-absence", help="So long a device may be away and needs no new ticket: 30 d; default: a day."
        ),
    ] = "0 s"
    state: StateOption = None

    def serving(self, tickets: int) -> Serving:
        """`tickets` are printed at the start."""
        return api.serving_fleet.Serving(
            host=self.host,
            port=self.port,
            addresses=tuple(self.address or ()),
            tickets=tickets,
            timeout=self.timeout,
            renew_after_absence=self.renew_after_absence,
            state=self.state,
            ticket=typer.echo,
        )


@dataclass(frozen=True)
class RunOptions:
    """How a run is begun and shown."""

    resume: ResumeOption = False
    run: RunOption = None
    dashboard: DashboardOption = False

    def choices(self, plan: Path | None = None) -> Choices:
        return api.run_session.Choices(**vars(self), plan=plan, again=command_to_go_on())


@dataclass(frozen=True)
class FaultOptions:
    """Faults of a simulation; each may be given again."""

    fault: Annotated[
        list[str] | None,
        typer.Option("--fault", help="DEVICE@12s[+20s], silent:DEVICE@12s+9s, link:A:B@30s+20s, coordinator@30s+5s."),
    ] = None
    slow: Annotated[list[str] | None, typer.Option("--slow", help="DEVICE@40s:4: four times slower.")] = None
    join: Annotated[list[str] | None, typer.Option("--join", help="DEVICE@60s: it could work from then on.")] = None
    leave: Annotated[list[str] | None, typer.Option("--leave", help="DEVICE@60s: it leaves without loss.")] = None

    @property
    def given(self) -> dict[str, list[str] | None]:
        return {field.name: getattr(self, field.name) or None for field in fields(self)}


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer reads it: a parameter that is a dataclass of options stands for the dataclass's fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += inspect.signature(groups[name], eval_str=True).parameters.values()
        else:
            parameters.append(parameter.replace(annotation=hints[name]))

    def called(**given: object) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    called.__name__, called.__doc__ = command.__name__, command.__doc__
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    called.__dict__["__signature__"] = inspect.Signature(keyword_only)
    return called
