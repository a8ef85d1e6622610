"""Replicas that receive what to train, over TCP, each in a thread: one is to leave, and the record says all."""

from __future__ import annotations

import contextlib
import threading

import msgspec
import pytest
import torch

from isthmus.data import load_dataset
from isthmus.protocol.decoupled_events import MergeChanges
from isthmus.runtime.coordinator.backend import DevicesAtWork
from isthmus.runtime.decoupled import device_replica
from isthmus.runtime.decoupled.device_replica import GraphTrainer, serve_replica
from isthmus.runtime.decoupled.merger import MergerHost, MergerWatch
from isthmus.runtime.device.peer_connections import Endpoint
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.transport.listener import Listener
from isthmus.training.decoupled import delta_codec
from isthmus_testing.decoupled_replay import replay

from .small import NAMES, job_of
from .test_graph_trainer import ordered

RUN, TIMEOUT_S = "run", 20.0


def test_one_that_is_to_leave_gives_all_and_the_others_go_on() -> None:
    job = job_of(quorum=1)
    job = msgspec.structs.replace(job, training=msgspec.structs.replace(job.training, steps=20_000))
    run, _, _ = ordered(job, "a")
    merges, stop = list[MergeChanges](), Stop()

    def note(text: str) -> None:
        if text == "b has left":
            stop.request()

    watch = MergerWatch(
        stepped=lambda *_: None, merged=lambda merge, _: merges.append(merge), note=note, begin=run.first
    )
    links = dict.fromkeys(NAMES, None)
    codec = delta_codec(job.sync.decoupled)
    host = MergerHost(run.machine, run.merged, codec, links, RUN, TIMEOUT_S, watch)
    listener = Listener("127.0.0.1", timeout_s=TIMEOUT_S)
    listener.start(host.acceptor.on_connection)
    threads = [
        threading.Thread(
            target=serve_replica,
            args=(("127.0.0.1", listener.port), Endpoint(device=name), RUN, TIMEOUT_S),
            daemon=True,
        )
        for name in NAMES[:2]
    ]

    class Devices(DevicesAtWork):
        def starting(self, device: str) -> bool:
            return device in NAMES[:2]

        def leaving(self) -> list[str]:
            given = {c.replica for merge in merges for f in merge.fragments for c in f.contributions}
            return ["b"] if given == {"a", "b"} else []

    for thread in threads:
        thread.start()
    finish = host.coordinate(Devices(), stop)
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    listener.close()
    assert finish.outcome == "interrupted"
    again = replay(job, load_dataset(job.used_data, "train"), NAMES, merges)
    assert all(torch.equal(a, b) for a, b in zip(again.known, run.merged.known, strict=True))


def test_the_merger_hears_why_a_replica_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    job, notes, stop = job_of(), list[str](), Stop()
    run, _, _ = ordered(job, "a")

    def note(text: str) -> None:
        notes.append(text)
        if "no room" in text:
            stop.request()

    watch = MergerWatch(stepped=lambda *_: None, merged=lambda *_: None, note=note, begin=run.first)
    links = dict.fromkeys(NAMES, None)
    codec = delta_codec(job.sync.decoupled)
    host = MergerHost(run.machine, run.merged, codec, links, RUN, TIMEOUT_S, watch)
    listener = Listener("127.0.0.1", timeout_s=TIMEOUT_S)
    listener.start(host.acceptor.on_connection)

    def trainer(*_: object) -> GraphTrainer:
        raise RuntimeError("no room")

    def serve() -> None:
        with contextlib.suppress(RuntimeError):
            serve_replica(("127.0.0.1", listener.port), Endpoint(device="a"), RUN, TIMEOUT_S)

    monkeypatch.setattr(device_replica, "_trainer", trainer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    host.coordinate(stop=stop)
    thread.join(TIMEOUT_S)
    listener.close()
    assert any(note.startswith("a is lost: RuntimeError: no room") for note in notes)
