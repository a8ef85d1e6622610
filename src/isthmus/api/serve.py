"""A coordinator of a fleet: it listens, and trains one job, at sites or on devices, or all submitted jobs."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TypedDict, Unpack, cast

import msgspec

from isthmus.api.callbacks import ATTACHED, Attached, attached_to, given_callbacks
from isthmus.api.given import check_arguments
from isthmus.api.job_overrides import any_job_of
from isthmus.api.job_queue import Logged, run_queue
from isthmus.api.notebook import default_observer
from isthmus.api.observer import Observer, Written
from isthmus.api.page import page_beside
from isthmus.api.run import Run
from isthmus.api.run_job import check_on_fleet, run_job
from isthmus.api.run_session import Choices
from isthmus.api.states import PORT, state_folder, timeout_s
from isthmus.errors import UserError
from isthmus.federated.job import FederatedJob
from isthmus.job import Job
from isthmus.listening import shown_address
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.service.fleet_coordinator import FleetCoordinator
from isthmus.runtime.service.fleet_state import Addresses, FleetState
from isthmus.runtime.service.job_queue import JobQueue
from isthmus.units import parse_duration, whole_number


def serve_job(job: Job | FederatedJob, choices: Choices, serving: Serving, observer: Observer, stop: Stop) -> Run:
    """Until it has run."""
    check_on_fleet(job)
    with serving_fleet(serving, observer.note) as service:
        return run_job(job, msgspec.structs.replace(choices, backend=service), observer, stop)


def serve_submitted(serving: Serving, observer: Observer, logged: Logged, *, dashboard: bool = False) -> None:
    """Until Ctrl-C. With `dashboard` a page shows the fleet."""
    folder = (serving.state or state_folder("fleet")).absolute()
    with (
        serving_fleet(msgspec.structs.replace(serving, state=folder), observer.note) as service,
        page_beside(folder if dashboard else None, observer.note, fleet=True),
        contextlib.closing(JobQueue(folder)) as queue,
    ):
        observer.note("waiting for devices (`isthmus join`) and for jobs (`isthmus submit JOB.toml`)")
        run_queue(service, queue, folder, observer.note, logged)


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """Where a coordinator listens, and how it is reached."""

    host: str = "127.0.0.1"  # address to listen on
    port: int = PORT  # 0: any that is free
    addresses: tuple[str, ...] = ()  # HOST or HOST:PORT by which devices reach it; none: `host`
    tickets: int = 0  # so many are made at the start
    timeout: str = "60 s"  # silence after which a device is lost
    renew_after_absence: str = "0 s"
    """For so long a device may be away and needs no ticket when it comes back, though certificates end after a day."""
    state: Path | None = None  # folder with the fleet's keys; none: ~/.local/state/isthmus/fleet
    ticket: Callable[[str], None] = lambda _: None  # is given each ticket


@contextlib.contextmanager
def serving_fleet(serving: Serving, log: Callable[[str], None]) -> Generator[FleetCoordinator]:
    """A service that listens."""
    renewed_s = parse_duration(serving.renew_after_absence, "--renew-after-absence")
    fleet = FleetState(serving.state or state_folder("fleet"))
    with (
        fleet.served(),
        FleetCoordinator(
            fleet,
            serving.host,
            serving.port,
            timeout_s=timeout_s(serving.timeout),
            log=log,
            renew_after_absence_s=renewed_s,
        ) as service,
    ):
        fleet.listens_at(_addresses(serving, service.port))
        service.start()
        log(f"listening on {shown_address(serving.host, service.port)} with TLS; state folder {fleet.folder}")
        for _ in range(serving.tickets):
            serving.ticket(fleet.ticket())
        if serving.tickets:
            log("each ticket lets one machine join, within 24 hours: `isthmus join` asks for it")
        yield service


def _addresses(serving: Serving, port: int) -> Addresses:
    """UserError where nobody could tell how the coordinator is reached."""
    if serving.addresses:
        return tuple(address_of(text, port) for text in serving.addresses)
    if _is_wildcard(serving.host):
        raise UserError(f"--host {serving.host!r}: tickets need an address that devices can dial: add --address HOST")
    return ((serving.host, port),)


def _is_wildcard(host: str) -> bool:
    """Return whether an address stands for every address, as "" and "0" do. It can be bound."""
    found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return any(ipaddress.ip_address(entry[4][0]).is_unspecified for entry in found)


def address_of(text: str, port: int, option: str = "--address") -> tuple[str, int]:
    """HOST, HOST:PORT, or [HOST]:PORT for one with colons. UserError, which names the option."""
    if not text.strip("[]: "):
        raise UserError(f"{option}: got {text!r}, expected HOST or HOST:PORT")
    host, colon, number = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host.strip("[]") and not host.startswith("[")):
        return text.strip("[]"), port
    if not 0 < (whole_number(number) or 0) < 65536:
        raise UserError(f"{option} {text}: port: got {number!r}, expected a number up to 65535")
    return host.strip("[]"), int(number)


class Where(TypedDict, total=False):
    """Where a coordinator listens, and how it is reached."""

    host: str  # address to listen on; by default 127.0.0.1
    port: int  # the port, by default 7433; 0: any that is free
    addresses: tuple[str, ...]  # HOST or HOST:PORT by which devices reach it; by default `host`
    tickets: int  # so many are made at the start, each for one device; by default none
    ticket: Callable[[str], None]  # is given each ticket
    timeout: str  # silence after which a device is lost; by default "60 s"
    state: Path | None  # folder with the fleet's keys; by default ~/.local/state/isthmus/fleet


class HowServed(Where, Attached, total=False):
    """Where a coordinator listens, and how it is reached; callbacks and trackers of its job."""


def serve(
    job: Job | FederatedJob | str | Path | None = None,
    *,
    resume: bool = False,
    run: str | Path | None = None,
    overrides: Mapping[str, object] = {},
    observer: Observer | None = None,
    stop: Stop | None = None,
    dashboard: bool = False,
    **given: Unpack[HowServed],
) -> Run | None:
    """Coordinate devices that join over TLS, and train a job once all that its plan names are here.

    Without a job it does what is submitted, one job after another, until Ctrl-C, and returns None. A federated job
    trains at the sites that it names. `resume`, `run`, `overrides`, `observer`, `stop`, `dashboard`, `callbacks`,
    `track`, `metrics` and `quiet` are as of `isthmus.train`; without a job the page shows the fleet.

    UserError for what is wrong with the job, the state folder or the address; PeerError where devices were lost and
    the run could not go on.

    >>> run = isthmus.serve("job.toml", host="10.0.0.1", tickets=2, ticket=print)  # doctest: +SKIP
    """
    check_arguments(serve, HowServed, given)
    observer, stop = observer or default_observer(quiet=given.get("quiet", False)), stop or Stop()
    listening = cast("Where", {name: value for name, value in given.items() if name not in ATTACHED})
    serving, folder = Serving(**listening), None if run is None else Path(run)
    if job is None:
        serve_submitted(serving, observer, Written, dashboard=dashboard)
        return None
    choices = Choices(resume=resume, run=folder, dashboard=dashboard, callbacks=given_callbacks(given))
    return serve_job(attached_to(any_job_of(job, overrides), given), choices, serving, observer, stop)
