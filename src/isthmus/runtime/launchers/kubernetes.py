"""Kubernetes: a JobSet with a pod per agent, and a Secret with their tickets, through the official client.

Kubernetes starts an agent that fails again. One that keeps failing, as its key was lost with its node, gets a new
ticket and another pod.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from secrets import token_hex

from isthmus.errors import PeerError, UserError
from isthmus.extensions import import_extra, to_install
from isthmus.runtime.launchers.kubernetes_cluster import KubernetesCluster
from isthmus.runtime.launchers.kubernetes_manifests import HELD_TICKET, KubernetesOptions, jobset, secret
from isthmus.runtime.launchers.launcher import AgentSpec, AgentState
from isthmus.runtime.launchers.yaml_text import yaml_text

OWNER = "isthmus up --on kubernetes"
LEAST_CLIENT = 28
LOOK_S = 1.0  # how often pods are looked for whose log is not read yet, or which are to end
ASK_S = 2.0  # how old states may be
END_S = 120.0  # how long pods may take to end


class KubernetesLauncher:
    """A `Launcher`."""

    restarts = True

    def __init__(self, options: KubernetesOptions) -> None:
        self._options = options
        self._name = f"isthmus-{token_hex(4)}"
        self._names: list[str] = []  # of agents, by the number of their pod
        self._known: Mapping[str, AgentState] = {}
        self._asked_s = float("-inf")
        self._logs: _PodLogs | None = None

    @cached_property
    def _cluster(self) -> KubernetesCluster:
        try:
            return KubernetesCluster(import_extra("kubernetes", OWNER), self._options)
        except UserError as e:
            raise e if str(e).startswith(OWNER) else UserError(f"{OWNER}: {e}") from None

    @property
    def head(self) -> str:
        return self._cluster.host

    def check(self) -> None:
        version = str(import_extra("kubernetes", OWNER).__version__)
        if int(version.partition(".")[0]) < LEAST_CLIENT:
            needs = f"needs kubernetes {LEAST_CLIENT}, got {version}"
            raise UserError(f"{OWNER} {needs}: {to_install('kubernetes')}")
        self._check_image()
        try:
            self._cluster.check()
        except UserError as e:
            raise UserError(f"{OWNER}: {str(e).removeprefix(f'{OWNER}: ')}") from None

    def _check_image(self) -> None:
        if not self._options.image:
            raise UserError(
                f"{OWNER}: option image: got none, expected a container image with Isthmus: --on-option image=IMAGE"
            )

    def nodes(self) -> int | None:
        return None

    def render(self, agents: Sequence[AgentSpec], folder: Path) -> str:
        """As of `Renders`; `folder` is for other engines."""
        self._check_image()
        held = secret(self._name, [HELD_TICKET] * len(agents), self._options)
        return yaml_text(held, jobset(self._name, agents, self._options))

    def start(self, agents: Sequence[AgentSpec], folder: Path, log: Callable[[str, str], None]) -> None:
        self._names = [agent.name for agent in agents]
        self._cluster.create_secret(secret(self._name, [agent.ticket for agent in agents], self._options))
        self._cluster.create_jobset(jobset(self._name, agents, self._options))
        self._logs = _PodLogs(self._cluster, self._name, self._names, log)

    def states(self) -> Mapping[str, AgentState]:
        if time.monotonic() - self._asked_s > ASK_S:
            self._known, self._asked_s = self._states(), time.monotonic()
        return self._known

    def _states(self) -> dict[str, AgentState]:
        if self._cluster.has_failed(self._name):
            return dict.fromkeys(self._names, AgentState.LOST)
        pods = self._cluster.pods(self._name)
        return {
            name: pods[number].state if number in pods else AgentState.STARTING
            for number, name in enumerate(self._names)
        }

    def restart(self, agent: AgentSpec) -> None:
        number = self._names.index(agent.name)
        self._cluster.replace_ticket(self._name, number, agent.ticket)
        pod = self._cluster.pods(self._name).get(number)
        if pod is not None:
            self._cluster.delete_pod(pod.name)
        self._asked_s = float("-inf")

    def stop(self) -> None:
        if not self._names:
            return
        self._cluster.delete(self._name)
        deadline_s = time.monotonic() + END_S
        while left := self._cluster.pods(self._name):
            if time.monotonic() > deadline_s:
                pod = next(iter(left.values())).name
                raise PeerError(f"pod {pod} was deleted and has not ended: `kubectl delete --force pod {pod}`")
            time.sleep(LOOK_S)
        if self._logs is not None:
            self._logs.close()
        self._names = []


class _PodLogs:
    """A thread that looks for containers, and one for each that reads its log from the beginning."""

    def __init__(
        self, cluster: KubernetesCluster, name: str, names: Sequence[str], log: Callable[[str, str], None]
    ) -> None:
        self._cluster, self._name, self._names, self._log = cluster, name, names, log
        self._stopped = threading.Event()
        self._readers: dict[str, threading.Thread] = {}
        self._looking = threading.Thread(target=self._look, name="pod logs", daemon=True)
        self._looking.start()

    def close(self) -> None:
        """The pods have ended, so the readers do."""
        self._stopped.set()
        for thread in (self._looking, *self._readers.values()):
            thread.join(END_S)

    def _look(self) -> None:
        while not self._stopped.wait(LOOK_S):
            try:
                pods = self._cluster.pods(self._name)
            except PeerError:  # `states` says it
                continue
            for number, pod in pods.items():
                if pod.container and pod.container not in self._readers:
                    reader = threading.Thread(
                        target=self._read, args=(self._names[number], pod.name), name="pod log", daemon=True
                    )
                    self._readers[pod.container] = reader
                    reader.start()

    def _read(self, name: str, pod: str) -> None:
        try:
            for line in self._cluster.log_lines(pod):
                self._log(name, line)
        except PeerError as e:
            if not self._stopped.is_set():
                self._log(name, f"its log cannot be read: {e}")
