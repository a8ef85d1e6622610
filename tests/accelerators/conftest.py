"""Where there is hardware its tests come first: a process that has opened the emulated accelerator finds no other."""

import pytest

from isthmus.accelerators import accelerator_names


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if accelerator_names():
        items.sort(key=_emulated)


def _emulated(item: pytest.Item) -> bool:
    return "checked" in item.nodeid or "emulated" in getattr(item, "fixturenames", ())
