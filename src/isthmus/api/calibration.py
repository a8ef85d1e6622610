"""A run's fleet, as the run's first steps showed it."""

from __future__ import annotations

from isthmus.fleet import Fleet
from isthmus.units import format_compute


def fitted_text(fleet: Fleet) -> str:
    """Stated speed x factor of each device."""
    other = [d for d in fleet.devices if d.scale != 1]
    text = ", ".join(f"{d.name} computes at {format_compute(d.flops_per_s)} x {d.scale:.3g}" for d in other)
    return text or "all devices compute as stated"
