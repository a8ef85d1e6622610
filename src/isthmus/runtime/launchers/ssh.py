"""Agents by `ssh HOST ...`: an agent on each host of a list. Keys and host names are those of the user's own ssh."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from isthmus.errors import PeerError, UserError
from isthmus.runtime.launchers.child_agents import ChildAgents
from isthmus.runtime.launchers.launcher import AgentSpec, AgentState, agent_command
from isthmus.sanitize import MOST_SHOWN, sanitize

CHECK_S = 60.0
SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")
MOST_CHECKED = 16  # hosts at once


class SshOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An agent on each host, by ssh."""

    hosts: str | tuple[str, ...] = ()  # names or USER@HOST: a list, or one text with commas
    host_file: str = ""  # a file with a host per line, in place of `hosts`
    python: str = "python3"  # the interpreter that has Isthmus, on each host
    folder: str = ""  # where agents run on each host; by default where ssh begins


class SshLauncher:
    """A `Launcher`. Each agent's key is in a temporary folder of its host, which it removes when it ends."""

    restarts = True

    def __init__(self, options: SshOptions) -> None:
        self._hosts = _hosts(options)
        self._options = options
        self._host_of: dict[str, str] = {}
        self._agents: ChildAgents | None = None

    @property
    def head(self) -> str:
        """The first host, as ssh's own settings resolve it."""
        done = subprocess.run(["ssh", "-G", self._hosts[0]], capture_output=True, text=True, check=False)
        names = [line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("hostname ")]
        return names[0] if names else self._hosts[0].rpartition("@")[2]

    def check(self) -> None:
        if shutil.which("ssh") is None:
            raise UserError("--on ssh: there is no ssh here: install an OpenSSH client")
        with ThreadPoolExecutor(MOST_CHECKED) as pool:
            found = list(pool.map(self._failure, self._hosts))
        for failure in filter(None, found):
            raise UserError(failure)

    def nodes(self) -> int | None:
        return len(self._hosts)

    def start(self, agents: Sequence[AgentSpec], folder: Path, log: Callable[[str, str], None]) -> None:
        self._agents = ChildAgents(log)
        for agent, host in zip(agents, self._hosts, strict=False):
            self._start(agent, host, self._agents)

    def states(self) -> Mapping[str, AgentState]:
        return {} if self._agents is None else self._agents.states()

    def restart(self, agent: AgentSpec) -> None:
        """On a host without an agent where there is one: the lost agent's host may be gone."""
        assert self._agents is not None, "started before"
        taken = set(self._host_of.values())
        free = next((host for host in self._hosts if host not in taken), self._host_of[agent.name])
        self._start(agent, free, self._agents)

    def stop(self) -> None:
        if self._agents is not None:
            self._agents.stop()

    def _start(self, agent: AgentSpec, host: str, agents: ChildAgents) -> None:
        self._host_of[agent.name] = host
        agents.start(agent, [*SSH, host, remote_command(agent, self._options)])

    def _failure(self, host: str) -> str:
        """Return why no agent could run there; empty where one could."""
        try:
            done = subprocess.run(
                [*SSH, host, f"{shlex.quote(self._options.python)} -c 'import isthmus'"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=CHECK_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"--on ssh: {host}: no answer for {CHECK_S:g} s"
        except OSError as e:
            raise PeerError(f"--on ssh: cannot run ssh: {e.strerror or e}") from None
        if not done.returncode:
            return ""
        said = sanitize(next(iter(reversed(done.stderr.strip().splitlines())), f"exit code {done.returncode}"))
        python = shlex.quote(self._options.python)
        return f"--on ssh: {host}: {said[:MOST_SHOWN]}; expected `ssh {host} {python} -c 'import isthmus'` to work"


def remote_command(agent: AgentSpec, options: SshOptions) -> str:
    """For the login shell of a host, whichever that is. The folder with the key goes when the agent ends."""
    join = shlex.join(agent_command(agent, options.python, "--attached"))
    begin = [f"cd {shlex.quote(options.folder)}"] if options.folder else []
    remove = """trap 'rm -rf "$state"' EXIT; trap 'exit 143' HUP INT TERM"""
    steps = [*begin, "state=$(mktemp -d)", f'{{ {remove}; {join} --state "$state"; }}']
    return f"exec sh -c {shlex.quote(' && '.join(steps))}"


def _hosts(options: SshOptions) -> tuple[str, ...]:
    """UserError for none, or one that ssh would take as an option."""
    if options.host_file and options.hosts:
        raise UserError("--on ssh: got hosts and host_file, expected one of the two")
    source, found = "hosts", options.hosts
    if options.host_file:
        source = f"host_file {options.host_file}"
        try:
            found = tuple(Path(options.host_file).read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as e:
            reason = (e.strerror or e) if isinstance(e, OSError) else e
            raise UserError(f"--on ssh: {source}: cannot be read: {reason}") from None
    hosts = [host.strip() for host in (found.split(",") if isinstance(found, str) else found)]
    hosts = [host for host in hosts if host and not host.startswith("#")]
    if not hosts:
        raise UserError(f"--on ssh: {source}: got no host: add --on-option hosts=HOST,HOST or host_file=FILE")
    for host in hosts:
        if host.startswith("-") or any(c.isspace() for c in host):
            raise UserError(f"--on ssh: {source}: got {host!r}, expected HOST or USER@HOST")
    return tuple(hosts)
