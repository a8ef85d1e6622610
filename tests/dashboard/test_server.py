"""Who is answered, and with what."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from isthmus.api.run_entries import ENTRIES, SPANS
from isthmus.dashboard.run_folder import FOLLOWED, FolderSource
from isthmus.dashboard.server import FILES, application


def _client(folder: Path, host: str = "127.0.0.1:7434", token: str = "") -> TestClient:
    return TestClient(application(FolderSource(folder), port=7434, token=token), base_url=f"http://{host}")


def test_the_page_and_its_files(recorded: Path) -> None:
    client = _client(recorded)
    for path in FILES:
        answer = client.get(path)
        assert answer.status_code == 200
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert "http://" not in answer.text.replace("http://www.w3.org/", "") and "https://" not in (
            "" if "uPlot" in path else answer.text
        )


def test_documents(recorded: Path) -> None:
    client = _client(recorded.parent)
    (listed,) = client.get("/api/runs").json()["runs"]
    assert listed["id"] == "recorded"
    assert client.get("/api/run?run=recorded").json()["state"] == "done"
    assert client.get("/api/at?run=recorded&moment=0").json()["moment"] == 0
    assert client.get("/api/timeline?run=recorded&step=3").json()["step"] == 3


@pytest.mark.parametrize(
    "asked",
    ["run?run=../recorded", "run?run=", "at?run=/etc", "at?run=recorded&moment=x", "at?run=recorded&moment=nan"],
)
def test_what_is_not_there(recorded: Path, asked: str) -> None:
    assert _client(recorded.parent).get(f"/api/{asked}").status_code in (400, 404)


def test_who_is_refused(recorded: Path) -> None:
    client = _client(recorded)
    assert client.get("/api/runs").status_code == 200
    assert client.get("/api/runs", headers={"origin": "http://127.0.0.1:7434"}).status_code == 200
    assert client.get("/api/runs", headers={"origin": "http://evil.example"}).status_code == 403
    assert client.get("/api/runs", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert client.get("/api/runs", headers={"host": "evil.example:7434"}).status_code == 421
    assert client.get("/api/runs", headers={"host": "localhost:7434"}).status_code == 200
    assert client.post("/api/runs").status_code == 405


def test_a_token(recorded: Path) -> None:
    client = _client(recorded, "10.0.0.9:7434", "secret")
    assert client.get("/").status_code == 401 and client.get("/?token=wrong").status_code == 401
    answer = client.get("/?token=secret&run=a", follow_redirects=False)
    assert answer.status_code == 303 and answer.headers["location"] == "/?run=a"
    assert "HttpOnly" in answer.headers["set-cookie"] and "SameSite=strict" in answer.headers["set-cookie"]
    assert client.get("/api/runs").status_code == 200  # the cookie
    assert client.get("/api/runs", headers={"origin": "http://evil.example"}).status_code == 403


DEEP = b"[" * 100_000


def _pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _written(text: bytes) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        path.write_bytes(text)

    return write


DAMAGE: dict[str, Callable[[Path], object]] = {
    "deep": _written(DEEP + b"\n"),
    "deep inside": _written(b'{"training": ' + DEEP + b"\n"),
    "no UTF-8": _written(b'{"name": "\xff"}\n'),
    "another kind": _written(b'"text"\n'),
    "another table": _written(b'{"training": {"steps": "x"}, "federated": [3], "model": 3, "record": {}}\n'),
    "huge numbers": _written(b'{"training": {"steps": 1e300}, "step": 9223372036854775807, "kind": "step"}\n'),
    "a pipe": _pipe,
    "a folder": lambda path: (path.unlink(missing_ok=True), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_run_takes_no_other_with_it(recorded: Path, damage: str) -> None:
    """Any file of a run's folder: the list, its events and the other run are there."""
    names = [*FOLLOWED, "fleet.json", "plan.json"]
    for name in names:
        folder = recorded.with_name(f"bad-{name}")
        shutil.copytree(recorded, folder)
        if name == SPANS:
            (folder / "trace.jsonl").unlink(missing_ok=True)  # else it is not read
        (DAMAGE[damage])(folder / name)
    client = _client(recorded.parent)
    listed = {run["id"]: run for run in client.get("/api/runs").json()["runs"]}
    assert listed["recorded"]["state"] == "done" and len(listed) >= len(names)
    for name in listed:
        for asked in ("run?", "at?moment=3&", "timeline?step=3&"):
            answer = client.get(f"/api/{asked}run={name}")
            assert answer.status_code in (200, 500), (name, asked)
            assert answer.status_code == 200 or "cannot be shown" in answer.text
    assert client.get("/api/run?run=recorded").json()["state"] == "done"
    for name in ("job.json", "plan.json", "fleet.json"):
        if f"bad-{name}" in listed and damage not in ("another table", "huge numbers"):
            assert listed[f"bad-{name}"]["state"] == "broken" and name in listed[f"bad-{name}"]["problem"]


def test_a_line_that_is_nested_too_deeply_leaves_the_others(recorded: Path) -> None:
    lines = (recorded / ENTRIES).read_bytes()
    (recorded / ENTRIES).write_bytes(DEEP + b"\n" + lines)
    assert _client(recorded).get("/api/run?run=recorded").json()["unread"] == 1


def test_a_run_whose_name_is_no_utf8_is_listed_and_shown(recorded: Path) -> None:
    shutil.copytree(recorded, recorded.with_name(os.fsdecode(b"run-\xff")))
    client = _client(recorded.parent)
    assert {run["name"] for run in client.get("/api/runs").json()["runs"]} == {"recorded", "run-\\xff"}
    shown = client.get("/api/run", params={"run": "run-\\xff"}).json()
    assert (shown["state"], shown["name"]) == ("done", "run-\\xff")


def test_numbers_that_are_no_step_are_refused(recorded: Path) -> None:
    client = _client(recorded)
    for asked in ("at?moment=1e300", "timeline?step=-1e300", "timeline?step=1&columns=1e99", "at?moment=inf"):
        assert client.get(f"/api/{asked}&run=recorded").status_code == 400
    assert json.loads(client.get("/api/at?run=recorded&moment=1e14").text)["moment"] > 0
