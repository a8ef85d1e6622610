"""What notebooks show of runs, as HTML."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping
from pathlib import Path


def table_of(rows: Mapping[str, str]) -> str:
    """Two columns.

    >>> table_of({"loss": "< 1"})
    '<table><tr><th>loss</th><td>&lt; 1</td></tr></table>'
    """
    cells = (f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows.items())
    return f"<table>{''.join(cells)}</table>"


def picture_of(path: Path) -> str:
    """A PNG inline: the notebook keeps it when the folder is gone."""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{html.escape(path.stem)}" src="data:image/png;base64,{data}" style="max-width: 100%">'
