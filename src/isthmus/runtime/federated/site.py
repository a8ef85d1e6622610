"""A site's process at work for federated runs: it stays warm, and goes on where a connection was lost.

Model, algorithm and data are the site's own. The agent tells of runs; a thread trains for one of them at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from isthmus.accelerators import open_accelerator
from isthmus.data import load_dataset
from isthmus.errors import IsthmusError, PeerError, UserError
from isthmus.federated.admission import first_state
from isthmus.federated.algorithms import load_algorithm
from isthmus.federated.offer import Offer, SiteConfig
from isthmus.federated.pacing import Emulation
from isthmus.federated.resident import Resident
from isthmus.federated.site import OwnData, Site, SiteStates
from isthmus.federated.state_form import StateForm
from isthmus.federated.worksite import Work
from isthmus.models import build_model
from isthmus.protocol.federated_events import Dropped, Refused, SendSums, Told
from isthmus.runtime.federated.executor import Executor, take_part
from isthmus.runtime.identity import Identity, Party
from isthmus.runtime.messages.fleet import Engage
from isthmus.runtime.messages.run import HaltMessage, Heartbeat
from isthmus.runtime.messages.site import EnrolledMessage, OfferMessage, UpdateMessage
from isthmus.runtime.processes.computing import Computing
from isthmus.runtime.transport.channel import SocketChannel, dial
from isthmus.runtime.transport.post import Post, headers_of

RETRIES_S = (0.5, 1.0, 2.0)
"""Waits between attempts to reach the coordinator; the last one again and again."""


class SiteExecutor(Executor):
    """Sends what its one client returned, not sums."""

    def __init__(
        self, site: Site, channel: SocketChannel, post: Post, run: str, patience_s: float, say: Callable[[str], None]
    ) -> None:
        super().__init__(site, channel, post, run, patience_s, together=1)
        self._own = site
        self._say = say

    def _heed(self, told: Told) -> None:
        match told:
            case Refused(turn=turn, reason=reason):
                self._say(f"the update of round {turn.round + 1} was refused: {reason}")
            case Dropped(turn=turn, again=again):
                what = (
                    "is tried again: an update made before" if again else "closed before this site's update was in: it"
                )
                self._say(f"round {turn.round + 1} {what} counts nowhere")
            case _:
                pass

    def _send_sums(self, act: SendSums) -> None:
        update = self._own.update
        if update is None or not act.timed:
            raise UserError("; ".join(r.reason for r in act.refused) or "the client returned nothing")
        self._post.put(
            UpdateMessage(
                run=self._run, turn=act.turn, seconds=act.timed[0].seconds, weight=update.weight,
                state=act.timed[0].state, renewed=act.timed[0].renewed, tensors=headers_of(update.values),
            ),
            list(update.values.values()),
        )  # fmt: skip
        self._post.flush()  # the values' memory is used again


class SiteWorkshop:
    """As the agent's `Workshop`. `fail` is told of what makes going on useless: an offer that is not allowed, say."""

    def __init__(
        self, config: SiteConfig, name: str, folder: Path, *, say: Callable[[str], None],
        fail: Callable[[IsthmusError], None],
    ) -> None:  # fmt: skip
        """`folder` has the site's key, and states of clients under it. UserError for data that cannot be read, a
        device that is not here."""
        self._config = config
        self._name = name
        self._folder = folder
        self._say = say
        self._fail = fail
        self._accelerator = open_accelerator(config.device, "device")
        self._data = OwnData(load_dataset(config.data, "train"))
        self._warm: tuple[Offer, Site] | None = None
        self._training = threading.Lock()
        self._work: _Work | None = None
        self._threads = Computing()
        """Of this run and of those before that are still trained for."""

    def engage(self, call: Engage, coordinator: tuple[str, int]) -> None:
        if self._work is not None and self._work.run == call.run and self._work.thread.is_alive():
            return  # only the agent's own connection was lost
        self.end()
        work = _Work(call.run)
        self._work = work
        work.thread = self._threads.start(lambda: self._attend(work, call, coordinator), f"run {call.run}")

    def disengage(self, run: str) -> None:
        if self._work is not None and self._work.run == run:
            self.end()

    def end(self) -> None:
        """A client that trains is trained to its end, by then for nobody."""
        if self._work is not None:
            self._work.stop()
            self._work = None

    def leave(self) -> None:
        """At the end of the process: a client that trains is stopped where it is."""
        self.end()
        self._threads.end()

    def _attend(self, work: _Work, call: Engage, coordinator: tuple[str, int]) -> None:
        """A run, over as many connections as it takes."""
        torch.set_num_threads(self._config.threads)  # each thread has a number of its own
        failed = 0
        while not work.over.is_set():
            begun_s = time.monotonic()
            try:
                with self._training:
                    self._take_part(work, call, coordinator)
            except PeerError as e:
                if time.monotonic() - begun_s > call.patience_s:
                    failed = 0
                wait_s = RETRIES_S[min(failed, len(RETRIES_S) - 1)]
                failed += 1
                if not work.over.wait(wait_s):
                    self._say(f"{e}; trying again")
            except IsthmusError as e:
                self._fail(e)
                return
            except Exception as e:  # the user's own algorithm or model
                self._fail(UserError(f"{type(e).__name__}: {' '.join(str(e).split())}"))
                return
            else:
                self._say("the run is over")
                return

    def _take_part(self, work: _Work, call: Engage, coordinator: tuple[str, int]) -> None:
        """One connection, until it ends or the run does."""
        if work.over.is_set():
            return
        channel = dial(
            *coordinator, "coordinator", call.patience_s, identity=Identity(self._folder),
            expected=Party("coordinator", ""),
        )  # fmt: skip
        work.channel = channel

        def act(post: Post) -> None:
            offer = _offer(channel, call.patience_s)
            if offer is None:
                return
            site = self._site(offer)
            post.put(EnrolledMessage(run=call.run, samples=self._data.samples))
            SiteExecutor(site, channel, post, call.run, call.patience_s, self._say).run()

        take_part(channel, self._name, call.run, call.patience_s, act)

    def _site(self, offer: Offer) -> Site:
        """The one of before where the same is asked for: nothing is built or read twice."""
        if self._warm is not None and self._warm[0] == offer:
            return self._warm[1]
        self._config.check(offer)
        algorithm = load_algorithm(self._config.algorithm)
        torch.manual_seed(offer.seed)
        module = build_model(self._config.model)
        first = first_state(algorithm, Resident(module).vector())
        states = None if first is None else SiteStates(self._folder / "states" / offer.run, StateForm(first))
        site = Site(
            Work(algorithm=algorithm, local=offer.local, seed=offer.seed), module, self._data, states,
            lasts=Emulation(eta=self._config.slow_down).clock(), say=self._say, accelerator=self._accelerator,
        )  # fmt: skip
        site.warm_up(offer.client)
        self._warm = (offer, site)
        self._say(f"at work for {offer.job} as client {offer.client}: {self._data.samples} samples")
        return site


class _Work:
    """A run that this site works for."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.over = threading.Event()
        self.channel: SocketChannel | None = None
        self.thread = threading.Thread()

    def stop(self) -> None:
        self.over.set()
        if self.channel is not None:
            self.channel.close()


def _offer(channel: SocketChannel, patience_s: float) -> Offer | None:
    """What is to be done; None when the run is over before it began."""
    received: tuple[object, list[Tensor]] | None
    while (received := channel.receive(idle_s=patience_s)) is not None:
        match received[0]:
            case OfferMessage(offer=offer):
                return offer
            case HaltMessage():
                return None
            case Heartbeat():
                pass
            case other:
                raise PeerError(f"coordinator: sent {type(other).__name__}, expected an offer")
    raise PeerError("coordinator: closed the connection")
