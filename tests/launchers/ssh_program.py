"""A program in place of `ssh`, which runs the command on this machine, by a shell as sshd does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

SOURCE = f"""#!{sys.executable}
import os, sys
words = sys.argv[1:]
if words[0] == "-G":
    print(f"hostname {{words[1]}}")
    sys.exit()
while words[0].startswith("-"):
    words = words[2:] if words[0] == "-o" else words[1:]
host, command = words
if host == "unreachable":
    sys.exit("ssh: connect to host unreachable port 22: Connection refused")
os.execvp("sh", ["sh", "-c", command])
"""


def put_in_path(folder: Path, path: str) -> str:
    """The PATH with it; `folder` gets the program."""
    folder.mkdir(exist_ok=True)
    program = folder / "ssh"
    program.write_text(SOURCE)
    program.chmod(0o755)
    return f"{folder}{os.pathsep}{path}"
