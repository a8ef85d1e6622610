"""Which packages users may import from: what `__all__` of one has is documented, and changes with a note."""

PUBLIC_PACKAGES = (
    "isthmus",
    "isthmus.accelerators",
    "isthmus.accelerators.checked",
    "isthmus.cost",
    "isthmus.data",
    "isthmus.errors",
    "isthmus.federated",
    "isthmus.federated.algorithms",
    "isthmus.fleet",
    "isthmus.graph",
    "isthmus.job",
    "isthmus.models",
    "isthmus.planners",
    "isthmus.plans",
    "isthmus.report",
    "isthmus.simulator",
    "isthmus.sync",
    "isthmus.trace",
    "isthmus.training.compression",
)
