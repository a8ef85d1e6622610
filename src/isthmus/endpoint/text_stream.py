"""The text of an answer as it comes, ended at a stop string."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from isthmus.api.generation import Piece
from isthmus.endpoint.documents import Finish


class TextPiece(NamedTuple):
    """The text that one token adds."""

    text: str
    finish: Finish | None  # why the answer ends with it; None where it goes on


async def text_stream(
    pieces: AsyncGenerator[Piece], stops: Sequence[str], ends: Sequence[int]
) -> AsyncGenerator[TextPiece]:
    """`ends` are the tokens with which the model ends a text. What may be the beginning of a stop string waits."""
    held, waits = "", max((len(stop) - 1 for stop in stops), default=0)
    async with aclosing(pieces):  # an answer that is not read to its end is cancelled
        async for piece in pieces:
            held += piece.text
            at = min((found for stop in stops if (found := held.find(stop)) >= 0), default=-1)
            if at >= 0:
                yield TextPiece(held[:at], "stop")
                return
            if piece.last:
                yield TextPiece(held, "stop" if piece.token in ends else "length")
                return
            ready, held = held[: max(0, len(held) - waits)], held[max(0, len(held) - waits) :]
            yield TextPiece(ready, None)
