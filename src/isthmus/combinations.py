"""Capabilities that do not go together, and why: every refusal of a combination is made from this table.

A combination is of a capability with a program, a way to run, or another capability, each of which can be had by
itself. docs/together.md is made from it, with a test for each combination that runs. Not here: an option that needs
another one, one thing that is said twice, numbers that do not fit, and what a model or a data set cannot do.
"""

from __future__ import annotations

from typing import NamedTuple

from isthmus.errors import UserError

__all__ = ["REFUSALS", "WITH", "Refusal", "refused"]


class Refusal(NamedTuple):
    """`what` is refused beside something."""

    what: str
    beside: str
    """A key of `WITH`."""
    field: str
    """The key of a job or the option that is named."""
    expected: str
    reason: str
    built: bool = True
    """False: it could run, and nobody has built it yet. True: `reason` stays."""


WITH = {
    "decoupled": "with sync.mode 'decoupled'",
    "joined replicas": "with sync.mode 'decoupled' on devices that join",
    "delayed": "with schedule 'delayed'",
    "deterministic": "with runtime.deterministic",
    "activation noise": "with privacy.activations",
    "own data": "with plan.holders_data 'own'",
    "real devices": "with runtime.emulate = false",
    "federated": "in a federated job",
    "a federated job": "a federated job",
    "pipeline": "in a job without a table [federated]",
    "sweep": "in a sweep",
    "client states": "with an algorithm whose clients keep states",
}
"""The words of a sentence, by name."""

NOT_BUILT = "not built yet"

_DECOUPLED = [
    Refusal("bf16, fp16", "decoupled", "training.precision", "'fp32'", "a replica trains in float32", built=False),
    Refusal("skipped steps", "decoupled", "training.non_finite", "'stop'", "a replica leaves no step out", built=False),
    Refusal("data holders", "decoupled", "plan.data_holder", "none", "each replica reads all of the data", built=False),
    Refusal(
        "compression",
        "decoupled",
        "compression",
        "none, or sync.decoupled.codec",
        "it packs messages between stages, and each replica has one stage",
    ),
    Refusal("JAX", "decoupled", "runtime.engine", "'torch'", "a replica of one device computes by torch", built=False),
    Refusal("compile", "decoupled", "runtime.compile", "false", "a replica's step is not compiled", built=False),
    Refusal("changes", "decoupled", "runtime.changes", "none", "the emulated speed of a replica is fixed", built=False),
    Refusal("a plan document", "decoupled", "--plan", "none", "a document is one plan, and each replica has its own"),
    Refusal(
        "options of a simulation",
        "decoupled",
        "simulate",
        "none",
        "each replica has a plan and a step of its own",
        built=False,
    ),
    Refusal("one plan", "decoupled", "plan", "`isthmus plan JOB.toml` alone", "each replica is planned by itself"),
    Refusal(
        "pipelines",
        "joined replicas",
        "sync.decoupled.replicas",
        "'devices', or `isthmus train`",
        "each device trains alone",
        built=False,
    ),
    Refusal(
        "several ranks, JAX", "joined replicas", "device", "one rank and engine 'torch'", "it trains alone", built=False
    ),
    Refusal(
        "running statistics",
        "decoupled",
        "model",
        "one with other norms",
        "running statistics are not merged",
        built=False,
    ),
    Refusal("other floats", "decoupled", "model", "float32", "the merge server adds up float32, which rounds others"),
]

_PIPELINES = [
    Refusal(
        "skipped steps",
        "delayed",
        "schedule",
        "'1f1b', or training.non_finite 'stop' or 'ignore' in fp32 or bf16",
        "a step begins before it is known whether the step before is left out",
    ),
    Refusal("averaged replicas", "delayed", "sync.mode", "'every-step'", "it would fall into a step", built=False),
    Refusal("own data", "delayed", "plan.holders_data", "'same'", "holders make one step at a time", built=False),
    Refusal("activation noise", "delayed", "privacy.activations", "none", "it counts one step at a time", built=False),
    Refusal("compile", "deterministic", "runtime.compile", "false", "a measured time decides which kernels compute"),
    Refusal(
        "store",
        "activation noise",
        "store",
        "none",
        "a run that goes on must know all that was sent before, and uploads come later",
    ),
    Refusal("changes", "real devices", "runtime.changes", "none", "only an emulated fleet can be changed"),
    Refusal("a description", "own data", "data.description", "none", "holders describe their own data"),
    Refusal("streams", "own data", "plan.holders_data", "'same'", "samples of a stream have no numbers", built=False),
]

_FEDERATED = [
    Refusal("streams", "federated", "data", "data that are read whole", "a client's samples are held while it trains"),
    Refusal("a description", "federated", "data.description", "none", "clients' data are described by their partition"),
    Refusal(
        "up",
        "a federated job",
        "up",
        "`isthmus train`, or `isthmus serve` for sites",
        "agents take stages only",
        built=False,
    ),
    Refusal(
        "probe", "a federated job", "--job", "a job whose model is cut into stages", "its rounds measure executors"
    ),
    Refusal("options of plans", "federated", "option", "none", "clients are not placed on a fleet by a planner"),
    Refusal("options of rounds", "pipeline", "option", "none", "it has no rounds"),
    Refusal("an engine of the sweep", "federated", "engine", "[execution] engine", "a run has its own", built=False),
    Refusal("store", "sweep", "store", "none", "its runs would share the URL", built=False),
    Refusal("store", "client states", "store", "none", "clients' states are not uploaded", built=False),
]

REFUSALS = {(one.what, one.beside): one for one in (*_DECOUPLED, *_PIPELINES, *_FEDERATED)}


def refused(what: str, beside: str, got: object = "", field: str = "") -> UserError:
    """The error for a combination of the table. `got` is what was set; `field` is named in place of the row's."""
    row = REFUSALS[what, beside]
    found = WITH[beside] if got == "" else f"{'true' if got is True else got} {WITH[beside]}"
    later = "" if row.built else f" ({NOT_BUILT})"
    return UserError(f"{field or row.field}: got {found}, expected {row.expected}: {row.reason}{later}")
