"""Where simulated clients train: which executors, and what a Ray cluster reserves for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from isthmus.accelerators import AUTO
from isthmus.errors import unknown_name


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """The differences between schemes; everything else is the same code."""

    description: str
    processes: bool = True  # whether executors are processes of their own
    per: str = "given"  # how many executors: as `given`, or one per client of the `cohort` or of the `population`
    planner: str = "certified"
    warm_up_rounds: int = 0
    steals: bool = False
    single: bool = False


_SCHEMES: Mapping[str, Scheme] = {
    "sp": Scheme(description="everything in one process", processes=False, planner="uniform"),
    "rw": Scheme(description="one process per client of the population", per="population"),
    "sd": Scheme(description="one process per client of the cohort", per="cohort", planner="uniform"),
    "fa": Scheme(description="one client at a time per executor, its result back at once", single=True),
    "parrot": Scheme(
        description="clients in turn by fitted times, sums on the executor", planner="parrot", warm_up_rounds=1
    ),
    "ours": Scheme(description="certified schedules, and idle executors take clients of others", steals=True),
}


def scheme(name: str) -> Scheme:
    """Raises UserError for an unknown name."""
    if name not in _SCHEMES:
        raise unknown_name("scheme", name, _SCHEMES)
    return _SCHEMES[name]


Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]


class RayRuntime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Ray cluster of `backend = "ray"`, and what each executor reserves there."""

    address: str = ""
    """HOST:PORT of the cluster's head; by default RAY_ADDRESS, or else the cluster that was started on this machine."""
    cpus: Annotated[float, Meta(gt=0)] = 1.0  # CPUs that Ray reserves for each executor.
    gpus: Annotated[float, Meta(ge=0)] = 0.0
    """GPUs, or the share of one, that Ray reserves for each executor; it sees no others."""


class FederatedRuntime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where clients train."""

    scheme: str = "ours"  # How clients come to executors: ours, parrot, fa, sd, rw or sp.
    backend: Literal["processes", "ray"] = "processes"
    """Where `isthmus train` starts executors: as processes of this machine, or on a Ray cluster."""
    ray: RayRuntime = RayRuntime()  # Options of Ray.
    executors: NotNegative = 2
    """0: as many as memory and cores hold, and as train faster together, by measurement at the start of the run; on a
    Ray cluster as many as it has room for."""
    device: str | Annotated[tuple[str, ...], Meta(min_length=1)] = AUTO
    """Where executors train: `auto` (an accelerator of this machine, else the CPU), `cpu`, `cuda:1`, ... Of several,
    executor number k has number k modulo their count: `["cuda:0", "cuda:1"]`."""
    planner: str = ""  # In place of the scheme's.
    steals: bool | None = None  # In place of the scheme's.
    window_rounds: NotNegative = 5  # Times of so many rounds are fitted (Parrot's time window); 0: of all.
    slow_down: tuple[Annotated[float, Meta(ge=0)], ...] = ()
    """Emulation: eta of each executor, which sleeps eta T after training for T."""
    unstable: bool = False  # Emulation: speeds that change from round to round.
    noise: Annotated[float, Meta(ge=0, le=2)] = 0.0
    """Emulation: sigma of a log-normal factor of mean 1 in every client's time."""
    clients_per_vmap: NotNegative = 1
    """Clients of equal numbers of samples that are trained as one; 0: as many as a measurement finds best."""
    threads: Positive = 1  # Torch threads of each executor.
    timeout: str = "60 s"  # Silence after which an executor counts as lost.
