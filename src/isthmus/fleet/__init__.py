"""Where a model can be trained: devices, the links between them, and the built-in topologies."""

from isthmus.fleet.changes import Change, changed, corrected, in_half, with_memory
from isthmus.fleet.fleet import Device, Fleet, Measurement
from isthmus.fleet.links import Link, Links, LinkTrace, Route, Site
from isthmus.fleet.toml import dump_fleet, load_fleet, parse_fleet
from isthmus.fleet.topologies import RANDOM, describe, resolve_fleet, topology, topology_names

__all__ = [
    "RANDOM",
    "Change",
    "Device",
    "Fleet",
    "Link",
    "LinkTrace",
    "Links",
    "Measurement",
    "Route",
    "Site",
    "changed",
    "corrected",
    "describe",
    "dump_fleet",
    "in_half",
    "load_fleet",
    "parse_fleet",
    "resolve_fleet",
    "topology",
    "topology_names",
    "with_memory",
]
