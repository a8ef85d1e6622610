"""Weight gradients apart from input gradients: the bits of a whole backward, and what is kept in between."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from in_process import Pipeline, batches, capture_of, copies, random_cut, weights_of
from zoo import CASES, MODELS, model

from isthmus.graph.captured import Captured
from isthmus.training.engine import EngineConfig

CONFIG = EngineConfig(micro_batches=3, micro_batch_size=2)


@functools.cache
def captured(name: str) -> Captured:
    build, columns = model(name)
    return capture_of(build, columns)


@pytest.mark.parametrize("name", [*MODELS, *CASES])
def test_the_bits_are_those_of_a_whole_backward(name: str) -> None:
    """Loss, gradients, buffers and a second step, with weight gradients as late as can be."""
    build, columns = model(name)
    data = [batches(columns, CONFIG.micro_batches, CONFIG.micro_batch_size, seed) for seed in range(2)]
    for cut in ([], random_cut(captured(name), random.Random(name))):
        whole, split = (
            Pipeline(captured(name), cut, weights_of(build, captured(name)), CONFIG, split=apart)
            for apart in (False, True)
        )
        for number, batch in enumerate(data):
            loss, expected = whole.step(number, copies(batch))
            found, gradients = split.step(number, copies(batch))
            assert found == loss
            assert gradients.keys() == expected.keys()
            for key, value in expected.items():
                assert torch.equal(gradients[key], value), key
                assert gradients[key].stride() == value.stride(), key
        before = whole.state()
        assert all(torch.equal(value, before[key]) for key, value in split.state().items())
