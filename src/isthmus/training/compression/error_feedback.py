"""What a lossy codec left out is added to the next tensor of the same kind (Seide et al., Interspeech 2014).

Sound where tensors under one key are summands of one sum: the deltas of a replica's parameters, or the gradients of the
same samples. Activations are not, nor are gradients of different samples: an error of one would be added to another's.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from isthmus.errors import UserError
from isthmus.training.compression.codec import DeltaCodec


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
