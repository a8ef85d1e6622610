"""What is free is what the machine and each limit of a control group leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus import free_memory
from isthmus.free_memory import available_bytes, code_bytes

GIB = 1 << 30


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 GiB available, and folders for a system's files."""
    monkeypatch.setattr(free_memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(free_memory, "_CONTROL_GROUPS", tmp_path / "cgroup")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
    return tmp_path


def group(system: Path, folder: str, files: dict[str, object]) -> None:
    (system / "cgroup" / folder).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (system / "cgroup" / folder / f"memory.{name}").write_text(f"{text}\n")


def test_code_is_what_files_with_code_have_in_memory(system: Path) -> None:
    """Not what a process has written into their pages, nor files that it only reads."""
    mappings = (
        ("r--p", "/usr/lib/libtorch.so", 100, 0),
        ("r-xp", "/usr/lib/libtorch.so", 40, 0),
        ("rw-p", "/usr/lib/libtorch.so", 30, 30),
        ("r--s", "/home/a model: 1/weights.safetensors", 5000, 0),
        ("r-xp", "[vdso]", 4, 0),
        ("rwxp", "", 64, 64),
    )
    text = "".join(
        f"7f00-7f01 {permissions} 00000000 fe:00 26723    {path}\nSize: 9 kB\nRss: {rss} kB\nAnonymous: {own} kB\n"
        for permissions, path, rss, own in mappings
    )
    assert code_bytes() == 0
    (system / "proc" / "self" / "smaps").write_text(text)
    assert code_bytes() == 140 << 10


def test_a_machine_without_limits_has_what_is_available(system: Path) -> None:
    assert available_bytes() == 8 * GIB
    (system / "proc" / "self" / "cgroup").write_text("4:memory:/\n0::/job\n")
    group(system, "job", {"max": "max", "current": 5, "stat": "inactive_file 1"})
    group(system, "memory", {"limit_in_bytes": 2**63 - 4096, "usage_in_bytes": GIB})
    assert available_bytes() == 8 * GIB
    (system / "proc" / "meminfo").write_text("")
    (system / "proc" / "self" / "cgroup").unlink()
    assert available_bytes() is None


@pytest.mark.parametrize("where", ["jobs/one", "jobs", ""])
def test_a_lower_limit_counts_wherever_it_is_set(system: Path, where: str) -> None:
    """Pages of files that can be dropped at once are free."""
    (system / "proc" / "self" / "cgroup").write_text("0::/jobs/one\n")
    stat = f"active_file 7\ninactive_file {GIB // 2}\ntotal_inactive_file 3"
    group(system, where, {"max": 4 * GIB, "current": 3 * GIB, "stat": stat})
    assert available_bytes() == 1.5 * GIB


def test_a_limit_of_version_1_counts(system: Path) -> None:
    (system / "proc" / "self" / "cgroup").write_text("5:cpu:/\n4:memory:/docker/of-the-host\n0::/\n")
    stat = f"inactive_file 3\ntotal_inactive_file {GIB}"
    group(system, "memory", {"limit_in_bytes": 4 * GIB, "usage_in_bytes": 2 * GIB, "stat": stat})
    assert available_bytes() == 3 * GIB
    group(system, "memory", {"usage_in_bytes": 6 * GIB})
    assert available_bytes() == 0


def test_this_system_says_what_is_available() -> None:
    assert available_bytes()
