"""A Hugging Face hub on loopback: as much of it as a push needs."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_right"
LARGE = 2000
"""Bytes from which a file goes by LFS."""


class Hub:
    """What was pushed."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.repositories: dict[str, bool] = {}
        """By name, whether it is private."""
        self.files: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}
        """Large ones, by digest."""
        self.messages: list[str] = []


@contextmanager
def fake_hub() -> Generator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    _Handler.hub = hub
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = self.path.partition("?")[0]
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid username or password."})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path.endswith("/preupload/main"):
            files = [
                {"path": f["path"], "uploadMode": "lfs" if f["size"] >= LARGE else "regular", "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})
        elif path.endswith(".git/info/lfs/objects/batch"):
            asked = json.loads(body)
            objects = [
                {**entry, "actions": {"upload": {"href": f"{self.hub.address}/lfs/{entry['oid']}", "header": {}}}}
                for entry in asked["objects"]
            ]
            self._answer(200, {"transfer": "basic", "objects": objects})
        elif path.endswith("/commit/main"):
            self._commit(path.removeprefix("/api/models/").removesuffix("/commit/main"), body)
        else:
            self._answer(404, {"error": f"no {path}"})

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        digest = self.path.removeprefix("/lfs/")
        assert hashlib.sha256(body).hexdigest() == digest
        self.hub.objects[digest] = body
        self._answer(200, {})

    def _create(self, asked: dict[str, str]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] != "me":
            message = f'You don\'t have the rights to create a model under the namespace "{asked["organization"]}".'
            self._answer(403, {"error": message})
        elif name in self.hub.repositories:
            self._answer(409, {"error": "You already created this model repo", "url": f"{self.hub.address}/{name}"})
        else:
            self.hub.repositories[name] = asked["visibility"] == "private"
            self._answer(200, {"url": f"{self.hub.address}/{name}"})

    def _commit(self, name: str, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.hub.messages.append(value["summary"])
                continue
            large = line["key"] == "lfsFile"
            data = self.hub.objects[value["oid"]] if large else base64.b64decode(value["content"])
            self.hub.files.setdefault(name, {})[value["path"]] = data
        self._answer(200, {"commitUrl": f"{self.hub.address}/{name}/commit/1", "commitOid": "1" * 40})

    def _answer(self, status: int, document: object) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        if status >= 400:
            self.send_header("X-Error-Message", document["error"])  # type: ignore[index]
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
