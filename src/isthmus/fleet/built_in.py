"""The built-in fleets: a TOML file each, in `builtin/`, or drawn from a seed, where a paper states a range and no
table.

A new fleet is a new file there.

The same name gives the same fleet on every machine: only `random.Random` is used, whose sequence is fixed.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import resources
from typing import NamedTuple

from isthmus.errors import UserError, unknown_name
from isthmus.fleet.fleet import Device, Fleet
from isthmus.fleet.links import Link, Links, Route
from isthmus.fleet.toml import load_fleet, parse_fleet

MBIT = 1e6 / 8
GBIT = 1e9 / 8
GB = 10**9
MOST_REGIONS = 64
"""Regions of a random fleet; links are stated by regions, so that 10,000 devices need no table of 100 million links."""
MOST_DEVICES = 100_000
FASTEST_FLOPS_PER_S = 1e15
EARTH_RADIUS_M = 6.371e6
FIBRE_M_PER_S = 2e8
DETOUR = 1.6  # length of a cable over the great circle's, about


class _Machine(NamedTuple):
    """A host with several GPUs."""

    hardware: str
    gpus: int
    flops_per_s: float
    memory_bytes: int


RTX_4090 = _Machine("NVIDIA RTX 4090", 8, 165.16e12, 24 * GB)
RTX_2080 = _Machine("NVIDIA RTX 2080", 4, 40.3e12, 8 * GB)
P100_FLOPS_PER_S, P100_BYTES = 9.3e12, 16 * GB
SLOWEST = 7.0


def fusionllm_testbed(number: int) -> Fleet:
    """Testbed 1 or 2 of FusionLLM (section 7.1, table 5): 1 x 8 RTX 4090 and 4 x 4 RTX 2080, or twice as many machines.

    The paper draws its links as a picture and states 8 Mbit/s to 10 Gbit/s: here each pair of machines gets a bandwidth
    drawn evenly in its logarithm from that range, and 1 to 50 ms. Inside a machine it is 10 Gbit/s (they do not use
    NCCL). Speeds are FP16 tensor peaks, as in their table 1.
    """
    machines = [RTX_4090] * number + [RTX_2080] * (4 * number)
    source = random.Random(f"fusionllm-testbed{number}")
    names = [f"node-{i + 1}" for i in range(len(machines))]
    routes: list[Route] = []
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            link = Link(_log_uniform(source, 1e-3, 50e-3), _log_uniform(source, 8 * MBIT, 10 * GBIT))
            routes += [Route(a, b, link), Route(b, a, link)]
    return Fleet(
        name=f"fusionllm-testbed{number}",
        devices=tuple(
            Device(
                name=f"{name}-gpu-{i}",
                region=name,
                flops_per_s=m.flops_per_s,
                memory_bytes=m.memory_bytes,
                hardware=m.hardware,
            )
            for name, m in zip(names, machines, strict=True)
            for i in range(m.gpus)
        ),
        links=Links(intra=Link(0.1e-3, 10 * GBIT), regions=tuple(routes)),
        description=f"FusionLLM testbed {number}: {24 * number} GPUs, links drawn from 8 Mbit/s to 10 Gbit/s",
    )


def sky(nodes: int) -> Fleet:
    """Sky Computing's cluster of P100 (section V): one node is the server, the others are slowed down by 1..7.

    The slow-downs are drawn normally within 1..7, as the paper says; s makes a pass that took t last (1 + s) t. The
    paper does not state its network: 10 Gbit/s and 0.1 ms here.
    """
    source = random.Random(f"sky-{nodes}")
    return Fleet(
        name=f"sky-{nodes}",
        devices=tuple(
            Device(
                name=f"node-{i}",
                region="cluster",
                hardware="NVIDIA P100",
                memory_bytes=P100_BYTES,
                flops_per_s=P100_FLOPS_PER_S / (1 + _slow_down(source)),
            )
            for i in range(1, nodes)
        ),
        links=Links(intra=Link(0.1e-3, 10 * GBIT)),
        description=f"Sky Computing: {nodes} nodes less the server, P100 with slow-downs normal in 1..7 (drawn)",
    )


def random_fleet(count: int, seed: int) -> Fleet:
    """`count` devices in regions on a globe: latency by great circle, heavy-tailed speeds and bandwidths.

    Raises `UserError` for less than one device or too many.
    """
    if not 1 <= count <= MOST_DEVICES:
        raise UserError(f"random fleet: got {count} devices, expected 1 to {MOST_DEVICES}")
    source = random.Random(f"random:{count}:{seed}")
    regions = [f"region-{i}" for i in range(min(MOST_REGIONS, max(1, round(math.sqrt(count)))))]
    places = [_point(source) for _ in regions]
    return Fleet(
        name=f"random:{count}:{seed}",
        devices=tuple(
            # No region stays empty: each has one device before any has two.
            _random_device(source, f"device-{i}", regions[i] if i < len(regions) else source.choice(regions))
            for i in range(count)
        ),
        links=Links(regions=tuple(_routes(source, regions, places))),
        description=f"{count} devices in {len(regions)} regions of a globe, drawn from seed {seed}",
    )


def _random_device(source: random.Random, name: str, region: str) -> Device:
    return Device(
        name=name,
        region=region,
        hardware="GPU",
        flops_per_s=min(FASTEST_FLOPS_PER_S, 4e12 * source.paretovariate(1.2)),
        memory_bytes=source.choice((8, 12, 16, 24, 48, 80)) * GB,
        price_per_hour=round(source.lognormvariate(-1.0, 0.6), 3),
    )


def _routes(source: random.Random, regions: Sequence[str], places: Sequence[tuple[float, float, float]]) -> list[Route]:
    found: list[Route] = []
    for a, here in zip(regions, places, strict=True):
        for b, there in zip(regions, places, strict=True):
            if a == b:
                found.append(Route(a, a, Link(0.2e-3, source.choice((1, 10, 25)) * GBIT)))
                continue
            angle = math.acos(max(-1.0, min(1.0, sum(x * y for x, y in zip(here, there, strict=True)))))
            latency_s = 1e-3 + DETOUR * EARTH_RADIUS_M * angle / FIBRE_M_PER_S
            found.append(Route(a, b, Link(latency_s, min(10 * GBIT, 30 * MBIT * source.paretovariate(0.8)))))
    return found


def _point(source: random.Random) -> tuple[float, float, float]:
    """Evenly on the unit sphere."""
    height, turn = source.uniform(-1, 1), source.uniform(0, 2 * math.pi)
    radius = math.sqrt(1 - height * height)
    return radius * math.cos(turn), radius * math.sin(turn), height


def _log_uniform(source: random.Random, low: float, high: float) -> float:
    return math.exp(source.uniform(math.log(low), math.log(high)))


def _slow_down(source: random.Random) -> float:
    while not 1 <= (drawn := source.gauss((1 + SLOWEST) / 2, 1.5)) <= SLOWEST:
        pass
    return drawn


_FOLDER = resources.files("isthmus.fleet").joinpath("builtin")
_DRAWN: Mapping[str, Callable[[], Fleet]] = {
    **{f"fusionllm-testbed{n}": partial(fusionllm_testbed, n) for n in (1, 2)},
    **{f"sky-{n}": partial(sky, n) for n in (16, 32, 64)},
}
RANDOM = "random:N:seed"  # how a random fleet is asked for: `random:100:7` has 100 devices, drawn from seed 7
_RANDOM = re.compile(r"random:([0-9]{1,9}):([0-9]{1,18})")


@cache
def built_in_fleet(name: str) -> Fleet:
    """The built-in fleet called `name`, or a random one. Raises `UserError` with the nearest name."""
    if (asked := _RANDOM.fullmatch(name)) is not None:
        return random_fleet(int(asked[1]), int(asked[2]))
    if name in _DRAWN:
        return _DRAWN[name]()
    if name not in built_in_names():
        raise _unknown(name)
    return parse_fleet((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"), f"{name}.toml")


def _unknown(name: str) -> UserError:
    return unknown_name("fleet", name, [*built_in_names(), RANDOM])


@cache
def built_in_names() -> tuple[str, ...]:
    """The names of the built-in fleets, sorted. Random ones have names of the form `random:N:seed` besides."""
    files = (file.name.removesuffix(".toml") for file in _FOLDER.iterdir() if file.name.endswith(".toml"))
    return tuple(sorted([*files, *_DRAWN]))


def describe(name: str) -> str:
    """One line on what the built-in fleet called `name` is. Raises `UserError` with the nearest name."""
    if name == RANDOM:
        return f"N devices, at most {MOST_DEVICES:,}, drawn from the seed: regions on a globe, heavy-tailed speeds"
    return built_in_fleet(name).description


def resolve_fleet(name_or_path: str) -> Fleet:
    """The fleet of a path that ends in ".toml", else the built-in one of that name. Raises `UserError`."""
    if name_or_path.endswith(".toml"):
        return load_fleet(name_or_path)
    if _RANDOM.fullmatch(name_or_path) is None and name_or_path not in built_in_names():
        raise UserError(f"{_unknown(name_or_path)}; or the path of a file that ends in .toml")
    return built_in_fleet(name_or_path)
