"""What pages tell a reader to type is typed, literally, in an empty folder.

A page's blocks run one after another in one shell: `bash` as it stands, `python` as a script, and a block with a title
is written to the file of that name.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["start/first-run.md", "tutorials/own-model.md", "tutorials/federated.md", "../README.md"]
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
END = "END-OF-A-BLOCK"


def script_of(text: str) -> str:
    lines = ["set -e"]
    for language, title, body in BLOCK.findall(text):
        if title:
            lines.append(f"cat > {title} <<'{END}'\n{body}{END}")
        elif language == "bash":
            lines.append(body)
        elif language == "python":
            lines.append(f"python - <<'{END}'\n{body}{END}")
    return "\n".join(lines)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_works_as_it_is_written(page: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    here = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{here}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    callbacks = script_of((DOCS / page).read_text(encoding="utf-8"))
    done = subprocess.run(["bash", "-c", callbacks], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert "Traceback" not in done.stderr


def test_the_blocks_of_a_page_in_their_order() -> None:
    blocks = ("bash\ncd x", 'toml title="a.toml"\nb = 1', "python\nprint(1)", "text\nno")
    page = "# A\n" + "words\n".join(f"```{block}\n```\n" for block in blocks)
    expected = f"set -e\ncd x\n\ncat > a.toml <<'{END}'\nb = 1\n{END}\npython - <<'{END}'\nprint(1)\n{END}"
    assert script_of(page) == expected
