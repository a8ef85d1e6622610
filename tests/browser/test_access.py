"""Who may see the page, and that it works without a network. Every test also claims that no request left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Page, Serve, served_folder
from tests.dashboard.folders import add_entry, recorded_run


def test_no_request_leaves(page: Page) -> None:
    blocked: list[str] = []
    page.page.context.route(
        lambda url: not url.startswith(page.address), lambda route: blocked.append(route.request.url)
    )
    shown = page.open("?run=a")
    shown.keyboard.press("Home")
    page.until("page.at.moment === 0")
    assert blocked == [] and len(page.asked) > 8
    assert shown.evaluate("document.fonts.size") == 0


def test_the_policy_refuses_other_scripts_and_servers(page: Page) -> None:
    shown = page.open("?run=a")
    refused = shown.evaluate("fetch('http://127.0.0.2:9/').then(() => false, () => true)")
    assert refused
    assert any("Content Security Policy" in error for error in page.errors)
    page.errors.clear()
    page.asked[:] = [url for url in page.asked if "127.0.0.2" not in url]


def test_another_origin_is_refused(page: Page, serve: Serve, tmp_path: Path) -> None:
    other = serve(tmp_path)  # another port of this machine: a page of it is another origin
    page.page.goto(f"{other.address}/style.css")
    got = page.page.context.request.get(f"{page.address}/api/runs", headers={"origin": other.address})
    assert got.status == 403 and "another origin" in got.text()
    page.page.evaluate(f"void fetch('{page.address}/api/runs').catch(() => 0)")
    page.page.wait_for_timeout(100)
    page.errors.clear()  # the browser complains of it


def test_a_frame_of_another_page_is_refused(page: Page, serve: Serve, tmp_path: Path) -> None:
    headers = page.page.context.request.get(f"{page.address}/").headers
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    got = page.page.context.request.get(f"{page.address}/?run=a", headers={"sec-fetch-site": "cross-site"})
    assert got.status == 403


def test_another_host_name_is_refused(page: Page) -> None:
    got = page.page.context.request.get(f"{page.address}/api/runs", headers={"host": "evil.example"})
    assert got.status == 421 and "evil.example" in got.text()


def test_a_missing_token_is_refused(page: Page, serve: Serve, tmp_path: Path) -> None:
    served = serve(recorded_run(tmp_path / "a"), token="secret")
    for query in ("", "?token=wrong"):
        answer = page.page.goto(f"{served.address}/{query}")
        assert answer.status == 401 and "a token is needed" in page.page.inner_text("body")
    page.errors.clear()


def test_a_token_opens_the_page_and_leaves_the_address(page: Page, serve: Serve, tmp_path: Path) -> None:
    served = serve(recorded_run(tmp_path / "a"), token="secret")
    shown = page.open("?token=secret", of=served)
    assert "secret" not in shown.url
    assert shown.evaluate("document.cookie") == "", "scripts cannot read it"


def test_names_are_text(page: Page, serve: Serve, tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "a")
    add_entry(run, kind="note", text="<img src=x onerror=alert(1)><script>document.title='bad'</script>")
    shown = page.open(of=serve(run))
    assert "<img" in shown.locator("#events li").last.inner_text()
    assert shown.locator("#events img, #events script").count() == 0
    assert shown.title() != "bad"


@pytest.mark.parametrize("path", ["../a", "/etc", "missing"])
def test_only_runs_of_the_folder_are_shown(page: Page, path: str) -> None:
    page.page.goto(f"{page.address}/?run={path}")
    page.page.wait_for_selector("#problem:not([hidden])")
    assert f"There is no run '{path}' here." in page.page.locator("#problem").inner_text()
    page.errors.clear()  # 404


def test_a_server_that_ends_is_noticed(page: Page, tmp_path: Path) -> None:
    served = served_folder(recorded_run(tmp_path / "a"))
    shown: Any = page.open(of=served)
    served.close()
    page.until("document.getElementById('state').textContent.includes('does not answer')")
    assert shown.locator("#loss canvas").count() == 1, "what was shown stays"
    page.errors.clear()
