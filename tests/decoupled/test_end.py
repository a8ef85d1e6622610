"""The end of a run, as replicas hear of it over TCP."""

from __future__ import annotations

import threading

import torch

from isthmus.cost import Decoupled
from isthmus.plans import OuterOptimizer
from isthmus.protocol.decoupled import Merger
from isthmus.protocol.decoupled_events import CollectChanges, Contributed, FragmentSent, LastStepMade, LinkLost
from isthmus.protocol.run_messages import Halt
from isthmus.runtime.decoupled.merger import MergerHost, MergerWatch
from isthmus.runtime.decoupled.merger_link import MergerLink, ReplicaPlace
from isthmus.runtime.transport.listener import Listener
from isthmus.training.decoupled import MergedFragments, change_codec, delta_codec

from .small import rules

RUN, TIMEOUT_S = "run", 20.0


def _until(link: MergerLink, kind: type[object]) -> list[type[object]]:
    """What comes, by type, up to one of this kind."""
    found: list[type[object]] = []
    while kind not in found:
        event, _ = link.received.get(timeout=3 * TIMEOUT_S)
        assert not isinstance(event, LinkLost)
        found.append(type(event))
    return found


def test_one_that_comes_back_after_the_end_receives_the_merged_model() -> None:
    plain = Decoupled(codec="none")
    merged = MergedFragments([torch.zeros(4)], OuterOptimizer(rate=1.0, momentum=0.0), change_codec(plain))
    watch = MergerWatch(stepped=lambda *_: None, merged=lambda *_: None, note=lambda _: None)
    host = MergerHost(
        Merger(rules(samples=None, fragments=1)),
        merged,
        delta_codec(plain),
        {"a": None, "b": None},
        RUN,
        TIMEOUT_S,
        watch,
        final_s=TIMEOUT_S,
    )
    listener = Listener("127.0.0.1", timeout_s=TIMEOUT_S)
    listener.start(host.acceptor.on_connection)
    run = threading.Thread(target=host.coordinate, args=(dict[str, str], lambda: False), daemon=True)
    run.start()

    def link(name: str) -> MergerLink:
        address = f"127.0.0.1:{listener.port}"
        return MergerLink(ReplicaPlace(name=name, run=RUN, address=address, timeout_s=TIMEOUT_S))

    a = link("a")
    _until(a, FragmentSent)
    a.put(LastStepMade())
    _until(a, CollectChanges)
    a.put(Contributed(merge=1, fragments=(), steps=0, samples=()))
    _until(a, Halt)
    b = link("b")
    assert _until(b, Halt) == [FragmentSent, Halt]
    for one in (a, b):
        one.close()
    run.join(TIMEOUT_S)
    assert not run.is_alive()
    listener.close()
