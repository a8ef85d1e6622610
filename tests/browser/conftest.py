"""One browser for all tests, Debian's chromium or the one that ISTHMUS_CHROMIUM names, and one server of one folder."""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = os.environ.get("ISTHMUS_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
RECORDED = Path(__file__).parents[1] / "dashboard" / "recorded.zip"


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: make test-browser installs it")
    if CHROMIUM is None:
        pytest.skip("no chromium: apt-get install chromium, and make test-browser")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: a and b as recorded, and one to which tests add."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("a", "b", "live"):
        with zipfile.ZipFile(RECORDED) as kept:
            kept.extractall(folder / name)
    (folder / "broken").mkdir()
    (folder / "broken" / "job.json").write_text("{")
    return folder


@pytest.fixture(scope="session")
def address(runs: Path) -> Iterator[str]:
    """Of a server of these runs."""
    server, sources = (importlib.import_module(f"isthmus.dashboard.{name}") for name in ("server", "sources"))
    uvicorn = importlib.import_module("uvicorn")
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    app = server.application(sources.FolderSource(runs), port=port)
    host = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=host.run, args=([listener],), daemon=True)
    thread.start()
    while not host.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    host.should_exit = True
    thread.join(10)


class Page:
    """The page, and what it asked for and complained of."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.address = page, address
        self.asked: list[str] = []
        self.errors: list[str] = []
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)

    def open(self, query: str, ready: str = "#bars svg") -> Any:
        self.page.goto(f"{self.address}/{query}")
        self.page.wait_for_selector(ready)
        return self.page

    def until(self, said: str, timeout_s: float = 20.0) -> None:
        """Until the expression is true. Playwright's own wait needs `eval`, which the page's policy refuses."""
        deadline_s = time.monotonic() + timeout_s
        while not self.page.evaluate(said):
            assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {said}"
            self.page.wait_for_timeout(30)

    def class_of(self, device: str) -> str:
        return self.page.locator(f'[data-device="{device}"]').get_attribute("class")

    def figure(self, name: str) -> str:
        return self.page.locator(f'[data-figure="{name}"] dd').inner_text()


@pytest.fixture(scope="session")
def _pages(chromium: Any) -> Any:
    return chromium


@pytest.fixture
def page(_pages: Any, address: str) -> Iterator[Page]:
    context = _pages.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    found = Page(context.new_page(), address)
    yield found
    assert found.errors == []
    assert [url for url in found.asked if not url.startswith((address, "data:"))] == [], "no request leaves"
    context.close()
