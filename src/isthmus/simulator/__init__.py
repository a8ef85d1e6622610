"""Runs a plan on a virtual clock and modelled links, with the same machines as the runtime."""

from isthmus.simulator.options import Fault, Overheads, RecoveryTimes, SimulationOptions
from isthmus.simulator.parties import Transmission, Uplink, Wire
from isthmus.simulator.run import SimulatedRun, simulate, simulate_run

__all__ = [
    "Fault",
    "Overheads",
    "RecoveryTimes",
    "SimulatedRun",
    "SimulationOptions",
    "Transmission",
    "Uplink",
    "Wire",
    "simulate",
    "simulate_run",
]
