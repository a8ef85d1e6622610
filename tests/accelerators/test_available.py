"""Accelerators are found by name, and one that is not here is refused in a line that says which are."""

import pytest
import torch

from isthmus.accelerators import HOST, accelerator_names, open_accelerator
from isthmus.errors import UserError


def test_auto_is_the_first_accelerator_or_the_cpu() -> None:
    here = accelerator_names()
    expected = torch.device(here[0]) if here else HOST.device
    assert open_accelerator("auto").device == expected
    assert open_accelerator("cpu") is HOST


@pytest.mark.parametrize("name", ["cuda:99", "tpu", "cuda:x", "cpu:1", "", "cuda:-1", "checked:", "checked:\u0663"])
def test_what_is_not_here_is_refused_by_name(name: str) -> None:
    with pytest.raises(UserError, match=r"^runtime.device: got ") as caught:
        open_accelerator(name, "runtime.device")
    assert repr(name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_hosts_memory_is_that_of_the_machine() -> None:
    memory = HOST.memory()
    assert 0 < memory.allocated <= memory.peak_reserved <= memory.total
    assert 0 < memory.free <= memory.total


def test_seeded_draws_repeat_and_leave_the_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with HOST.seeded(7):
        first = torch.rand(4)
    assert torch.equal(torch.rand(4), expected)
    with HOST.seeded(7):
        assert torch.equal(torch.rand(4), first)
