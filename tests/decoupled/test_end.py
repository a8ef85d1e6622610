"""The end of a run, as replicas hear of it over TCP, and of one that is left out."""

from __future__ import annotations

import threading

import torch

from isthmus.cost import Decoupled
from isthmus.plans import OuterOptimizer
from isthmus.programs.merger import Merger
from isthmus.protocol.decoupled_events import (
    CollectChanges,
    Contributed,
    FragmentSent,
    LastStepMade,
    MergeChanges,
    StepsMade,
)
from isthmus.protocol.run_messages import Halt
from isthmus.runtime.decoupled.merger import MergerHost, MergerWatch
from isthmus.runtime.decoupled.merger_link import MergerLink, ReplicaPlace
from isthmus.runtime.transport.listener import Listener
from isthmus.training.decoupled import MergedFragments, change_codec, delta_codec
from tests.fleet_service.parties import soon

from .small import rules

RUN, TIMEOUT_S = "run", 20.0
PLAIN = Decoupled(codec="none")


def _until(link: MergerLink, kind: type[object]) -> list[type[object]]:
    """What comes, by type, up to one of this kind."""
    found: list[type[object]] = []
    while kind not in found:
        event, _ = link.received.get(timeout=3 * TIMEOUT_S)
        assert event is not None
        found.append(type(event))
    return found


class _Run:
    """A merger of one fragment of four elements, in a thread."""

    def __init__(self, *names: str, quorum: int = 2) -> None:
        self.merged = MergedFragments([torch.zeros(4)], OuterOptimizer(rate=1.0, momentum=0.0), change_codec(PLAIN))
        self.merges, self.notes, self.steps = list[MergeChanges](), list[str](), list[str]()
        watch = MergerWatch(
            stepped=lambda name, *_: self.steps.append(name),
            merged=lambda merge, _: self.merges.append(merge),
            note=self.notes.append,
        )
        machine = Merger(rules(samples=None, fragments=1, quorum=quorum), names, final_s=TIMEOUT_S)
        links = dict.fromkeys(names)
        host = MergerHost(machine, self.merged, delta_codec(PLAIN), links, RUN, TIMEOUT_S, watch)
        self._listener = Listener("127.0.0.1", timeout_s=TIMEOUT_S)
        self._listener.start(host.acceptor.on_connection)
        self._thread = threading.Thread(target=host.coordinate, daemon=True)
        self._thread.start()

    def link(self, name: str) -> MergerLink:
        address = f"127.0.0.1:{self._listener.port}"
        return MergerLink(ReplicaPlace(name=name, run=RUN, address=address, timeout_s=TIMEOUT_S))

    def end(self) -> None:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        self._listener.close()


def test_one_that_comes_back_after_the_end_receives_the_merged_model() -> None:
    run = _Run("a", "b")
    a = run.link("a")
    _until(a, FragmentSent)
    a.put(LastStepMade())
    _until(a, CollectChanges)
    a.put(Contributed(merge=1, fragments=(), steps=0, samples=()))
    _until(a, Halt)
    b = run.link("b")
    assert _until(b, Halt) == [FragmentSent, Halt]
    for one in (a, b):
        one.close()
    run.end()


def test_one_whose_changes_make_the_weights_too_large_is_left_out_and_does_not_come_back() -> None:
    """Each of its changes is admissible. The merged weights are those of the others from then on."""
    run = _Run("a", "b", "c", quorum=3)
    links = {name: run.link(name) for name in ("a", "b", "c")}
    for link in links.values():
        _until(link, FragmentSent)
    changes, expected = {"c": (-24.0, 16), "b": (0.03, 16), "a": (0.01, 32)}, 0.0
    for number in (1, 2):
        for place, (name, (_, samples)) in enumerate(changes.items(), 1):  # the last step has a merge announced
            links[name].put(StepsMade(steps=number, samples=samples))
            soon(lambda count=3 * (number - 1) + place: len(run.steps) == count)
        for name, (change, samples) in changes.items():
            _until(links[name], CollectChanges)
            body = Contributed(merge=number, fragments=(0,), steps=number, samples=(samples,))
            links[name].put(body, [delta_codec(PLAIN).encode(torch.full((4,), change), "fragment 0")])
        merged = changes if number == 1 else {name: changes[name] for name in ("a", "b")}
        expected -= sum(change * samples for change, samples in merged.values()) / sum(s for _, s in merged.values())
        for name in ("a", "b"):
            _until(links[name], FragmentSent)
    soon(lambda: len(run.merges) == 2)  # told after the fragments are under way
    torch.testing.assert_close(run.merged.known[0], torch.full((4,), expected))
    assert [[c.replica for f in merge.fragments for c in f.contributions] for merge in run.merges] == [
        ["a", "b", "c"],
        ["a", "b"],
    ]
    event, _ = links["c"].received.get(timeout=3 * TIMEOUT_S)
    while event is not None:
        event, _ = links["c"].received.get(timeout=3 * TIMEOUT_S)
    soon(lambda: run.notes)  # the merger closes the link before it says why
    (note,) = run.notes
    assert note == (
        "c is lost: its change of fragment 0 has a root mean square of 24 after 16 samples, 4.8e+03 times as much for "
        "each sample as others: the merged weights would be too large; the others go on"
    )
    for name in ("a", "b"):
        links[name].put(LastStepMade())
    for name in ("a", "b"):
        _until(links[name], CollectChanges)
        links[name].put(Contributed(merge=3, fragments=(), steps=2, samples=()))
    for name in ("a", "b"):
        _until(links[name], Halt)
    for link in links.values():
        link.close()
    run.end()
    assert all("c" not in {c.replica for f in merge.fragments for c in f.contributions} for merge in run.merges[1:])
