"""The complete parts of a run, by the names of its files: in its folder and in its store alike.

    checkpoints/step-000040/stage-0.safetensors
    checkpoints/step-000040/manifest.json            uploaded last, removed first
    rounds/round-000010.safetensors                  one file, with its own digest

A commit is what a run can go on from: a checkpoint, or a federated round.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from isthmus.run_files import CHECKPOINTS, MANIFEST, ROUNDS

_CHECKPOINT = re.compile(rf"({CHECKPOINTS}/step-\d+)/([A-Za-z0-9][\w.-]*)")
_ROUND = re.compile(rf"{ROUNDS}/round-\d+\.safetensors")
_PART = re.compile(r"[A-Za-z0-9][\w.-]*")


def parts_of_commits(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the files of each commit, the one that makes it complete last; also of incomplete commits.

    >>> parts_of_commits(["checkpoints/step-000002/manifest.json", "checkpoints/step-000002/rest.safetensors"])
    {'checkpoints/step-000002': ['checkpoints/step-000002/rest.safetensors', 'checkpoints/step-000002/manifest.json']}
    """
    found: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: (name.endswith(f"/{MANIFEST}"), name)):
        if (part := _CHECKPOINT.fullmatch(name)) is not None:
            found.setdefault(part[1], []).append(name)
        elif _ROUND.fullmatch(name):
            found[name] = [name]
    return found


def commits_in(names: Iterable[str]) -> dict[str, list[str]]:
    """The complete ones of `parts_of_commits`."""
    return {
        commit: files
        for commit, files in parts_of_commits(names).items()
        if files[-1] in (commit, f"{commit}/{MANIFEST}")
    }


def number_of(commit: str) -> int:
    """The step or the round."""
    return int(re.findall(r"\d+", commit)[-1])


def newest_first(commits: Mapping[str, list[str]]) -> list[str]:
    return sorted(commits, key=number_of, reverse=True)


def is_document(name: str) -> bool:
    """Whether a name in a store is of a file that may be written into a run's folder: no part of a commit, and nothing
    that leads out of the folder."""
    folder, _, _ = name.partition("/")
    return folder not in (CHECKPOINTS, ROUNDS) and all(_PART.fullmatch(part) for part in name.split("/"))
