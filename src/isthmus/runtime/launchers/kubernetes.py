"""Kubernetes: a JobSet with a pod per agent, and a Secret with their tickets, through the official client.

Kubernetes starts an agent that fails again. One that keeps failing, as its key was lost with its node, gets a new
ticket and another pod. JobSet makes the headless service of its pods, by `network`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from secrets import token_hex
from types import ModuleType
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from isthmus.errors import PeerError, UserError
from isthmus.extensions import import_extra, to_install
from isthmus.runtime.launchers.launcher import AgentSpec, AgentState, agent_script
from isthmus.runtime.launchers.yaml_text import yaml_text

GROUP, VERSION, PLURAL = "jobset.x-k8s.io", "v1alpha2", "jobsets"
JOB = "agents"  # the name of the JobSet's one replicated job, and of a pod's one container
NUMBER = "JOB_COMPLETION_INDEX"  # Kubernetes sets it in each pod of an indexed job
HELD_TICKET = "(ticket)"  # in place of tickets, where a manifest is shown
MOST_RESTARTS = 1000
_TICKETS, _STATE, _BUCKET = "/isthmus/tickets", "/isthmus/state", "/isthmus/bucket"
_USER = 1000


class KubernetesOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How pods are made."""

    image: str = ""  # with Isthmus installed. It runs as user 1000.
    namespace: str = "default"
    context: str = ""  # the context of the kubeconfig; by default its current one
    gpus_per_node: int = 0  # nvidia.com/gpu of each pod
    cpu: str = ""  # requested for each pod, as "4"; by default what the namespace has
    memory: str = ""  # requested for each pod and its limit, as "16Gi"
    volume: str = ""
    """A PersistentVolumeClaim (ReadWriteMany) for keys of agents: they stay the same members on another node."""
    bucket: str = ""
    """A bucket of Google Cloud Storage, at /isthmus/bucket, for `--data`; any other by a volume of its CSI driver."""
    python: str = "python3"


def secret(name: str, tickets: Sequence[str], options: KubernetesOptions) -> dict[str, object]:
    """With the ticket of each pod under its number."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(name, options),
        "type": "Opaque",
        "stringData": {str(number): ticket for number, ticket in enumerate(tickets)},
    }


def jobset(name: str, agents: Sequence[AgentSpec], options: KubernetesOptions) -> dict[str, object]:
    """Return a JobSet of one pod per agent, each on a node of its own. No ticket is in it."""
    job = {
        "completionMode": "Indexed",
        "completions": len(agents),
        "parallelism": len(agents),
        "backoffLimit": MOST_RESTARTS,
        "podReplacementPolicy": "Failed",
        "template": {"metadata": _pod_metadata(name, options), "spec": _pod(name, agents, options)},
    }
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "JobSet",
        "metadata": _metadata(name, options),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "replicatedJobs": [{"name": JOB, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _metadata(name: str, options: KubernetesOptions) -> dict[str, object]:
    return {"name": name, "namespace": options.namespace, "labels": _labels(name)}


def _labels(name: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "isthmus", "app.kubernetes.io/instance": name}


def _pod_metadata(name: str, options: KubernetesOptions) -> dict[str, object]:
    mounted = {"annotations": {"gke-gcsfuse/volumes": "true"}} if options.bucket else {}
    return {"labels": _labels(name), **mounted}


def _pod(name: str, agents: Sequence[AgentSpec], options: KubernetesOptions) -> dict[str, object]:
    another_node = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": _labels(name)}}
    return {
        "restartPolicy": "OnFailure",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 60,
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [another_node]}},
        # OnRootMismatch: else a second start makes the key readable for the group, and it is refused.
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "fsGroupChangePolicy": "OnRootMismatch",
        },
        "containers": [_container(name, agents, options)],
        "volumes": [volume for volume, _ in _volumes(name, options)],
    }


def _container(name: str, agents: Sequence[AgentSpec], options: KubernetesOptions) -> dict[str, object]:
    script = agent_script(agents, NUMBER, f"{_TICKETS}/${NUMBER}", f"{_STATE}/{name}", options.python)
    return {
        "name": JOB,
        "image": options.image,
        "command": ["/bin/sh", "-c", script],
        "resources": _resources(options),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [mount for _, mount in _volumes(name, options)],
    }


def _resources(options: KubernetesOptions) -> dict[str, object]:
    asked = {"cpu": options.cpu, "memory": options.memory}
    limits = {"memory": options.memory, "nvidia.com/gpu": str(options.gpus_per_node or "")}
    sides = {"requests": asked, "limits": limits}
    return {side: found for side, all_ in sides.items() if (found := {k: v for k, v in all_.items() if v})}


def _volumes(name: str, options: KubernetesOptions) -> list[tuple[dict[str, object], dict[str, object]]]:
    """Each with its mount."""
    kept = {"persistentVolumeClaim": {"claimName": options.volume}} if options.volume else {"emptyDir": {}}
    found: list[tuple[dict[str, object], dict[str, object]]] = [
        (
            {"name": "tickets", "secret": {"secretName": name, "defaultMode": 0o440}},
            {"name": "tickets", "mountPath": _TICKETS, "readOnly": True},
        ),
        ({"name": "state", **kept}, {"name": "state", "mountPath": _STATE}),
        # Ranks of an island exchange tensors there; a container has 64 MiB of it by default.
        ({"name": "shm", "emptyDir": {"medium": "Memory"}}, {"name": "shm", "mountPath": "/dev/shm"}),
    ]
    if options.bucket:
        bucket = {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": {"bucketName": options.bucket}}
        found.append(({"name": "bucket", "csi": bucket}, {"name": "bucket", "mountPath": _BUCKET}))
    return found


REQUEST_S = 30.0
INSTALL_JOBSET = (
    "kubectl apply --server-side -f https://github.com/kubernetes-sigs/jobset/releases/latest/download/manifests.yaml"
)
LOG_IN = "the cluster does not know this context's credentials: log in again (`kubectl auth whoami` tries them)"
IN_CLUSTER = "KUBERNETES_SERVICE_HOST"  # Kubernetes sets it in each pod
_PLACE = (GROUP, VERSION)
_NUMBER = "batch.kubernetes.io/job-completion-index"


class Refused(PeerError):
    """The API server's answer is no success."""

    def __init__(self, what: str, status: int, reason: str) -> None:
        super().__init__(f"the API server refused {what}: {status} {reason}")
        self.status = status


