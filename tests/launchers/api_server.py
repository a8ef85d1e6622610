"""A small API server of Kubernetes on loopback: it checks what it is sent, and runs the commands of pods as processes.

Of a JobSet it makes one pod per completion of its job. A pod that is deleted comes back under another name while the
JobSet is there. A container that fails is not started again: Kubernetes waits longer each time.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Generator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from .schemas import check_manifest

JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets"
SECRETS, PODS = "/api/v1/namespaces/default/secrets", "/api/v1/namespaces/default/pods"


class Pod:
    """One process, with a folder in place of its volumes."""

    def __init__(self, name: str, number: int, spec: Mapping[str, Any], tickets: Mapping[str, str]) -> None:
        self.name, self.number = name, number
        self._folder = Path(tempfile.mkdtemp(prefix="pod-"))
        (self._folder / "tickets").mkdir()
        for key, ticket in tickets.items():
            (self._folder / "tickets" / key).write_text(ticket)
        (container,) = spec["containers"]
        # At the beginning of a path alone: a checkout may be in a folder of that name.
        command = [re.sub(r"(?<![\w.-])/isthmus/", f"{self._folder}/", word) for word in container["command"]]
        self._log = self._folder / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={**os.environ, "JOB_COMPLETION_INDEX": str(number)},
                process_group=0,
            )

    def document(self) -> dict[str, Any]:
        code = self.process.poll()
        state: dict[str, Any] = {"running": {}}
        if code is not None:
            state = {"terminated": {"exitCode": 0}} if code == 0 else {"waiting": {"reason": "CrashLoopBackOff"}}
        return {
            "metadata": {
                "name": self.name,
                "creationTimestamp": f"2026-01-01T00:00:{int(self.name.rpartition('-')[2]):02}Z",
                "annotations": {"batch.kubernetes.io/job-completion-index": str(self.number)},
            },
            "status": {
                "phase": "Succeeded" if code == 0 else "Running",
                "containerStatuses": [{"name": "agents", "containerID": f"c://{self.name}", "state": state}],
            },
        }

    def log_lines(self) -> Generator[bytes]:
        with self._log.open("rb") as log:
            while True:
                ended = self.process.poll() is not None
                yield from iter(log.readline, b"")
                if ended:
                    return
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(0.1)

    def end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.process.pid, number)
                self.process.wait(30)
        shutil.rmtree(self._folder)


class ApiServer:
    """What it holds, and the requests that it had."""

    def __init__(self) -> None:
        self.jobsets: dict[str, Any] = {}
        self.secrets: dict[str, Any] = {}
        self.pods: dict[str, Pod] = {}
        self.requests: list[tuple[str, str]] = []
        self.refuse: dict[tuple[str, str], int] = {}
        """Status of the answer, by method and path."""
        self._numbers = itertools.count()
        self._lock = threading.RLock()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        with self._lock:
            self.requests.append((method, path))
            if (method, path) in self.refuse:
                return self.refuse[method, path], {"kind": "Status", "message": "no"}
            kind, _, name = path.rpartition("/")
            match method, path, kind:
                case "GET", p, _ if p == JOBSETS:
                    return 200, {"items": list(self.jobsets.values())}
                case "GET", p, _ if p == PODS:
                    return 200, {"items": [pod.document() for pod in self.pods.values()]}
                case "POST", p, _ if p in (JOBSETS, SECRETS):
                    return self._create(p, body)
                case "GET", _, p if p == JOBSETS and name in self.jobsets:
                    return 200, self.jobsets[name]
                case "PATCH", _, p if p == SECRETS and name in self.secrets:
                    self.secrets[name]["stringData"] |= body["stringData"]
                    return 200, self.secrets[name]
                case "DELETE", _, p if p in (JOBSETS, SECRETS, PODS):
                    return self._delete(p, name)
                case _:
                    return 404, {"kind": "Status"}

    def _create(self, path: str, body: Any) -> tuple[int, Any]:
        check_manifest(body)
        name = body["metadata"]["name"]
        (self.jobsets if path == JOBSETS else self.secrets)[name] = body
        if path == JOBSETS:
            (job,) = body["spec"]["replicatedJobs"]
            for number in range(job["template"]["spec"]["completions"]):
                self._start(name, number)
        return 201, body

    def _start(self, name: str, number: int) -> None:
        spec = self.jobsets[name]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        pod = Pod(f"{name}-agents-0-{number}-{next(self._numbers)}", number, spec, self.secrets[name]["stringData"])
        self.pods[pod.name] = pod

    def _delete(self, path: str, name: str) -> tuple[int, Any]:
        held: dict[str, Any] = {JOBSETS: self.jobsets, SECRETS: self.secrets, PODS: self.pods}[path]
        if name not in held:
            return 404, {"kind": "Status"}
        gone = held.pop(name)
        if path == JOBSETS:
            for pod in [self.pods.pop(pod) for pod in list(self.pods) if pod.startswith(f"{name}-")]:
                pod.end()
        if path == PODS:
            gone.end()
            self._start(name.split("-agents-")[0], gone.number)
        return 200, {"kind": "Status"}


@contextlib.contextmanager
def serving_api(folder: Path) -> Generator[tuple[ApiServer, Path]]:
    """The server, and the kubeconfig of its one context."""
    server = ApiServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            parts = urlsplit(self.path)
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            if parts.path.endswith("/log"):
                self._stream(parts.path.split("/")[-2], parse_qs(parts.query))
                return
            status, found = server.answer(self.command, parts.path, body)
            text = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def _stream(self, pod: str, query: Mapping[str, list[str]]) -> None:
            assert query["container"] == ["agents"] and query["follow"][0].lower() == "true", query
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            with contextlib.suppress(OSError):
                for line in server.pods[pod].log_lines():
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.write(b"0\r\n\r\n")

        do_GET = do_POST = do_PATCH = do_DELETE = _answer

        def log_message(self, *_: object) -> None:
            """Tests look at `requests`."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    config = folder / "kubeconfig"
    config.write_text(json.dumps(_kubeconfig(f"http://127.0.0.1:{http.server_address[1]}")))
    thread = threading.Thread(target=http.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server, config
    finally:
        for pod in server.pods.values():
            pod.end()
        http.shutdown()
        thread.join()
        http.server_close()


def _kubeconfig(url: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "loop",
        "contexts": [{"name": "loop", "context": {"cluster": "loop", "user": "me"}}],
        "clusters": [{"name": "loop", "cluster": {"server": url}}],
        "users": [{"name": "me", "user": {"token": "t"}}],
    }
