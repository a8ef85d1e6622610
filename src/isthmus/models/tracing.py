"""Keep Hugging Face models on their eager path while they are captured."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Generator
from unittest import mock

MASKS = "transformers.masking_utils"


@contextlib.contextmanager
def as_eager(columns: Collection[str]) -> Generator[None]:
    """While active, attention masks are decided as in an eager forward.

    Under export the library builds a mask that eager leaves to the attention kernel (`is_causal`), since an export
    may later see other lengths or packed sequences. A captured graph never does: lengths are fixed, and sequences
    are packed only when the data has `position_ids`. Without this, other kernels run and the bits differ.
    """
    masks = sys.modules.get(MASKS)
    if masks is None or "position_ids" in columns:
        yield
        return
    with (
        mock.patch.object(masks, "find_packed_sequence_indices", lambda *_, **__: None),
        mock.patch.object(masks, "is_torchdynamo_exporting", lambda: False),
    ):
        yield
