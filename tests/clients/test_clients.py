"""The endpoint as real clients use it, each in an environment that is made for the test (`make test-clients`).

What they send and read is in tests/generation/test_endpoint.py too, over plain HTTP."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

import pytest

from tests.generation.parrot import Parrot, served_parrot

PINNED = {
    "openai": "openai==3.57.0",
    "litellm": "litellm==1.110.2",
    "langchain": "langchain-openai==1.7.4",
    "lm_eval": "lm-eval[api]==0.4.13",
    "llm": "llm==0.36",
}
pytestmark = pytest.mark.skipif("ISTHMUS_CLIENTS" not in os.environ, reason="installs clients: make test-clients")


@pytest.mark.parametrize("client", PINNED)
def test_a_client_gets_what_it_reads(client: str, tmp_path: Path) -> None:
    given = os.environ.get("ISTHMUS_CLIENTS_VENV")
    python = Path(given or tmp_path / "venv") / "bin" / "python"
    if given is None:
        venv.create(tmp_path / "venv", with_pip=True)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", PINNED[client]]
        subprocess.run(pip, check=True)
    parrot = Parrot()
    parrot.name = "birds:Parrot"
    script = Path(__file__).with_name(f"use_{client}.py")
    proxies = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    with served_parrot(parrot, key="secret") as (host, port):
        command = [python, script, f"http://{host}:{port}/v1", "secret"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=proxies)
    assert done.returncode == 0, done.stdout + done.stderr
    assert parrot.asked
