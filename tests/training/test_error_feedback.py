"""Error feedback: what is left out of one payload is in a later one."""

from __future__ import annotations

import math

import pytest
import torch
from codec_cases import LOSSY

from isthmus.errors import UserError
from isthmus.training.compression import Codec, ErrorFeedback, NoCodec, SampleFeedback, Sparse2Bit, TopK


@pytest.mark.parametrize("codec", LOSSY, ids=str)
def test_the_sums_differ_by_the_last_error(codec: Codec) -> None:
    feedback, generator = ErrorFeedback(codec), torch.Generator().manual_seed(1)
    given, got = torch.zeros(3, 500), torch.zeros(3, 500)
    for _ in range(20):
        x = torch.randn(3, 500, generator=generator)
        given += x
        got += codec.decode(feedback.encode("layer", x), x.shape, x.dtype)
    assert torch.allclose(given - got, feedback.state()["layer"], atol=1e-4)


def test_a_constant_arrives_in_full() -> None:
    codec, x = TopK(50.0), torch.linspace(0.1, 1, 1000)
    feedback = ErrorFeedback(codec)
    got = sum((codec.decode(feedback.encode(0, x), x.shape, x.dtype) for _ in range(2000)), torch.zeros(1000))
    assert torch.allclose(got / 2000, x, atol=0.05)
    without = codec.decode(codec.encode(x), x.shape, x.dtype)
    assert int((without == 0).sum()) == 980  # which no number of payloads would bring


def test_keys_are_apart_and_decay_forgets() -> None:
    codec, x = TopK(4.0), torch.tensor([4.0, 3.0, 2.0, 1.0])
    feedback = ErrorFeedback(codec, decay=0.5)
    feedback.encode("a", x)
    assert feedback.state()["a"].tolist() == [0.0, 1.5, 1.0, 0.5]
    again = codec.decode(feedback.encode("a", x), x.shape, x.dtype)
    assert again.tolist() == [0.0, 4.5, 0.0, 0.0]
    assert codec.decode(feedback.encode("b", x), x.shape, x.dtype).tolist() == [4.0, 0.0, 0.0, 0.0]


def test_state_goes_on_where_it_was_saved() -> None:
    x = torch.randn(9000, generator=torch.Generator().manual_seed(2))
    one, other = ErrorFeedback(Sparse2Bit()), ErrorFeedback(Sparse2Bit())
    one.encode("a", x)
    other.load(one.state())
    assert torch.equal(one.encode("a", x), other.encode("a", x))


def test_bad_use_is_refused_and_remembers_nothing() -> None:
    feedback = ErrorFeedback(NoCodec())
    feedback.encode("a", torch.ones(3))
    with pytest.raises(UserError, match=r"error feedback of 'w': got shape \(4,\), before \(3,\)"):
        feedback.encode("a", torch.ones(4), "w")
    lossy = ErrorFeedback(TopK(2.0))
    with pytest.raises(UserError, match="topk of 'w': got NaN or Inf"):
        lossy.encode("a", torch.tensor([math.nan, 1.0]), "w")
    assert lossy.state() == {}
    for decay in (-0.1, 1.1, math.nan):
        with pytest.raises(UserError, match="decay: got"):
            ErrorFeedback(NoCodec(), decay)


class TestSamples:
    """Gradients of micro-batches that are made of other samples in each pass."""

    @pytest.mark.parametrize("codec", LOSSY, ids=str)
    def test_each_samples_sums_differ_by_its_last_error(self, codec: Codec) -> None:
        feedback, generator = SampleFeedback(), torch.Generator().manual_seed(1)
        given, got = torch.zeros(8, 2, 50), torch.zeros(8, 2, 50)
        left = torch.zeros(8, 2, 50)
        for _ in range(5):
            for samples in torch.randperm(8, generator=generator).view(2, 4).tolist():
                x = torch.randn(4, 2, 50, generator=generator)
                whole = x + left[samples]
                decoded = codec.decode(feedback.encode(codec, samples, x, "g"), x.shape, x.dtype)
                left[samples] = whole - decoded
                given[samples] += x
                got[samples] += decoded
        assert torch.allclose(given - got, left, atol=1e-4)
        assert feedback.size_bytes == left.nbytes

    def test_a_sample_that_comes_twice_in_a_micro_batch_is_told_once(self) -> None:
        codec, feedback = TopK(2.0), SampleFeedback()
        feedback.encode(codec, [0, 1], torch.tensor([[1.0], [2.0]]), "g")  # leaves 1 of sample 0
        twice = feedback.encode(codec, [0, 0], torch.tensor([[4.0], [3.0]]), "g")
        assert codec.decode(twice, (2, 1), torch.float32).tolist() == [[5.0], [0.0]]
        once = feedback.encode(codec, [0, 1], torch.tensor([[1.0], [2.0]]), "g")
        assert codec.decode(once, (2, 1), torch.float32).tolist() == [[4.0], [0.0]]

    def test_values_are_apart(self) -> None:
        codec, feedback = TopK(2.0), SampleFeedback()
        feedback.encode(codec, [0, 1], torch.tensor([[1.0], [2.0]]), "a")
        other = feedback.encode(codec, [0, 1], torch.tensor([[1.5], [1.0]]), "b")
        assert codec.decode(other, (2, 1), torch.float32).tolist() == [[1.5], [0.0]]

    def test_what_was_left_out_grows_and_shrinks_with_the_loss_scale(self) -> None:
        codec, alike, scaled = TopK(2.0), SampleFeedback(), SampleFeedback()
        generator = torch.Generator().manual_seed(2)
        for scale in (2.0**16, 2.0**15, 2.0**15, 2.0**17, 1.0):
            x = torch.randn(4, 6, generator=generator)
            expected = alike.encode(codec, [0, 1, 2, 3], x, "g")
            payload = scaled.encode(codec, [0, 1, 2, 3], x * scale, "g", scale)
            got = codec.decode(payload, x.shape, x.dtype)
            assert torch.equal(got / scale, codec.decode(expected, x.shape, x.dtype))

    def test_a_sum_beyond_float16_is_its_largest_number(self) -> None:
        codec, feedback = TopK(2.0), SampleFeedback()
        feedback.encode(codec, [0, 1], torch.tensor([[4e4], [5e4]]).half(), "g")  # leaves 4e4 of sample 0
        payload = feedback.encode(codec, [0, 1], torch.tensor([[4e4], [5e4]]).half(), "g")
        assert codec.decode(payload, (2, 1), torch.float16).tolist() == [[65504.0], [0.0]]
