"""Fragments of replicas that never wait: what a replica gives, what the merger makes of it, what a replica takes.

    given     delta = outer - w
    merged    change = Nesterov(outer, mean of the deltas, weighted by samples) - outer       outer <- outer + unpacked
    taken     w <- w + outer - what the replica had given, or had known

A replica keeps what it has moved and not given yet, and what it gave until it hears that this is merged. What a lost
connection took away is given again: nothing is lost, and nothing counts twice. So it is with what packing leaves out of
a delta: it stays in the replica's own weights, and is part of the next delta. What packing leaves out of a merged
change is dropped. Error feedback, which adds either to later messages, was worse: training has gone on from what was
sent (benchmarks/decoupled).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from isthmus.combinations import refused
from isthmus.cost import Decoupled
from isthmus.errors import PeerError, UserError
from isthmus.plans import OuterOptimizer, Packing
from isthmus.training.compression import Codec, DeltaCodec, EntropyCoded, Int4, codec_of
from isthmus.training.optim import OuterStep

INT4_TILE = 256
"""Elements of a change that share a step: more than in other messages, for eight times fewer bytes than float32."""
_INT4 = EntropyCoded(Int4(INT4_TILE))


LARGEST_CHANGE = 100.0
"""Root mean square of a replica's change of a fragment, as a multiple of the weights' own, or of 1 if that is more."""


def size_of(values: Tensor) -> float:
    """Root mean square, which does not overflow."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) / max(1, values.numel()) ** 0.5


def delta_codec(rules: Decoupled) -> Codec:
    """Return the codec of the replicas' messages."""
    return _INT4 if rules.codec == "int4" else codec_of(Packing(codec=rules.codec, ratio=rules.ratio))


def change_codec(rules: Decoupled) -> Codec:
    """Return the merger's codec. Every element has changed: a sparse codec would leave most for later."""
    return _INT4 if rules.ratio > 1 else delta_codec(rules)


def check_model(module: nn.Module) -> None:
    """UserError for a model whose replicas cannot be merged."""
    running = [name for name, kind in module.named_modules() if isinstance(kind, nn.modules.batchnorm._BatchNorm)]  # pyright: ignore[reportPrivateUsage]
    if running:
        raise refused("running statistics", "decoupled", f"running statistics ({running[0]})")
    kinds: Sequence[torch.dtype] = sorted({p.dtype for p in module.parameters() if p.requires_grad}, key=str)
    if kinds != [torch.float32]:
        raise refused("other floats", "decoupled", f"parameters of {', '.join(map(str, kinds))}")


