"""SkyPilot: one cluster of as many cloud machines as there are agents, through its command `sky`.

The agents are one job of SkyPilot, which ends all of them where one fails: a lost agent is not started again alone.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from secrets import token_hex

import msgspec

from isthmus.atomic_write import atomic_write
from isthmus.errors import PeerError, UserError
from isthmus.runtime.launchers.agent_script import agent_script
from isthmus.runtime.launchers.launcher import AgentSpec, AgentState
from isthmus.runtime.launchers.yaml_text import yaml_text

OWNER = "isthmus up --on skypilot"
LEAST_SKYPILOT = (0, 10)
"""The first with secrets."""
SECRET = "ISTHMUS_TICKET_"
NUMBER = "SKYPILOT_NODE_RANK"
ASK_S = 60.0
END_S = 60.0
DOWN_S = 900.0
"""Clouds take minutes to give machines back."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_JOB_LINE = re.compile(r"\([^(),]+, (?:rank=(\d+), )?pid=\d+(?:, ip=[^()]*)?\) ?(.*)")
_BEGIN = f"""\
umask 077
mkdir -p ~/.isthmus-up
printenv "{SECRET}${NUMBER}" > ~/.isthmus-up/ticket
unset $(env | sed -n 's/^\\({SECRET}[0-9]*\\)=.*/\\1/p')
"""


class SkyPilotOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which machines are asked for, and what is installed there."""

    infra: str = ""
    """As aws/us-east-1; by default the cheapest that SkyPilot finds."""
    accelerators: str = ""
    """Of each machine, as A100:8."""
    cpus: str = ""
    """As 8+."""
    memory: str = ""
    """GB, as 32+."""
    instance_type: str = ""
    image_id: str = ""
    use_spot: bool = False
    workdir: str = ""
    """A folder that is copied to each machine; `setup` and agents start in it."""
    setup: str = "pip install 'isthmus[train]'"
    python: str = "python3"


class SkyPilotLauncher:
    """A `Launcher`."""

    restarts = False
    head = "192.0.2.1"
    """An address for documentation, to which the route is the default one: there is no cluster before `start`."""

    def __init__(self, options: SkyPilotOptions) -> None:
        self._options = options
        self._name = f"isthmus-{token_hex(4)}"
        self._folder = Path()
        self._launch: _Launch | None = None

    def check(self) -> None:
        if shutil.which("sky") is None:
            raise UserError(f'{OWNER} needs SkyPilot, got no sky here: pip install "skypilot[aws]" (or another cloud)')
        found = re.search(r"(\d+)\.(\d+)\S*", _sky("--version").stdout)
        if found is not None and (int(found[1]), int(found[2])) < LEAST_SKYPILOT:
            least = ".".join(map(str, LEAST_SKYPILOT))
            raise UserError(f"{OWNER} needs SkyPilot {least}, got {found[0]}: pip install -U skypilot")
        try:
            msgspec.json.decode(_sky("api", "info", "--output", "json").stdout)
        except msgspec.DecodeError:
            raise UserError(f"{OWNER}: SkyPilot's API server does not answer: sky api start") from None

    def nodes(self) -> int | None:
        return None

    def render(self, agents: Sequence[AgentSpec], folder: Path) -> str:
        """As of `Renders`; `folder` is for other engines."""
        return yaml_text(task(agents, self._options))

    def start(self, agents: Sequence[AgentSpec], folder: Path, log: Callable[[str, str], None]) -> None:
        self._folder = folder / "skypilot"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        file, tickets = self._folder / "task.yaml", self._folder / "tickets.env"
        atomic_write(file, self.render(agents, folder).encode())
        lines = [f"{SECRET}{number}={agent.ticket}\n" for number, agent in enumerate(agents)]
        atomic_write(tickets, "".join(lines).encode(), private=True)
        command = ["sky", "launch", "--yes", "--cluster", self._name, "--secret-file", str(tickets), str(file)]
        self._launch = _Launch(command, [agent.name for agent in agents], tickets, log)

    def states(self) -> Mapping[str, AgentState]:
        return {} if self._launch is None else self._launch.states()

    def restart(self, agent: AgentSpec) -> None:
        raise PeerError(f"skypilot: {agent.name} cannot be started again alone: SkyPilot ends all agents with one")

    def stop(self) -> None:
        if self._launch is None:
            return
        self._launch.end()
        done = _sky("down", "--yes", self._name, within_s=DOWN_S)
        if done.returncode:
            raise PeerError(f"skypilot: the machines may still run ({_reason(done)}): sky down {self._name}")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._launch = None


def task(agents: Sequence[AgentSpec], options: SkyPilotOptions) -> dict[str, object]:
    """SkyPilot's document of the agents, without tickets: `--secret-file` has the values."""
    asked = {
        "infra": options.infra,
        "accelerators": options.accelerators,
        "cpus": options.cpus,
        "memory": options.memory,
        "instance_type": options.instance_type,
        "image_id": options.image_id,
        "use_spot": options.use_spot,
    }
    # Machines end by themselves once no agent runs. Agents of an `up` that was killed run on: they count as work.
    resources = {name: value for name, value in asked.items() if value} | {
        "autostop": {"idle_minutes": 10, "down": True}
    }
    script = agent_script(agents, NUMBER, "~/.isthmus-up/ticket", "~/.isthmus-up", options.python)
    return {
        "name": "isthmus",
        "num_nodes": len(agents),
        "resources": resources,
        **({"workdir": options.workdir} if options.workdir else {}),
        "secrets": {f"{SECRET}{number}": None for number in range(len(agents))},
        "setup": f"{options.setup}\n",
        "run": _BEGIN + script,
    }


class _Launch:
    """`sky launch`, which stays as long as the job and prints what its nodes print."""

    def __init__(
        self, command: Sequence[str], names: Sequence[str], tickets: Path, log: Callable[[str, str], None]
    ) -> None:
        self._names, self._tickets, self._log = names, tickets, log
        self._heard: set[str] = set()
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
            )
        except OSError as e:
            raise PeerError(f"skypilot: cannot start sky: {e.strerror or e}") from None
        self._reading = threading.Thread(target=self._read, name="sky launch", daemon=True)
        self._reading.start()

    def states(self) -> dict[str, AgentState]:
        code = self._process.poll()
        if code is not None:
            return dict.fromkeys(self._names, AgentState.LOST if code else AgentState.ENDED)
        return {name: AgentState.RUNNING if name in self._heard else AgentState.STARTING for name in self._names}

    def end(self) -> None:
        """As Ctrl-C does it; the cluster stays."""
        for number in (signal.SIGINT, signal.SIGKILL):
            if self._process.poll() is None:
                self._process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(END_S)
        self._reading.join(END_S)
        self._tickets.unlink(missing_ok=True)

    def _read(self) -> None:
        assert self._process.stdout is not None, "asked for"
        for line in self._process.stdout:
            text = _COLOUR.sub("", line.decode(errors="replace")).rstrip()
            found = _JOB_LINE.fullmatch(text)
            if found is None:
                self._log("skypilot", text)
                continue
            name = self._names[int(found[1] or 0)]
            self._heard.add(name)
            self._tickets.unlink(missing_ok=True)  # the job has them
            self._log(name, found[2])


def _sky(*words: str, within_s: float = ASK_S) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["sky", *words], capture_output=True, text=True, timeout=within_s, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 1, "", f"no answer within {within_s:g} s")


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
