"""A device joins a fleet."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypedDict, Unpack

import msgspec

from isthmus.accelerators import AUTO, accelerator_names, open_accelerator, resolve_accelerator
from isthmus.api.make_plan import plan_for
from isthmus.api.states import state_folder
from isthmus.api.states import timeout_s as read_timeout
from isthmus.combinations import refused
from isthmus.data import dataset_kinds
from isthmus.data.callables import is_callable_name
from isthmus.data.registry import check_kind
from isthmus.engines import check_engine
from isthmus.errors import IsthmusError, UserError, unknown_name
from isthmus.extensions import import_extra
from isthmus.federated.task_spec import SiteConfig, load_site
from isthmus.locking import hold
from isthmus.runtime.device.island_ranks import Island, attend, island_here
from isthmus.runtime.federated.site_runner import SiteRunner
from isthmus.runtime.identity import Identity, Ticket, decode_ticket, read_ticket, read_ticket_of
from isthmus.runtime.processes.device_processes import ProcessPlace, fork_before_threads
from isthmus.runtime.processes.forked import end_with_input
from isthmus.runtime.processes.memory import limit_memory, machine_memory_bytes
from isthmus.runtime.service.agent import JOINED, Agent, Membership, join_fleet, membership_in, run_group
from isthmus.runtime.service.doctor import examine_device, examine_ticket
from isthmus.runtime.service.hardware import hardware_of
from isthmus.runtime.service.machine import Finding
from isthmus.runtime.transport.tcp import WAITS_S
from isthmus.stores import is_url
from isthmus.units import parse_size, whole_number

Ask = Callable[[], str]  # gives the text of a ticket


class JoinOptions(msgspec.Struct, frozen=True, kw_only=True):
    state: Path | None = None  # folder of the key; none: ~/.local/state/isthmus/device
    ticket_file: Path | None = None
    name: str | None = None  # None: the host's name
    timeout: str = "60 s"
    place: ProcessPlace = ProcessPlace()
    device: str = AUTO  # where it computes
    memory: str = ""  # the part of each device's memory that jobs may take
    devices: str = ""
    """Accelerators that are devices of their own; none: the machine is one device; `auto`: all, or none where there is
    none."""
    site: Path | None = None
    per_rank: bool = False  # under torchrun, each rank is a device of its own
    ticket_line: int = 0  # the number of this device's ticket in the ticket file
    one_owner: bool = False  # who owns the device owns the coordinator and all other devices too
    attached: bool = False  # the ticket is the first line of standard input, and the device ends when that closes


def kinds_of(text: str) -> tuple[str, ...] | None:
    """Kinds of data in a list with commas; None, for all, where nothing is given. UserError for one that is unknown; a
    callable is not imported before a job names it."""
    if not text:
        return None
    kinds = tuple(kind.strip() for kind in text.split(","))
    for kind in kinds:
        if not is_callable_name(kind) and kind not in dataset_kinds():
            raise unknown_name("--data-kinds", kind, dataset_kinds())
    return kinds


def urls_of(texts: Sequence[str], option: str = "--weights-from") -> tuple[str, ...]:
    """URLs that an owner allows. UserError for what is none."""
    for text in texts:
        if not is_url(text):
            raise UserError(f"{option}: got {text!r}, expected a URL: s3://bucket/models, hf://org, or s3:// alone")
    return tuple(texts)


def memory_of(text: str, accelerator: str = "cpu") -> int | None:
    """Bytes that jobs may take; on the CPU the machine's where nothing is given, on an accelerator what is free there
    (None). UserError."""
    found = parse_size(text, "--memory") if text else None
    if found == 0:
        raise UserError(f"--memory {text!r}: got nothing, expected a size such as '4 GiB'")
    if accelerator != "cpu":
        return found
    machine_bytes = machine_memory_bytes()
    return min(found or machine_bytes, machine_bytes)


def single_device(given: Sequence[str] | None, default: str) -> str:
    """Return the value of `--device`. UserError for more than one."""
    if given and len(given) > 1:
        raise UserError(f"--device: got {len(given)} of them, expected one; several: --devices {','.join(given)}")
    return given[0] if given else default


def accelerators_of(text: str) -> dict[str, str]:
    """Read `--devices`: full names of accelerators, by the suffix of each one's name. UserError."""
    here = accelerator_names()
    found: dict[str, str] = {}
    for item in here if text == "all" else text.split(","):
        name = _numbered(item.strip(), here)
        part = part_of(name)
        if part in found:
            raise UserError(f"--devices: got {found[part]} and {name}, which would both be called {part}")
        found[part] = name
    if not found:
        raise UserError("--devices: got 'all', but torch sees no accelerator here: leave it out to take the CPU")
    return found


