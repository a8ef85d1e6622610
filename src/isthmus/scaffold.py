"""First files: a job, a fleet and a module to begin with, and copies of the examples."""

from __future__ import annotations

import glob
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Literal

import msgspec

from isthmus.documents import JOB_NAME
from isthmus.errors import UserError, unknown_name
from isthmus.units import whole_number

Task = Literal["text", "images", "federated"]
TASKS: tuple[Task, ...] = ("text", "images", "federated")
HERE = Path(__file__).parent
TEMPLATES = HERE / "templates"
STEPS: Mapping[Task, int] = {"text": 60, "images": 60, "federated": 20}  # steps of a first run: less than a minute
CLIENTS = 50
DATA: Mapping[Task, tuple[str, str]] = {  # each task's question, and its default
    "text": ("Which text (a file, a glob, or stdlib for Python's own source)?", "stdlib"),
    "images": ("Which images (a folder with a folder per class, or digits)?", "digits"),
}
SPLITS = ("train", "training")
_HELD = "# share that does not train: eval_every evaluates on it"
"""Folders that hold the classes of an image folder that is divided already."""


class FirstJob(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of `write_first_job`'s files. `steps` are rounds of a federated job, `devices` its executors."""

    name: str
    task: Task = "text"
    data: str = ""
    """Text: files, a glob, or `stdlib`. Images: a folder with a folder per class, or `digits`. Nothing: those of every
    machine, as are a federated job's."""
    devices: int = 2
    clients: int = CLIENTS  # clients of a federated job
    steps: int = 0  # 0: as `STEPS` has it


def task_of(text: str) -> Task:
    """UserError for another."""
    if text not in TASKS:
        raise unknown_name("task", text, TASKS)
    return text


def name_for(folder: Path) -> str:
    """A job's name, from its folder's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.absolute().name).strip("-._") or "first"


def check_name(name: str) -> str:
    """The name. UserError for one that no job may have."""
    if not re.fullmatch(JOB_NAME, name):
        raise UserError(
            f"name: got {name!r}, expected letters A-Z and a-z, digits, '.', '_' and '-', and first a letter or a digit"
        )
    return name


def check_count(text: object) -> int:
    """The number that a text is. UserError for one below 1, and for anything else."""
    if not (count := whole_number(str(text))):
        raise UserError(f"got {str(text)[:60]!r}, expected a whole number from 1")
    return count


def check_data(task: Task, data: str) -> str:
    """The data. UserError where there are none of that name."""
    _ = _text_files(data) if task == "text" else _images(data)
    return data


def write_first_job(folder: Path, first: FirstJob) -> list[Path]:
    """Write a job that runs at once, and what it names, into a folder that is made if need be; returns the files.

    Raises UserError for data that are not there, and for files that are: nothing is overwritten.
    """
    sources = {path.name: path for path in sorted((TEMPLATES / first.task).iterdir()) if path.is_file()}
    if first.task == "federated":
        sources["model.py"] = TEMPLATES / "images" / "model.py"
    else:
        sources["fleet.toml"] = TEMPLATES / "fleet.toml"
        if first.devices < 2:
            raise UserError(f"devices: got {first.devices}, expected at least 2")
    check_name(first.name)
    values = _values(first)
    taken = [name for name in sources if (folder / name).exists()]
    if taken:
        raise UserError(f"{folder}: has {', '.join(taken)} already, which `init` does not overwrite")
    texts = {name: _filled(path, values) for name, path in sources.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as e:
        raise UserError(f"{folder}: cannot be written: {e.strerror or e}") from None
    return [folder / name for name in texts]


def example_names() -> list[str]:
    """Return the names of example jobs, and of folders with scripts."""
    found = [path for path in _examples().iterdir() if path.suffix == ".toml" or path.is_dir()]
    return sorted(path.stem for path in found if not path.stem.endswith("-fleet") and path.name[0] not in "._")


def copy_example(name: str, folder: Path) -> list[Path]:
    """Copy an example, and what it needs, into a folder; returns the files. UserError for an unknown name, and for
    files that are there: nothing is overwritten."""
    if name not in example_names():
        raise unknown_name("example", name, example_names())
    source = _examples() / name
    sources = [source] if source.is_dir() else sorted(_examples().glob(f"{name}*.toml"))
    taken = [path.name for path in sources if (folder / path.name).exists()]
    if taken:
        raise UserError(f"{folder}: has {', '.join(taken)} already, which `example` does not overwrite")
    folder.mkdir(parents=True, exist_ok=True)
    for path in sources:
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        else:
            shutil.copy(path, folder / path.name)
    return [folder / path.name for path in sources]


def _examples() -> Path:
    """In a wheel beside this file, in a checkout at its top."""
    return next(path for path in (HERE / "examples", HERE.parent.parent / "examples") if path.is_dir())


def _filled(path: Path, values: Mapping[str, object]) -> str:
    text = path.read_text(encoding="utf-8")
    return Template(text).substitute(values) if path.suffix == ".toml" else text


def _values(first: FirstJob) -> dict[str, object]:
    steps, others = first.steps or STEPS[first.task], first.devices - 1
    values: dict[str, object] = {"name": first.name, "steps": steps, "half": max(1, steps // 2)}
    match first.task:  # speeds that two cores keep up with
        case "text":
            files = _quoted(_text_files(first.data))
            return {**values, "others": others, "files": files, "fast": "4 GFLOPS", "slow": "2 GFLOPS"}
        case "images":
            return {**values, "others": others, **_images(first.data), "fast": "0.6 GFLOPS", "slow": "0.3 GFLOPS"}
        case "federated":
            counts = {"clients": first.clients, "asked": min(first.clients, 10), "executors": first.devices}
            return values | counts


def _text_files(data: str) -> str:
    if data in ("", "stdlib"):
        return "stdlib"
    path = Path(data).expanduser()
    if path.is_dir():
        if not any(path.rglob("*.txt")):
            raise UserError(f"data: no .txt file in {data}: for other names give a glob, such as '{data}/**/*.md'")
        return str(path.absolute() / "**" / "*.txt")
    if not path.exists() and next(glob.iglob(str(path), recursive=True), None) is None:
        raise UserError(f"data: no file {data}, expected files, a glob such as 'corpus/**/*.txt', or 'stdlib'")
    return str(path.absolute())


def _images(data: str) -> dict[str, str]:
    if data in ("", "digits"):
        table = f'[data]\nkind = "digits"\noptions = {{ holdout = 0.2 }}     {_HELD}'
        return {"channels": "1", "classes": "10", "data": table}
    folder = Path(data).expanduser()
    if not folder.is_dir():
        raise UserError(f"data: no folder {data}, expected a folder with a folder of images per class, or 'digits'")
    classes_in = next((folder / split for split in SPLITS if (folder / split).is_dir()), folder)
    classes = sum(path.is_dir() for path in classes_in.iterdir())
    if classes < 2:
        raise UserError(f"data: {classes_in} has {classes} folders, expected one of images per class, at least two")
    table = (
        f'[data]\nkind = "image-folder"\n\n[data.options]\npath = {_quoted(str(folder.absolute()))}\n'
        'transforms = [{ name = "Resize", size = [32, 32] }]\n'
        f"holdout = 0.05                  {_HELD}, where the folder has no split for it"
    )
    return {"channels": "3", "classes": str(classes), "data": table}


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
