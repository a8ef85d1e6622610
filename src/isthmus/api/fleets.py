"""`isthmus.serve`, `join` and `probe`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypedDict, Unpack

from isthmus.api.coordinating import serve_federated, serve_job, serve_submitted
from isthmus.api.federated import federated_job_of
from isthmus.api.federated_results import FederatedResult
from isthmus.api.federating import FederatedChoices
from isthmus.api.job_overrides import job_of
from isthmus.api.joining import JoinOptions, join_as, kinds_of
from isthmus.api.listening import Serving
from isthmus.api.notebook import default_observer
from isthmus.api.observer import Observer, Written
from isthmus.api.pipeline import Choices
from isthmus.api.probing import Probing, probe_devices
from isthmus.api.runs import Run
from isthmus.errors import UserError
from isthmus.federated.job import FederatedJob, is_federated
from isthmus.fleet import Fleet
from isthmus.job import Job
from isthmus.runtime.processes.launcher import ProcessPlace
from isthmus.runtime.processes.signals import Stop


class Where(TypedDict, total=False):
    """Where a coordinator listens, and how it is reached."""

    host: str
    """Address to listen on; by default 127.0.0.1."""
    port: int
    """By default 7433; 0: any that is free."""
    addresses: tuple[str, ...]
    """HOST or HOST:PORT by which devices reach it; by default `host`."""
    tickets: int
    """So many are made at the start, each for one device; by default none."""
    ticket: Callable[[str], None]
    """Is given each ticket."""
    timeout: str
    """Silence after which a device is lost; by default "60 s"."""
    state: Path | None
    """Folder with the fleet's keys; by default ~/.local/state/isthmus/fleet."""


class HowToJoin(TypedDict, total=False):
    """What a device says of itself."""

    name: str
    """By default the host's."""
    device: str
    """Where it computes: cpu, cuda:0, ...; by default a GPU if there is one."""
    devices: str
    """`all`, or numbers of accelerators, of which each is a device of its own."""
    memory: str
    """What jobs may take of it, as "4 GiB"; by default all."""
    data: Path
    """Folder with its data: jobs name files in it, no others."""
    data_kinds: str
    """Kinds of data that jobs may name, parted by commas; by default all."""
    site: Path
    """Of a federated run: a TOML file with this site's data, and what may run on them."""
    state: Path
    """Folder of its key; by default ~/.local/state/isthmus/device."""


def serve(
    job: Job | FederatedJob | str | Path | None = None,
    *,
    resume: bool = False,
    run: str | Path | None = None,
    overrides: Mapping[str, object] = {},
    observer: Observer | None = None,
    stop: Stop | None = None,
    **where: Unpack[Where],
) -> Run | FederatedResult | None:
    """Coordinate devices that join over TLS, and train a job once all that its plan names are here.

    Without a job it does what is submitted, one job after another, until Ctrl-C, and returns None. A federated job
    trains at the sites that it names. `resume`, `run`, `overrides`, `observer` and `stop` are as of `isthmus.train`.

    UserError for what is wrong with the job, the state folder or the address; PeerError where devices were lost and
    the run could not go on.

    >>> run = isthmus.serve("job.toml", host="10.0.0.1", tickets=2, ticket=print)  # doctest: +SKIP
    """
    told, stop = observer or default_observer(), stop or Stop()
    serving, folder = Serving(**where), None if run is None else Path(run)
    if job is None:
        serve_submitted(serving, told, Written)
        return None
    if isinstance(job, FederatedJob) or (not isinstance(job, Job) and is_federated(Path(job))):
        choices = FederatedChoices(resume=resume, run=folder, again="resume=True")
        return serve_federated(federated_job_of(job, overrides), choices, serving, told, stop)
    return serve_job(
        job_of(job, overrides), Choices(resume=resume, run=folder, again="resume=True"), serving, told, stop
    )


def join(
    ticket: str = "",
    *,
    note: Callable[[str], None] = lambda _: None,
    timeout: str = "60 s",
    **how: Unpack[HowToJoin],
) -> None:
    """Join a fleet and stay, ready to work, until Ctrl-C or dismissal. A ticket is needed the first time.

    `note` gets one line for whatever a person may want to know. UserError for a ticket, name or device that cannot
    be; PeerError where the coordinator refuses.

    >>> isthmus.join(ticket, name="desk", device="cpu", memory="4 GiB")  # doctest: +SKIP
    """
    place = ProcessPlace(data=how.get("data"), data_kinds=kinds_of(how.get("data_kinds", "")))
    asked = JoinOptions(
        state=how.get("state"),
        name=how.get("name"),
        timeout=timeout,
        place=place,
        site=how.get("site"),
        device=how.get("device", "auto"),
        devices=how.get("devices", ""),
        memory=how.get("memory", ""),
    )
    join_as(asked, note, lambda: ticket)


def probe(
    *names: str,
    job: str | Path | None = None,
    device: str = "",
    memory: str = "",
    note: Callable[[str], None] = lambda _: None,
    **where: Unpack[Where],
) -> Fleet:
    """Measure this machine's devices; or, by their names, those of a fleet and the links between them.

    With a `job` speeds (FLOP/s) are those of its model's first layers. `device` is one of this machine's, as "cpu";
    `memory` what may be taken of each. `isthmus.fleet.dump_fleet` writes the fleet as TOML. Devices of a fleet are
    waited for. UserError for a device that is not here.

    >>> fleet = isthmus.probe(device="cpu")  # doctest: +SKIP
    """
    if where and not names:
        raise UserError(f"probe: got {', '.join(where)} without names of devices, expected them for a fleet")
    asked = Probing(names=names, job=None if job is None else Path(job), device=device, memory=memory)
    return probe_devices(asked, Serving(**where), note)
