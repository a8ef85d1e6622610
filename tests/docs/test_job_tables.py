"""Tables of a job that pages show are valid: each block, completed to a job, is read as one."""

from __future__ import annotations

import re
import textwrap
import tomllib
from pathlib import Path

import pytest

from isthmus.documents import convert
from isthmus.job import Job

DOCS = Path(__file__).parents[2] / "docs"
REST: dict[str, object] = {
    "name": "shown",
    "fleet": "laptop",
    "model": {"name": "cnn"},
    "data": {"kind": "digits"},
    "training": {"steps": 1, "batch_size": 8},
}
"""What a block need not have."""


@pytest.mark.parametrize("page", ["gpus.md", "private-data.md", "stores.md", "tutorials/fine-tune.md"])
def test_tables_are_valid(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```toml(?: title=.*?)?\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        shown = tomllib.loads(textwrap.dedent(block))
        data = {"data": {"kind": "digits", **shown["data"]}} if "data" in shown else {}
        convert({**REST, **shown, **data}, Job, page)