def _numbered(text: str, here: Sequence[str]) -> str:
    """The full name of an accelerator, of which a number may be given. UserError."""
    number = whole_number(text)
    if number is None:
        return resolve_accelerator(text, "--devices")
    if number < len(here):
        return here[number]
    if not here:
        raise UserError(f"--devices: got {text}, but torch sees no accelerator here: leave it out to take the CPU")
    raise UserError(f"--devices: got {text}, expected a number below {len(here)}: {', '.join(here)} are here")


def part_of(accelerator: str) -> str:
    """The number of an accelerator, or cpu."""
    return accelerator.rpartition(":")[2]


def join_as(joining: JoinOptions, log: Callable[[str], None], ask: Ask) -> int:
    """Until Ctrl-C or dismissal; the exit code. `ask` is called where a ticket is needed and no file has it."""
    if joining.place.engine == "jax":
        import_extra("jax", "--engine jax")
    folder = joining.state or state_folder("device")
    timeout_s = read_timeout(joining.timeout)
    site = None if joining.site is None else load_site(joining.site)
    if joining.one_owner:  # device processes import the owner's modules from this folder, as a site's process does
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    if (site is None and "WORLD_SIZE" not in os.environ) or (site is not None and site.pipeline is not None):
        fork_before_threads(fleet=site is None)
    island = island_here(folder)
    if joining.per_rank:
        joining, folder = _of_this_rank(joining, folder, island)
        island = None
    if joining.attached and (island is None or island.number == 0):  # the other ranks end with this one
        ticket = ask()
        end_with_input()
        ask = lambda: ticket  # noqa: E731
    if joining.devices == AUTO:
        joining = msgspec.structs.replace(joining, devices="all" if accelerator_names() else "")
    if joining.devices:
        return _several(joining, folder, timeout_s, log, ask)
    if island is not None and joining.site is not None:
        raise refused("several ranks", "sites", str(joining.site))
    if island is not None and island.rank:
        accelerator = open_accelerator(_of_rank(joining.device, island), "--device")
        memory_bytes = joining.place.memory_bytes
        if memory_bytes is not None and accelerator.device.type == "cpu":  # a driver maps more than it uses
            limit_memory(memory_bytes // island.local)
        attend(island, log, accelerator=accelerator)
    place = joining.place
    if island is not None:
        place = msgspec.structs.replace(
            place, island=island.folder.absolute(), ranks=island.count, local_ranks=island.local
        )
    elif place.sharded:
        raise UserError("--shard: got it without torchrun, which starts the ranks that share a stage's weights")
    if site is not None:
        check_kind(site.data, place.data_kinds, foreign=False)
        return _attend(site, joining, folder, timeout_s, log, ask)
    device = joining.device if island is None else _of_rank(joining.device, island)
    accelerator = resolve_accelerator(device, "--device")
    (found,) = hardware_of([accelerator], "--device")
    place = msgspec.structs.replace(
        place, accelerator=accelerator, hardware=found.label, memory_bytes=memory_of(joining.memory, accelerator)
    )
    membership = _memberships(joining, {_name(joining): folder}, timeout_s, ask)[0]
    log(f"{membership.name} computes on {place.hardware}")
    Agent(folder, membership, place, timeout_s=timeout_s, log=log).run()
    return 0


def _of_this_rank(joining: JoinOptions, folder: Path, island: Island | None) -> tuple[JoinOptions, Path]:
    """Return the options as a device of its own, with its folder. UserError."""
    others = {"--devices": bool(joining.devices), "--shard": joining.place.sharded, "--site": joining.site is not None}
    others["--attached"] = joining.attached
    for option in (name for name, given in others.items() if given):
        raise UserError(f"--per-rank: got it beside {option}, expected one of the two")
    if island is None:
        raise UserError("--per-rank: got it without torchrun, which starts the ranks")
    own = folder / str(island.rank)
    if joining.ticket_file is None and membership_in(own) is None:
        raise UserError("--per-rank: got no --ticket-file, expected one with a ticket in a line for each rank")
    place, number = joining.place, island.number
    changed = msgspec.structs.replace(
        joining,
        name=f"{_name(joining)}/{island.rank}",
        device=_of_rank(joining.device, island),
        ticket_line=number,
        place=msgspec.structs.replace(place, port=place.port and place.port + number),
    )
    return changed, own


def _of_rank(device: str, island: Island) -> str:
    """Return a rank's own accelerator, of a kind or `auto`. UserError for fewer accelerators than ranks."""
    first = resolve_accelerator(device, "--device")
    kind = first.partition(":")[0]
    if kind == "cpu" or island.local == 1:
        return first
    if ":" in device:
        raise UserError(f"--device: got {device!r} for {island.local} ranks, expected a kind, as {kind!r}")
    here = [name for name in accelerator_names() if name.partition(":")[0] == kind]
    if not here:  # a kind that is made when it is asked for
        return f"{kind}:{island.number}"
    if len(here) < island.local:
        raise UserError(
            f"--device: got {device!r} with {len(here)} of {kind} for {island.local} ranks, expected one for each: "
            "start fewer, or with --device cpu"
        )
    return here[island.number]


def _several(joining: JoinOptions, folder: Path, timeout_s: float, log: Callable[[str], None], ask: Ask) -> int:
    """Join with a device for each accelerator."""
    others = {"--site": joining.site is not None, "--device": joining.device != AUTO}
    others["torchrun"] = "WORLD_SIZE" in os.environ
    for option in (name for name, given in others.items() if given):
        raise UserError(f"--devices: got it beside {option}, expected one of the two")
    chosen = accelerators_of(joining.devices)
    hardware = hardware_of(list(chosen.values()), "--devices")
    folders = {f"{_name(joining)}/{part}": folder / part for part in chosen}
    memberships = _memberships(joining, folders, timeout_s, ask)
    agents: dict[str, Agent] = {}
    place = joining.place
    for number, (at, membership, found) in enumerate(zip(folders.values(), memberships, hardware, strict=True)):
        own = msgspec.structs.replace(
            place,
            accelerator=found.accelerator,
            hardware=found.label,
            port=place.port and place.port + number,
            memory_bytes=memory_of(joining.memory, found.accelerator),
        )
        name = membership.name
        log(f"{name} computes on {own.hardware}")
        agents[name] = Agent(at, membership, own, timeout_s=timeout_s, log=partial(_log_of, log, name))
    run_group(agents, log)
    return 0


def _log_of(log: Callable[[str], None], name: str, text: str) -> None:
    log(f"{name}: {text}")


def _attend(
    config: SiteConfig, joining: JoinOptions, folder: Path, timeout_s: float, log: Callable[[str], None], ask: Ask
) -> int:
    """Join as a site: this process trains, and ends when it cannot do what the coordinator asks for."""
    membership = _memberships(joining, {_name(joining): folder}, timeout_s, ask)[0]
    failures: list[IsthmusError] = []

    def fail(error: IsthmusError) -> None:
        failures.append(error)
        agent.stop()

    run_starter = SiteRunner(config, membership.name, folder, log=log, fail=fail, plan=plan_for)
    agent = Agent(
        folder, membership, joining.place, timeout_s=timeout_s, log=log, run_starter=run_starter, waits_s=WAITS_S
    )
    try:
        agent.run()
    finally:
        run_starter.leave()
    if failures:
        raise failures[0]
    return 0


def examined(folder: Path, ticket_file: Path | None) -> list[Finding]:
    """`isthmus doctor`: the hops to the coordinator, of a device that has joined or of one with a ticket."""
    return examine_device(folder) if ticket_file is None else examine_ticket(read_ticket(ticket_file))


def _name(joining: JoinOptions) -> str:
    return joining.name or platform.node()


def _memberships(joining: JoinOptions, folders: Mapping[str, Path], timeout_s: float, ask: Ask) -> list[Membership]:
    """Those that the folders of devices hold, by name, unless a ticket for another is given."""
    _hold(path for path in folders.values() if path.is_dir())
    for folder in folders.values() if joining.one_owner else ():
        Identity.made(folder).share_data()
    held = {name: membership_in(folder) for name, folder in folders.items()}
    wanted = {name: folders[name] for name in folders if held[name] is None or joining.ticket_file is not None}
    made = join_fleet(_ticket(joining, ask), wanted, timeout_s) if wanted else {}
    _hold(folders.values())
    found: list[Membership] = []
    for name, folder in folders.items():
        membership = made.get(name) or held[name]
        assert membership is not None, "what is not held was made"
        if joining.name is not None and membership.name != name:
            raise UserError(
                f"--name: got {joining.name!r}, but {folder} has joined as {membership.name!r}: use another --state "
                "folder, or a new ticket with --ticket-file"
            )
        found.append(membership)
    return found


def _hold(folders: Iterable[Path]) -> None:
    """UserError where another process has joined with one of them: each would throw the other out."""
    for folder in folders:
        hold(
            folder / JOINED,
            f"state folder {folder}: another process has joined with it: end it first, or choose another with --state",
        )


def _ticket(joining: JoinOptions, ask: Ask) -> Ticket:
    if joining.ticket_file is None:
        return decode_ticket(ask())
    if joining.per_rank:
        return read_ticket_of(joining.ticket_file, joining.ticket_line)
    return read_ticket(joining.ticket_file)


class HowToJoin(TypedDict, total=False):
    """A device's own settings."""

    name: str  # the device's name, by default the host's
    device: str  # where it computes: cpu, cuda:0, ...; by default a GPU if there is one
    devices: str
    """`all`, or numbers of accelerators, of which each is a device of its own; `auto`: as `all` where there is one."""
    memory: str  # the part of its memory that jobs may take, as "4 GiB"; by default all
    engine: str  # the engine that computes: `torch`, which is the default, or `jax`
    data: Path  # folder with its data: jobs name files in it, no others
    data_kinds: str  # kinds of data that jobs may name, parted by commas; by default all
    weights_from: Sequence[str]  # URLs below which jobs may have it read weights; by default none
    checkpoints_to: Sequence[str]
    """URLs below which jobs may have it write its parts of checkpoints, and read them; by default none."""
    site: Path  # for a federated run a TOML file with this site's data, and what may run on them
    state: Path  # folder of its key; by default ~/.local/state/isthmus/device


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
    place = ProcessPlace(
        engine=check_engine("engine", how.get("engine", "torch")),
        data=how.get("data"),
        data_kinds=kinds_of(how.get("data_kinds", "")),
        weights_from=urls_of(how.get("weights_from", ())),
        checkpoints_to=urls_of(how.get("checkpoints_to", ()), "--checkpoints-to"),
    )
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
