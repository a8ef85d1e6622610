"""One browser for all tests, Debian's chromium or the one that ISTHMUS_CHROMIUM names, and servers of the page."""

from __future__ import annotations

import importlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from isthmus.listening import listening_socket
from tests.dashboard.folders import recorded_run

CHROMIUM = os.environ.get("ISTHMUS_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
Serve = Callable[..., "Served"]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    if not os.environ.get("ISTHMUS_BROWSER"):
        pytest.skip("takes two minutes, and a browser: make test-browser")
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: make test-browser installs it")
    if CHROMIUM is None:
        pytest.skip("no chromium: apt-get install chromium, and make test-browser")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Served:
    """The page of a folder or of a fleet, until it is closed."""

    def __init__(self, source: Any, token: str = "") -> None:
        server, uvicorn = importlib.import_module("isthmus.dashboard.server"), importlib.import_module("uvicorn")
        listener = listening_socket("127.0.0.1", 0)
        port = listener.getsockname()[1]
        app = server.application(source, port=port, token=token)
        self._host = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._host.run, args=([listener],), daemon=True)
        self._thread.start()
        while not self._host.started:
            time.sleep(0.01)
        self.address = f"http://127.0.0.1:{port}"

    def close(self) -> None:
        self._host.should_exit = True
        self._thread.join(60)


def served_folder(path: Path, token: str = "") -> Served:
    return Served(importlib.import_module("isthmus.dashboard.run_folder").FolderSource(path), token)


@pytest.fixture(scope="session")
def _recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Of runs that no test changes."""
    folder = tmp_path_factory.mktemp("recorded")
    for name in ("a", "b", "c"):
        recorded_run(folder / name)
    (folder / "broken").mkdir()
    (folder / "broken" / "job.json").write_text("{")
    served = served_folder(folder)
    yield served
    served.close()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """A server of a folder of the test's own."""
    made: list[Served] = []

    def make(source: Any, token: str = "") -> Served:
        made.append(served_folder(source, token) if isinstance(source, Path) else Served(source, token))
        return made[-1]

    yield make
    for served in made:
        served.close()


def limit_s(idle_s: float) -> float:
    """As long as it may take here, of what may take so long on a machine with nothing else to do: a share of the
    processors is measured for a quarter of a second."""
    began_s, used_s = time.monotonic(), time.process_time()
    while time.process_time() - used_s < 0.25:
        pass
    return idle_s * max(1.0, 1.2 * (time.monotonic() - began_s) / 0.25)


class Page:
    """The page, and what it asked for and complained of."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.address = page, address
        self.asked: list[str] = []
        self.errors: list[str] = []
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)

    def open(self, query: str = "", ready: str = "#bars svg", *, of: Served | None = None) -> Any:
        self.address = self.address if of is None else of.address
        self.page.goto(f"{self.address}/{query}")
        self.page.wait_for_selector(ready)
        return self.page

    def until(self, expression: str, timeout_s: float = 20.0) -> None:
        """Until it is true. Playwright's own wait needs `eval`, which the page's policy refuses."""
        deadline_s = time.monotonic() + timeout_s
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {expression}"
            self.page.wait_for_timeout(30)

    def until_device(self, device: str, state: str, timeout_s: float = 20.0) -> None:
        self.until(f"document.querySelector('[data-device=\"{device}\"]')?.classList.contains('{state}')", timeout_s)

    def figure(self, name: str) -> str:
        return self.page.locator(f'[data-figure="{name}"]').inner_text()

    def style(self, selector: str, name: str) -> str:
        return self.page.locator(selector).first.evaluate(f"e => getComputedStyle(e).getPropertyValue('{name}')")


@pytest.fixture
def page(chromium: Any, _recorded: Served, serve: Serve) -> Iterator[Page]:
    """Claims, too, that no request left and that nothing was complained of. It ends before servers do."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    found = Page(context.new_page(), _recorded.address)
    yield found
    context.close()
    assert found.errors == []
    assert [url for url in found.asked if not url.startswith(("http://127.0.0.1:", "data:"))] == []
