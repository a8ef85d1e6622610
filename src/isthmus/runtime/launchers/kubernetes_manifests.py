"""Manifests for a Kubernetes cluster: a JobSet of one indexed job with a pod per agent, and a Secret with tickets.

JobSet makes the headless service of its pods, by `network`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from isthmus.runtime.launchers.agent_command import agent_script
from isthmus.runtime.launchers.launcher import AgentSpec

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
