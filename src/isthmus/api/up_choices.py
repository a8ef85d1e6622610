"""How a job runs on an engine: which agents, which fleet, which address. Nothing is started here."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from isthmus.callbacks import Callback
from isthmus.errors import UserError
from isthmus.fleet import Fleet
from isthmus.runtime.launchers.launcher import AgentSpec
from isthmus.units import whole_number

AUTO, ISLAND = "auto", "island"


class UpChoices(msgspec.Struct, frozen=True, kw_only=True):
    engine: str
    options: Mapping[str, object] = {}  # options of the engine
    nodes: int | None = None  # None: as many as the fleet names, or all that the engine has
    devices_per_node: str = AUTO
    host: str = ""  # address to listen on; none: this machine's on the route to the engine
    port: int = 0
    addresses: tuple[str, ...] = ()
    timeout: str = "60 s"
    data: Path | None = None
    """Folder with the data, on every node; None: the current folder where the nodes are this machine, else none."""
    memory: str = ""
    measure: bool | None = None  # whether devices that joined are measured; None: unless the job names a fleet file
    resume: bool = False
    run: Path | None = None
    again: str = ""  # as of `Choices`
    verbose: bool = False  # show what agents print
    callbacks: tuple[Callback, ...] = ()  # besides the job's


def is_known(fleet: str, measure: bool | None) -> bool:
    """Return whether the job's fleet describes the engine's devices. A built-in fleet describes devices that nobody
    has."""
    return fleet.endswith(".toml") if measure is None else not measure


def machines_of(fleet: Fleet) -> tuple[str, ...]:
    """Names of the machines of its devices: NAME of NAME/0 and NAME/1."""
    return tuple(dict.fromkeys(name.partition("/")[0] for name in fleet.names))


def numbered_names(count: int) -> tuple[str, ...]:
    """
    >>> numbered_names(2)
    ('node-0', 'node-1')
    """
    return tuple(f"node-{number}" for number in range(count))


def agent_names(asked: UpChoices, fleet: Fleet | None, engine_has: int | None) -> tuple[str, ...]:
    """One for each node; `fleet` is the one that describes them, if any. UserError where their number is not known, or
    differs."""
    if asked.nodes is not None and asked.nodes < 1:
        raise UserError(f"--nodes: got {asked.nodes}, expected 1 or more")
    if asked.nodes is not None and engine_has is not None and asked.nodes > engine_has:
        raise UserError(f"--nodes: got {asked.nodes}, but --on {asked.engine} has {engine_has}")
    if fleet is None:
        count = asked.nodes or engine_has
        if count is None:
            raise UserError(f"--nodes: got none, and --on {asked.engine} starts as many as it is asked for: add it")
        return numbered_names(count)
    machines = machines_of(fleet)
    if asked.nodes not in (None, len(machines)):
        raise UserError(
            f"--nodes: got {asked.nodes}, but fleet {fleet.name!r} names {len(machines)} machines: leave it out, or "
            "add --measure to plan with the devices that join"
        )
    if engine_has is not None and len(machines) > engine_has:
        raise UserError(
            f"fleet {fleet.name!r} names {len(machines)} machines, but --on {asked.engine} has {engine_has}"
        )
    return machines


def agent_specs(
    names: Sequence[str], asked: UpChoices, fleet: Fleet | None, here: Path | None = None
) -> list[AgentSpec]:
    """Without tickets. `here` is the folder of the job's data where the nodes are this machine."""
    island = asked.devices_per_node == ISLAND
    arguments = ["--one-owner", "--timeout", asked.timeout, *_devices(asked.devices_per_node, fleet)]
    data = asked.data or here
    if data is not None:
        arguments += ["--data", str(data if here is None else data.absolute())]
    if asked.memory:
        arguments += ["--memory", asked.memory]
    return [AgentSpec(name=name, arguments=tuple(arguments), ticket="", island=island) for name in names]


def _devices(per_node: str, fleet: Fleet | None) -> list[str]:
    if per_node == ISLAND:
        return []
    if per_node == AUTO:
        alone = fleet is not None and not any("/" in name for name in fleet.names)
        return [] if alone else ["--devices", AUTO]
    if not (count := whole_number(per_node)):
        raise UserError(f"--devices-per-node: got {per_node!r}, expected auto, island or a number from 1 on")
    return ["--devices", ",".join(map(str, range(count)))]


def check_devices(joined: Sequence[str], fleet: Fleet) -> None:
    """UserError for a device of the fleet that is not there."""
    missing = [name for name in fleet.names if name not in joined]
    if missing:
        raise UserError(f"fleet {fleet.name!r}: {', '.join(missing)} did not join; here are {', '.join(joined)}")


def check_not_public(address: str) -> None:
    """UserError for one that the internet could reach."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return
    if found.is_global:
        raise UserError(
            f"--host: this machine's address towards the nodes is {address}, a public one: name it to use it"
        )