class _Response(Protocol):
    """A response of urllib3, as much as is used of it."""

    @property
    def data(self) -> bytes: ...

    def stream(self, amt: int) -> Iterator[bytes]: ...

    def close(self) -> None: ...


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    creation_timestamp: str = ""
    annotations: dict[str, str] = {}


class _Waiting(msgspec.Struct, frozen=True):
    reason: str = ""


class _Terminated(msgspec.Struct, frozen=True, rename="camel"):
    exit_code: int


class _ContainerState(msgspec.Struct, frozen=True):
    waiting: _Waiting | None = None
    terminated: _Terminated | None = None


class _Container(msgspec.Struct, frozen=True, rename="camel"):
    state: _ContainerState = _ContainerState()
    container_id: str = msgspec.field(default="", name="containerID")


class _PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    phase: str = "Pending"
    container_statuses: tuple[_Container, ...] = ()


class Pod(msgspec.Struct, frozen=True):
    """A pod, as the API server describes it."""

    metadata: _Metadata
    status: _PodStatus = _PodStatus()

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def number(self) -> int:
        """The number of its agent."""
        return int(self.metadata.annotations[_NUMBER])

    @property
    def container(self) -> str:
        """The id of its container; empty before one has started."""
        return self.status.container_statuses[0].container_id if self.status.container_statuses else ""

    @property
    def state(self) -> AgentState:
        """LOST where the container keeps failing: Kubernetes waits before it starts it again. QUEUED without a node."""
        phases = {"Succeeded": AgentState.ENDED, "Failed": AgentState.LOST, "Running": AgentState.RUNNING}
        for container in self.status.container_statuses:
            waiting, terminated = container.state.waiting, container.state.terminated
            if waiting is not None and waiting.reason == "CrashLoopBackOff":
                return AgentState.LOST
            if terminated is not None and terminated.exit_code and self.status.phase == "Running":
                return AgentState.STARTING
        if self.status.phase == "Pending" and not self.status.container_statuses:
            return AgentState.QUEUED
        return phases.get(self.status.phase, AgentState.STARTING)


class _Pods(msgspec.Struct, frozen=True):
    items: tuple[Pod, ...]


class _Condition(msgspec.Struct, frozen=True):
    type: str
    status: str = ""


class _JobSetStatus(msgspec.Struct, frozen=True):
    conditions: tuple[_Condition, ...] = ()


class _JobSet(msgspec.Struct, frozen=True):
    status: _JobSetStatus = _JobSetStatus()


