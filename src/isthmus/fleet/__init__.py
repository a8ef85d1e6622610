"""Where a model can be trained: devices, the links between them, and the built-in fleets."""

from isthmus.fleet.built_in import RANDOM, built_in_fleet, built_in_names, describe, resolve_fleet
from isthmus.fleet.fleet import Device, Fleet, FleetChange, Measurement, changed, corrected, in_half, with_memory
from isthmus.fleet.links import Link, Links, LinkTrace, Region, Route
from isthmus.fleet.toml import dump_fleet, load_fleet, parse_fleet

__all__ = [
    "RANDOM",
    "Device",
    "Fleet",
    "FleetChange",
    "Link",
    "LinkTrace",
    "Links",
    "Measurement",
    "Region",
    "Route",
    "built_in_fleet",
    "built_in_names",
    "changed",
    "corrected",
    "describe",
    "dump_fleet",
    "in_half",
    "load_fleet",
    "parse_fleet",
    "resolve_fleet",
    "with_memory",
]