def fragments_of(module: nn.Module, count: int) -> list[list[nn.Parameter]]:
    """The trainable parameters in so many fragments, strided over the modules that own them, so that each holds some of
    the first layers and some of the last. UserError where there are fewer layers."""
    layers: dict[str, list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            layers.setdefault(name.rpartition(".")[0], []).append(parameter)
    if count > len(layers):
        raise UserError(
            f"sync.decoupled.fragments: got {count}, expected at most the model's {len(layers)} layers; a script says "
            "Options(decoupled=Decoupled(fragments=...))"
        )
    found: list[list[nn.Parameter]] = [[] for _ in range(count)]
    for number, parameters in enumerate(layers.values()):
        found[number % count] += parameters
    return found


@torch.no_grad()
def flat(parameters: Sequence[Tensor]) -> Tensor:
    """A copy of all elements on the host, float32 [elements]."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters]).cpu()


def flat_fragments(module: nn.Module, count: int) -> list[Tensor]:
    """A copy of each."""
    return [flat(parameters) for parameters in fragments_of(module, count)]


@torch.no_grad()
def spread(values: Tensor, parameters: Sequence[Tensor]) -> None:
    """Write `flat` elements back."""
    for parameter, part in zip(parameters, values.split([p.numel() for p in parameters]), strict=True):
        parameter.copy_(part.view(parameter.shape))


class _Given(NamedTuple):
    """A contribution whose fate is not known yet."""

    number: int  # the number of the merge that asked for it
    values: Tensor  # the replica's own when it gave, as the payload has them; moved since then with what is known
    samples: int


class ReplicaAccount:
    """A replica's knowledge of the merger's weights, and which of its own changes are merged. It does not depend on
    where the replica's weights are. Every fragment is unknown until it was taken once."""

    def __init__(self, count: int, codec: DeltaCodec) -> None:
        self._codec = codec
        self.known: list[Tensor | None] = [None] * count  # the newest version of each fragment that was taken
        self._given: list[_Given | None] = [None] * count
        self._samples = [0] * count

    def trained(self, samples: int) -> None:
        """A step was made on so many samples."""
        self._samples = [before + samples for before in self._samples]

    def samples(self, fragment: int) -> int:
        """Trained on since the last contribution of this fragment that was merged."""
        return self._samples[fragment]

    def waits(self, fragment: int) -> bool:
        """Return whether a contribution of this replica is not merged yet, as far as it knows."""
        return self._given[fragment] is not None

    def due(self, fragments: Iterable[int], *, last: bool) -> tuple[int, ...]:
        """Return those fragments of a merge that this replica gives: those that it has trained and that do not wait; in
        the last merge, all that it has trained."""
        trained = [fragment for fragment in fragments if self._samples[fragment]]
        return tuple(fragment for fragment in trained if last or not self.waits(fragment))

    @torch.no_grad()
    def give(self, fragment: int, own: Tensor, number: int) -> Tensor:
        """The payload of what this replica has moved, for the merge `number`, where `own` are its weights [elements].
        UserError where that is not finite."""
        known = self.known[fragment]
        assert known is not None, "nothing is asked before everything was taken"
        payload = self._codec.encode(known - own, f"fragment {fragment}")
        sent = known - self._codec.decode(payload, known.shape, known.dtype)
        self._given[fragment] = _Given(number, sent, self._samples[fragment])
        return payload

    @torch.no_grad()
    def take(self, fragment: int, values: Tensor, *, whole: bool, included: int, first: bool) -> Tensor | None:
        """Return the tensor to add to the replica's own weights [elements]; None where they are to be `values`.

        `values` is a version of the fragment if `whole`, else the payload of its change. `included` is the newest
        contribution of this replica that is merged; with `first` one that is not is void."""
        known = self.known[fragment]
        if known is None:
            assert whole, "a change is of something that was taken before"
            self.known[fragment] = values
            return None
        new = values if whole else known + self._codec.decode(values, known.shape, known.dtype)
        self.known[fragment], added = new, new - known
        given, self._given[fragment] = self._given[fragment], None
        if given is not None and given.number == included:
            added = new - given.values
            self._samples[fragment] -= given.samples
        elif given is not None and not first:
            self._given[fragment] = given._replace(values=given.values + added)
        return added


class ReplicaFragments:
    """A replica's side, where one process has all of its weights."""

    def __init__(self, parameters: Sequence[Sequence[Tensor]], codec: DeltaCodec) -> None:
        """`parameters` of each fragment, which are written in place."""
        self._parameters, self.count = parameters, len(parameters)
        self.elements = [sum(parameter.numel() for parameter in fragment) for fragment in parameters]
        self.account = ReplicaAccount(self.count, codec)

    def give(self, fragment: int, number: int) -> Tensor:
        """Give tensors as the account does, of the module's weights."""
        return self.account.give(fragment, flat(self._parameters[fragment]), number)

    @torch.no_grad()
    def take(self, fragment: int, values: Tensor, *, whole: bool, included: int, first: bool) -> None:
        """Take tensors as the account does, into the module's weights."""
        parameters = self._parameters[fragment]
        added = self.account.take(fragment, values, whole=whole, included=included, first=first)
        spread(values if added is None else flat(parameters) + added, parameters)

    def settle(self) -> None:
        """Write the newest versions that were taken into the module: what it had moved since then is dropped."""
        for known, parameters in zip(self.account.known, self._parameters, strict=True):
            if known is not None:
                spread(known, parameters)


class MergedFragments:
    """The merger's side."""

    def __init__(self, start: Sequence[Tensor], config: OuterOptimizer, codec: DeltaCodec) -> None:
        """`start` are the fragments, flat; `codec` packs changes on their way to replicas."""
        self._outer = [OuterStep([values.clone()], config) for values in start]
        self.known = list(start)
        """The newest versions, which all replicas that are up to date know. A version is never changed in place."""
        self._codec = codec

    @torch.no_grad()
    def unpacked(self, fragment: int, payload: Tensor, codec: DeltaCodec) -> Tensor | None:
        """A replica's delta; None where it is not finite. PeerError for what is no payload, or so large that the
        replica has diverged: others would train on it, and overflow in its place."""
        known = self.known[fragment]
        delta = codec.decode(payload, known.shape, known.dtype, f"fragment {fragment}")
        if not bool(torch.isfinite(delta).all()):
            return None
        found, limit = size_of(delta), LARGEST_CHANGE * max(1.0, size_of(known))
        if found > limit:
            raise PeerError(
                f"its change of fragment {fragment} has a root mean square of {found:.3g}, above {limit:.3g}"
            )
        return delta

    @torch.no_grad()
    def merge(self, fragment: int, deltas: Sequence[tuple[Tensor, int]]) -> Tensor:
        """Make the outer step with the mean of the deltas, weighted by samples; returns the payload of the change."""
        total = sum(samples for _, samples in deltas)
        mean = torch.zeros_like(self.known[fragment])
        for delta, samples in deltas:
            mean.add_(delta, alpha=samples / total)
        outer, known = self._outer[fragment], self.known[fragment]
        outer.step([mean])
        change = outer.values[0] - known
        payload = self._codec.encode(change, f"fragment {fragment}")
        self.known[fragment] = known + self._codec.decode(payload, known.shape, known.dtype)
        outer.values[0].copy_(self.known[fragment])
        return payload

    @property
    def momenta(self) -> list[Tensor | None]:
        """Momenta of the outer step of each fragment, flat; None where it has none."""
        return [outer.momenta[0] for outer in self._outer]

    def load(self, start: Sequence[Tensor], momenta: Sequence[Tensor | None]) -> None:
        """Go on from saved versions of the fragments and momenta, flat."""
        self.known = list(start)
        for outer, values, momentum in zip(self._outer, start, momenta, strict=True):
            outer.load([values], [momentum])

    def fill(self, parameters: Sequence[Sequence[nn.Parameter]]) -> None:
        """Write the merged values into a module's fragments."""
        for known, own in zip(self.known, parameters, strict=True):
            spread(known, own)
