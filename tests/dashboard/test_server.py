"""Who is answered, and with what."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from isthmus.dashboard.server import FILES, application
from isthmus.dashboard.sources import FolderSource


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
