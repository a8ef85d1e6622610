"""A web server on loopback that serves a folder by ranges, and may answer slowly, or not at all."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Web:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""
        self.slow = ""
        """The end of names whose bytes come one in a tenth of a second, as long as the server lasts."""
        self.whole = False  # it gives every file whole, whatever is asked for
        self.ranges: list[tuple[str, int, int]] = []
        self.over = threading.Event()


@contextmanager
def web_server(folder: Path) -> Generator[Web]:
    web = Web(folder)

    class Handler(_Handler):
        of = web

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    web.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield web
    finally:
        web.over.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    of: Web
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.of.folder / self.path.lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        start, end, given = 0, len(data), None if self.of.whole else self.headers.get("Range")
        if given and body:
            first, _, last = given.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or len(data)) + 1, len(data))
            self.of.ranges.append((path.name, start, end))
        self.send_response(206 if given else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{hashlib.md5(data).hexdigest()}"')
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if not body:
            return
        if self.of.slow and path.name.endswith(self.of.slow):
            for byte in data[start:end]:
                if self.of.over.is_set():
                    return
                self.wfile.write(bytes([byte]))
                time.sleep(0.1)
            return
        self.wfile.write(data[start:end])
