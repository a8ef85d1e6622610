"""Bubble filling: averaging layers a second time where the channel would idle (DreamDDP, section 3.4)."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.planners.sync.timeline import ROUNDING, Timeline, iteration_s


def fill_bubbles(line: Timeline, chosen: Sequence[int], *, past_gaps: bool, spare_s: float = 0.0) -> tuple[int, ...]:
    """Layers beside `chosen` that an iteration can average without becoming longer, in backward order.

    The paper takes the latest layers {L, ..., l} (Eq. 12, here under the serial channel) and stops at the first that
    does not fit or is in the set. With `past_gaps` later ones are tried too: an output layer as large as all others
    together would else keep everything behind it from being filled. What follows a filling must be through `spare_s`
    before the iteration's end.
    """
    limit_s = iteration_s(line, chosen) * (1 + ROUNDING) - spare_s
    scheduled = frozenset(chosen)
    last = max((layer for layer in scheduled if line.average_s[layer] > 0), default=-1)
    to_come_s = sum(float(line.average_s[layer]) for layer in scheduled)
    channel_s = 0.0
    filled: list[int] = []
    for layer, (ready_s, average_s) in enumerate(zip(line.ready_s.tolist(), line.average_s.tolist(), strict=True)):
        through_s = max(channel_s, ready_s) + average_s
        if layer in scheduled:
            if not past_gaps:
                break
            if average_s > 0:
                to_come_s -= average_s
                channel_s = through_s
        elif average_s > 0:
            if through_s + to_come_s + float(line.tail_s[max(layer, last)]) <= limit_s:
                filled.append(layer)
                channel_s = through_s
            elif not past_gaps:
                break
    return tuple(filled)
