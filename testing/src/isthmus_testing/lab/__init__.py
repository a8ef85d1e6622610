"""A wide-area network on one machine, in network namespaces (lab.py), and NATs of homes in it (nat.py)."""

from isthmus_testing.lab.lab import COORDINATOR, Lab, LabStatistics, lab_unavailable, measure
from isthmus_testing.lab.nat import KINDS, Home, Kind, inside, nat_unavailable

__all__ = [
    "COORDINATOR",
    "KINDS",
    "Home",
    "Kind",
    "Lab",
    "LabStatistics",
    "inside",
    "lab_unavailable",
    "measure",
    "nat_unavailable",
]
