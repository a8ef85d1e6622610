"""SkyPilot: a cluster of one cloud machine for each agent, through its command `sky`.

SkyPilot ends all nodes of a task where one is lost. So each agent is a task of its own: where its machine is lost the
others go on, and it is started again on a new one.
"""

from __future__ import annotations

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
from isthmus.reading import parse_json
from isthmus.runtime.launchers.launcher import AgentSpec, AgentState, agent_script
from isthmus.runtime.launchers.yaml_text import yaml_text
from isthmus.sanitize import sanitize

OWNER = "isthmus up --on skypilot"
LEAST_SKYPILOT = (0, 10)  # the first with secrets
SECRET = "ISTHMUS_TICKET"
NUMBER = "SKYPILOT_NODE_RANK"
ASK_S = 60.0
END_S = 60.0
DOWN_S = 900.0  # clouds take minutes to give machines back
_AUTHENTICATION = re.compile(r"authenticat|unauthori[sz]ed|log ?in\b|logged in|\b401\b", re.IGNORECASE)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_JOB_LINE = re.compile(r"\([^(),]+, (?:rank=\d+, )?pid=\d+(?:, ip=[^()]*)?\) ?(.*)")
_BEGIN = f"""\
umask 077
mkdir -p ~/.isthmus-up
printenv {SECRET} > ~/.isthmus-up/ticket
unset {SECRET}
"""


class SkyPilotOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which machines are asked for, and what is installed there."""

    infra: str = ""  # as aws/us-east-1; by default the cheapest that SkyPilot finds
    accelerators: str = ""  # accelerators of each machine, as A100:8
    cpus: str = ""  # as 8+
    memory: str = ""  # GB, as 32+
    instance_type: str = ""
    image_id: str = ""
    use_spot: bool = False
    workdir: str = ""  # a folder that is copied to each machine; `setup` and agents start in it
    setup: str = "pip install '.[train]'"  # typed on each machine first; as it is, `workdir` is a checkout of Isthmus
    python: str = "python3"


class SkyPilotLauncher:
    restarts = True
    head = "192.0.2.1"
    """An address for documentation, to which the route is the default one: there is no cluster before `start`."""

    def __init__(self, options: SkyPilotOptions) -> None:
        self._options = options
        self._name = f"isthmus-{token_hex(4)}"
        """Clusters have it, and a number: a machine that was lost gets another one."""
        self._folder = Path()
        self._log: Callable[[str, str], None] = lambda name, line: None
        self._launches: dict[str, _Launch] = {}  # the newest launch of each agent
        self._started = 0

    def check(self) -> None:
        if shutil.which("sky") is None:
            raise UserError(f'{OWNER} needs SkyPilot, got no sky here: pip install "skypilot[aws]" (or another cloud)')
        found = re.search(r"(\d+)\.(\d+)\S*", _sky("--version").stdout)
        if found is not None and (int(found[1]), int(found[2])) < LEAST_SKYPILOT:
            least = ".".join(map(str, LEAST_SKYPILOT))
            raise UserError(f"{OWNER} needs SkyPilot {least}, got {found[0]}: pip install -U skypilot")
        asked = _sky("api", "info", "--output", "json")
        try:
            parse_json(asked.stdout, object, "sky")
        except UserError:
            if _AUTHENTICATION.search(asked.stderr + asked.stdout):
                reason = sanitize(_reason(asked))
                raise UserError(
                    f"{OWNER}: SkyPilot's API server wants you to log in ({reason}): sky api login"
                ) from None
            raise UserError(f"{OWNER}: SkyPilot's API server does not answer: sky api start") from None

    def nodes(self) -> int | None:
        return None

    def render(self, agents: Sequence[AgentSpec], folder: Path) -> str:
        """See `Renders`: a task for each agent. `folder` is for other engines."""
        return yaml_text(*(task(agent, self._options) for agent in agents))

    def start(self, agents: Sequence[AgentSpec], folder: Path, log: Callable[[str, str], None]) -> None:
        self._folder, self._log = folder / "skypilot", log
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for agent in agents:
            self.restart(agent)

    def states(self) -> Mapping[str, AgentState]:
        return {name: launch.state for name, launch in self._launches.items()}

    def restart(self, agent: AgentSpec) -> None:
        """On a new machine. What is left of the one before is given back meanwhile."""
        if (before := self._launches.get(agent.name)) is not None:
            before.end()
            _sky("down", "--yes", "--async", before.cluster)
        cluster = f"{self._name}-{self._started}"
        self._started += 1
        file, ticket = self._folder / f"{cluster}.yaml", self._folder / f"{cluster}.env"
        atomic_write(file, self.render([agent], self._folder).encode())
        atomic_write(ticket, f"{SECRET}={agent.ticket}\n".encode(), private=True)
        self._launches[agent.name] = _Launch(cluster, file, ticket, lambda line: self._log(agent.name, line))

    def stop(self) -> None:
        if not self._launches:
            return
        for launch in self._launches.values():
            launch.interrupt()
        for launch in self._launches.values():
            launch.end()
        every = f"{self._name}-*"
        done = _sky("down", "--yes", every, within_s=DOWN_S)
        if done.returncode:
            raise PeerError(f"skypilot: the machines may still run ({_reason(done)}): sky down '{every}'")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._launches.clear()


def task(agent: AgentSpec, options: SkyPilotOptions) -> dict[str, object]:
    """SkyPilot's document of an agent, without its ticket: `--secret-file` has that."""
    asked = ("infra", "accelerators", "cpus", "memory", "instance_type", "image_id", "use_spot")
    resources = {name: value for name in asked if (value := getattr(options, name))}
    # A machine ends by itself once no agent runs. The agent of an `up` that was killed runs on: it counts as work.
    resources["autostop"] = {"idle_minutes": 10, "down": True}
    return {
        "name": "isthmus",
        "num_nodes": 1,
        "resources": resources,
        **({"workdir": options.workdir} if options.workdir else {}),
        "secrets": {SECRET: None},
        "setup": f"{options.setup}\n",
        "run": _BEGIN + agent_script([agent], NUMBER, "~/.isthmus-up/ticket", "~/.isthmus-up", options.python),
    }


