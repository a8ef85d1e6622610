"""Ports that write down what a policy asks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isthmus.errors import PeerError, UserError
from isthmus.programs.merger import MergerPort
from isthmus.programs.tokens import ServingPort
from isthmus.protocol.decoupled_events import Contributed, MergeChanges, StepsMade
from isthmus.protocol.federated_messages import PhaseId
from isthmus.protocol.generation import Prompt
from isthmus.protocol.secure_messages import RevealedShare, SealedShare, SharesRevealed, SiteKeys
from isthmus.protocol.secure_site import SecureSitePort

Asked = tuple[object, ...]


class Recorder:
    """Each call is written down as the method's name and all its arguments, and returns None. AttributeError and
    TypeError for a call that the port does not have."""

    def __init__(self, kind: type[Any]) -> None:
        self.asked: list[Asked] = []
        methods = inspect.getmembers(kind, inspect.isfunction)
        self._methods = {name: inspect.signature(method) for name, method in methods if not name.startswith("_")}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._methods:
            raise AttributeError(name)

        def ask(*given: object, **named: object) -> None:
            bound = self._methods[name].bind(self, *given, **named)
            bound.apply_defaults()
            self.asked.append((name, *bound.args[1:], *bound.kwargs.values()))

        return ask

    @property
    def port(self) -> Any:
        """Itself, as a port of any kind."""
        return self

    def took(self) -> list[Asked]:
        """Return what was asked since the last call."""
        taken, self.asked = self.asked, []
        return taken


class Watched:
    """A port that tells of each call, and passes it on to a host."""

    def __init__(self, host: Any, tell: Callable[..., None]) -> None:
        """`tell` gets the method's name and the arguments."""
        self._host, self._tell = host, tell

    def __getattr__(self, name: str) -> Any:
        act = getattr(self._host, name)

        def ask(*given: object, **named: object) -> Any:
            self._tell(name, *given, *named.values())
            return act(*given, **named)

        return ask

    @property
    def port(self) -> Any:
        """Itself, as a port of any kind."""
        return self


class ServingRecorder(Recorder):
    """`chains` are what `plan` answers, one after another; a text is the reason why there is none."""

    def __init__(self) -> None:
        super().__init__(ServingPort)
        self.chains: list[Sequence[str] | str] = []

    def plan(self, devices: Sequence[str]) -> Sequence[str]:
        self.asked.append(("plan", *devices))
        found = self.chains.pop(0)
        if isinstance(found, str):
            raise UserError(found)
        return found

    def load(self, chain: Sequence[str], epoch: int) -> None:
        self.asked.append(("load", *chain, epoch))

    def start(self, prompt: Prompt, made: Sequence[int]) -> None:
        self.asked.append(("start", prompt.number, *made))


class MergerRecorder(Recorder):
    """Steps and contributions that count are written down apart."""

    def __init__(self) -> None:
        super().__init__(MergerPort)
        self.counted: list[tuple[str, StepsMade | Contributed]] = []
        self.inadmissible = ""
        """Why no contribution is admitted, if none is."""
        self.refused: dict[str, str] = {}
        """Whose changes the next merge does not take, and why."""

    def stepped(self, replica: str, made: StepsMade) -> None:
        self.counted.append((replica, made))

    def admit(self, replica: str, body: Contributed) -> int:
        if self.inadmissible:
            raise PeerError(self.inadmissible)
        self.counted.append((replica, body))
        return 0

    def merge(self, merge: MergeChanges) -> Mapping[str, str]:
        self.asked.append(("merge", merge))
        refused, self.refused = self.refused, {}
        return refused


class SiteRecorder(Recorder):
    """A site's device has the hexadecimal digits of its certificate for an id. Its shares are empty."""

    def __init__(self) -> None:
        super().__init__(SecureSitePort)

    def device_of(self, keys: SiteKeys) -> str:
        return keys.certificate.hex()

    def make_keys(self, phase: PhaseId) -> SiteKeys:
        return SiteKeys("own", bytes(32), bytes(32), bytes(32))

    def deal(self, peers: Sequence[SiteKeys], threshold: int) -> list[SealedShare]:
        return [SealedShare(peer.site, b"") for peer in peers]

    def open_shares(self, phase: PhaseId, shares: Sequence[SealedShare]) -> list[str]:
        return [share.site for share in shares if share.sealed == b"disputed"]

    def reveal(
        self, phase: PhaseId, seeds: Sequence[str], keys: Sequence[str], parties: Sequence[str], of: Sequence[str]
    ) -> SharesRevealed:
        self.asked.append(("reveal", phase, seeds, keys, parties, of))
        of_seeds, of_keys = (tuple(RevealedShare(site, bytes(32)) for site in sites) for sites in (seeds, keys))
        return SharesRevealed(phase=phase, seeds=of_seeds, keys=of_keys)
