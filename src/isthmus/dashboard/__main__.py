"""`python -m isthmus.dashboard FD FOLDER|--fleet=STATE`: the page beside a run, on a socket that the run has opened."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from isthmus.dashboard.run_folder import FleetSource, FolderSource
from isthmus.dashboard.server import serve_page
from isthmus.runtime.processes.forked import end_with_input

if __name__ == "__main__":
    end_with_input()  # so the page ends with the run, however that ends
    state = sys.argv[2].removeprefix("--fleet=")
    source = FleetSource(Path(state)) if state != sys.argv[2] else FolderSource(Path(state))
    serve_page(source, socket.socket(fileno=int(sys.argv[1])))
