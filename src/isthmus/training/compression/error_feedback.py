"""Error feedback: the error of a lossy codec is added to the next tensor of the same kind (Seide et al., Interspeech
2014), or of the same sample where gradients cross an edge.

Sound where tensors under one key are summands of one sum: the deltas of a replica's parameters, or the gradients of the
same samples. Activations are not, nor are gradients of different samples: an error of one would be added to another's.

A gradient on its way back is multiplied by what its own sample made of the parameters before the cut. What was left out
of it belongs to this sample alone: it waits until the sample comes again, whatever micro-batch it comes in.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from isthmus.errors import UserError
from isthmus.training.compression.codec import Codec, DeltaCodec


class ErrorFeedback:
    """A codec with a memory: for every key, the sum of what was decoded follows the sum of what was encoded.

    One tensor of the same size is kept for each key. Not to be called from several threads at once.
    """

    def __init__(self, codec: DeltaCodec, decay: float = 1.0) -> None:
        """`decay` is the share of an error that is kept: SparseLoCo's 0.95 for its momentum. UserError outside 0..1."""
        if not 0 <= decay <= 1:
            raise UserError(f"error feedback: decay: got {decay}, expected 0 to 1")
        self.codec = codec
        self._decay = decay
        self._errors: dict[Hashable, Tensor] = {}

    def encode(self, key: Hashable, tensor: Tensor, name: str = "tensor") -> Tensor:
        """The payload of the tensor and of what earlier payloads under the key left out.

        Raises what the codec raises, and UserError where the tensor has another shape than the one before; then nothing
        is remembered.
        """
        whole = tensor.detach()
        if (error := self._errors.get(key)) is not None:
            if error.shape != whole.shape:
                raise UserError(
                    f"error feedback of {name!r}: got shape {tuple(whole.shape)}, before {tuple(error.shape)}"
                )
            whole = whole + error.to(whole.dtype)
        payload = self.codec.encode(whole, name)
        decoded = self.codec.decode(payload, whole.shape, whole.dtype, name)
        self._errors[key] = torch.sub(whole, decoded).mul_(self._decay)
        return payload

    def state(self) -> dict[Hashable, Tensor]:
        """The errors by key, to be saved with a checkpoint."""
        return dict(self._errors)

    def load(self, state: dict[Hashable, Tensor]) -> None:
        self._errors = dict(state)


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
