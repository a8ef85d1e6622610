"""A real S3 server on loopback (moto's), whose requests a test can hold."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

NEVER = b"inf"
"""Requests before the server asks for keys that it knows."""


class Gate:
    """Requests to write what has `held` in its path wait here, and fail: the server has those before, and not these.
    All that are answered are counted."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.held = ""
        self.reached = threading.Event()
        self.opened = threading.Event()
        self.served: list[tuple[str, str, int]] = []
        """Method, path and bytes of the body of each answer."""

    def hold(self, held: str) -> None:
        self.reached.clear()
        self.opened.clear()
        self.held = held

    def open(self) -> None:
        self.held = ""
        self.opened.set()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if self.held and environ["REQUEST_METHOD"] == "PUT" and self.held in environ["PATH_INFO"]:
            self.reached.set()
            self.opened.wait()
            start_response("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]

        def counted(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            length = next((value for name, value in headers if name.lower() == "content-length"), 0)
            self.served.append((method, path, int(length) if method == "GET" else 0))
            return start_response(status, headers, *rest)

        return self._app(environ, counted)


@contextmanager
def s3_server() -> Generator[tuple[str, Gate]]:
    """Its address, and the gate. What it needs is imported here: that takes two seconds in each of the workers."""
    moto, serving = importlib.import_module("moto.server"), importlib.import_module("werkzeug.serving")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    gate = Gate(moto.DomainDispatcherApplication(moto.create_backend_app))
    server = serving.make_server("127.0.0.1", 0, gate, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", gate
    finally:
        gate.open()
        server.shutdown()
        thread.join()
        server.server_close()
