"""Error feedback for the gradients that cross an edge, sample by sample (Seide et al., Interspeech 2014).

A gradient on its way back is multiplied by what its own sample made of the parameters before the cut. What was left out
of it belongs to this sample alone: it waits until the sample comes again, whatever micro-batch it comes in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isthmus.training.compression.codec import Codec


class SampleFeedback:
    """The error feedback of one edge: the values that compression left out, by value and sample. Not safe for several
    threads.

    For every sample the sum of what was decoded follows the sum of its gradients. It keeps one gradient for each sample
    that was seen, in the gradient's own type, and the scale that it was computed with.
    """

    def __init__(self) -> None:
        self._errors: dict[tuple[str, int], tuple[Tensor, float]] = {}

    @property
    def size_bytes(self) -> int:
        return sum(error.nbytes for error, _ in self._errors.values())

    def encode(self, codec: Codec, samples: Sequence[int], gradient: Tensor, name: str, scale: float = 1.0) -> Tensor:
        """The payload of a gradient and of what earlier payloads left out of these samples'.

        `gradient` [len(samples), ...] is contiguous and stays as it is; it is `scale` times too large. Raises what the
        codec raises.
        """
        whole, limits = gradient.clone(), torch.finfo(gradient.dtype)
        for row, sample in zip(whole, samples, strict=True):
            kept = self._errors.pop((name, sample), None)
            if kept is not None:
                error, before = kept
                row.add_(error, alpha=scale / before).clamp_(limits.min, limits.max)
        payload = codec.encode(whole, name)
        left = whole - codec.decode(payload, whole.shape, whole.dtype, name)
        for row, sample in zip(left, samples, strict=True):
            # Twice in one micro-batch, where a pass ends and the next begins: the second row met no error above.
            twice = self._errors.get((name, sample))
            self._errors[name, sample] = row.clone() if twice is None else twice[0] + row, scale
        return payload