class _Launch:
    """`sky launch` of one agent, which stays as long as the job and prints what that prints."""

    def __init__(self, cluster: str, file: Path, ticket: Path, log: Callable[[str], None]) -> None:
        self.cluster, self._ticket, self._log = cluster, ticket, log
        self._heard = False  # whether the agent has printed something
        command = ["sky", "launch", "--yes", "--cluster", cluster, "--secret-file", str(ticket), str(file)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
            )
        except OSError as e:
            ticket.unlink(missing_ok=True)
            raise PeerError(f"skypilot: cannot start sky: {e.strerror or e}") from None
        self._reading = threading.Thread(target=self._read, name="sky launch", daemon=True)
        self._reading.start()

    @property
    def state(self) -> AgentState:
        code = self._process.poll()
        if code is not None:
            return AgentState.LOST if code else AgentState.ENDED
        return AgentState.RUNNING if self._heard else AgentState.STARTING

    def interrupt(self) -> None:
        """Interrupt it, as Ctrl-C does; the cluster stays."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def end(self) -> None:
        """Once it has ended by itself or was interrupted."""
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reading.join(END_S)
        self._ticket.unlink(missing_ok=True)

    def _read(self) -> None:
        assert self._process.stdout is not None, "asked for"
        for line in self._process.stdout:
            text = _COLOUR.sub("", line.decode(errors="replace")).rstrip()
            found = _JOB_LINE.fullmatch(text)
            if found is not None:
                self._heard = True
                self._ticket.unlink(missing_ok=True)  # the job has it
            self._log(text if found is None else found[1])


def _sky(*words: str, within_s: float = ASK_S) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["sky", *words], capture_output=True, text=True, timeout=within_s, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 1, "", f"no answer within {within_s:g} s")
    except OSError as e:
        return subprocess.CompletedProcess(words, 1, "", f"cannot start sky: {e.strerror or e}")


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