class KubernetesCluster:
    """PeerError for a request that fails."""

    def __init__(self, kubernetes: ModuleType, options: KubernetesOptions) -> None:
        """UserError where no cluster is configured."""
        self._library, self._namespace = kubernetes, options.namespace
        configuration = kubernetes.client.Configuration()
        configuration.retries = 1
        try:
            if IN_CLUSTER in os.environ and not options.context:
                kubernetes.config.load_incluster_config(client_configuration=configuration)
            else:
                kubernetes.config.load_kube_config(
                    context=options.context or None, client_configuration=configuration, persist_config=False
                )
        except kubernetes.config.ConfigException as e:
            reason = " ".join(str(e).split())
            raise UserError(f"no cluster is configured ({reason}): set KUBECONFIG, or the option context") from None
        self.host = urlsplit(str(configuration.host)).hostname or ""
        client = kubernetes.client.ApiClient(configuration)
        self._core = kubernetes.client.CoreV1Api(client)
        self._custom = kubernetes.client.CustomObjectsApi(client)

    def check(self) -> None:
        """UserError where the API server does not answer, or has no JobSet."""
        try:
            self._ask("jobsets", self._custom.list_namespaced_custom_object, *_PLACE, self._namespace, PLURAL)
        except Refused as e:
            remedies = {401: LOG_IN, 404: f"install JobSet: {INSTALL_JOBSET}"}
            raise UserError(f"{e}: {remedies.get(e.status, 'ask for a role with jobsets, pods')}") from None
        except PeerError as e:
            raise UserError(f"{e}: start the cluster, or choose another context") from None

    def create_secret(self, body: Mapping[str, object]) -> None:
        self._ask("secret", self._core.create_namespaced_secret, self._namespace, body)

    def create_jobset(self, body: Mapping[str, object]) -> None:
        self._ask("jobset", self._custom.create_namespaced_custom_object, *_PLACE, self._namespace, PLURAL, body)

    def has_failed(self, name: str) -> bool:
        """Return whether the JobSet is given up."""
        answer = self._ask("jobset", self._custom.get_namespaced_custom_object, *_PLACE, self._namespace, PLURAL, name)
        conditions = msgspec.json.decode(answer, type=_JobSet).status.conditions
        return any(condition.type == "Failed" and condition.status == "True" for condition in conditions)

    def pods(self, name: str) -> dict[int, Pod]:
        """Return the pods of the JobSet, the newest of each number."""
        selector = f"jobset.sigs.k8s.io/jobset-name={name}"
        answer = self._ask("pods", self._core.list_namespaced_pod, self._namespace, label_selector=selector)
        found = msgspec.json.decode(answer, type=_Pods).items
        return {pod.number: pod for pod in sorted(found, key=lambda pod: pod.metadata.creation_timestamp)}

    def replace_ticket(self, name: str, number: int, ticket: str) -> None:
        body = {"stringData": {str(number): ticket}}
        self._ask("secret", self._core.patch_namespaced_secret, name, self._namespace, body)

    def delete_pod(self, name: str) -> None:
        self._delete("pod", self._core.delete_namespaced_pod, name, self._namespace)

    def delete(self, name: str) -> None:
        """JobSet and Secret."""
        place = (*_PLACE, self._namespace, PLURAL, name)
        self._delete("jobset", self._custom.delete_namespaced_custom_object, *place, propagation_policy="Foreground")
        self._delete("secret", self._core.delete_namespaced_secret, name, self._namespace)

    def log_lines(self, pod: str) -> Iterator[str]:
        """Return the lines as they come, until the container ends."""
        answer = self._send("log", self._core.read_namespaced_pod_log, pod, self._namespace, container=JOB, follow=True)
        rest = b""
        try:
            for chunk in answer.stream(65536):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield line.decode(errors="replace")
        except self._library.client.rest.urllib3.exceptions.HTTPError:
            return  # the node is gone
        finally:
            answer.close()

    def _delete(self, what: str, call: Callable[..., _Response], *place: str, **options: str) -> None:
        """Delete an object. One that is gone already is no error."""
        try:
            self._ask(what, call, *place, **options)
        except Refused as e:
            if e.status != 404:
                raise

    def _ask(self, what: str, call: Callable[..., _Response], *place: object, **options: object) -> bytes:
        return self._send(what, call, *place, _request_timeout=REQUEST_S, **options).data

    def _send(self, what: str, call: Callable[..., _Response], *place: object, **options: object) -> _Response:
        try:
            return call(*place, _preload_content=False, **options)
        except self._library.client.ApiException as e:
            raise Refused(what, int(e.status or 0), str(e.reason)) from None
        except self._library.client.rest.urllib3.exceptions.HTTPError as e:
            reason = getattr(e, "reason", None) or e
            raise PeerError(f"the API server at {self.host} does not answer ({reason})") from None


OWNER = "isthmus up --on kubernetes"
LEAST_CLIENT = 28
LOOK_S = 1.0  # how often pods are looked for whose log is not read yet, or which are to end
ASK_S = 2.0  # how old states may be
END_S = 120.0  # how long pods may take to end


class KubernetesLauncher:
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
        """See `Renders`; `folder` is for other engines."""
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
