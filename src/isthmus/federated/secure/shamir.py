"""Shamir's secret sharing (1979) over the field of 2^255 - 19: any `threshold` shares give the secret back, fewer tell
nothing of it.

    share of holder x = f(x),  f(0) = the secret,  f a polynomial of degree threshold - 1 with random coefficients

Computing times depend on the numbers: a owner's own machine is trusted, as is the one that recovers a secret.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from isthmus.errors import PeerError

PRIME = 2**255 - 19
SECRET_BYTES = 32

Draw = Callable[[int], bytes]  # so many random bytes


def draw_secret(draw: Draw) -> bytes:
    """A uniform element of the field."""
    return _bytes(_element(draw))


def deal(secret: bytes, holders: int, threshold: int, draw: Draw) -> list[bytes]:
    """A share for each of the holders number 1, 2, and so on. The secret is an element of the field."""
    coefficients = [_number(secret), *(_element(draw) for _ in range(threshold - 1))]
    return [_bytes(_evaluated(coefficients, holder)) for holder in range(1, holders + 1)]


def recover(shares: Mapping[int, bytes]) -> bytes:
    """The secret of `threshold` shares, by holder's number. PeerError for a share that is none."""
    return share_of(0, shares)


def share_of(holder: int, shares: Mapping[int, bytes]) -> bytes:
    """Return that holder's share, of `threshold` others, by number; of 0 the secret."""
    factors = _factors([*shares], holder)
    return _bytes(sum(_number(share) * factor for share, factor in zip(shares.values(), factors, strict=True)))


def is_share(element: bytes) -> bool:
    return len(element) == SECRET_BYTES and int.from_bytes(element, "little") < PRIME


def _factors(holders: Sequence[int], at: int) -> list[int]:
    """Lagrange's, at a number."""
    found: list[int] = []
    for holder in holders:
        above = below = 1
        for other in holders:
            if other != holder:
                above, below = above * (other - at) % PRIME, below * (other - holder) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return found


def _evaluated(coefficients: Sequence[int], at: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * at + coefficient) % PRIME
    return value


def _element(draw: Draw) -> int:
    while (number := int.from_bytes(draw(SECRET_BYTES), "little") & (2**255 - 1)) >= PRIME:
        pass  # 19 of 2^255 numbers are none
    return number


def _number(element: bytes) -> int:
    if not is_share(element):
        raise PeerError("a share that is no number of the field")
    return int.from_bytes(element, "little")


def _bytes(number: int) -> bytes:
    return (number % PRIME).to_bytes(SECRET_BYTES, "little")
