"""One side of the comparison: `python side.py MODULE TASK_FOLDER OUTPUT_FOLDER OPTIONS_AS_JSON`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import torch
from task import Task

if __name__ == "__main__":
    torch.set_num_threads(1)
    side = importlib.import_module(sys.argv[1])
    side.run(Task(Path(sys.argv[2])), Path(sys.argv[3]), json.loads(sys.argv[4]))
