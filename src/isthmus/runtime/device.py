"""A device's process: joins a coordinator, takes its stage, runs until halted.

`python -m isthmus.runtime.device --coordinator HOST:PORT --device NAME` with the run's secret name in ISTHMUS_RUN.
With `--leash` it ends when its standard input closes: when whoever started it dies, however that happens.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch import Tensor

from isthmus.errors import InternalError, IsthmusError, PeerError, UserError
from isthmus.protocol.events import Halted, Opened
from isthmus.runtime.channel import MAX_ASSIGNMENT_BYTES, SocketChannel, dial
from isthmus.runtime.device_data import stage_data
from isthmus.runtime.executor import Done, Executor, expected_parcels, expected_parts
from isthmus.runtime.identity import Identity, Party
from isthmus.runtime.lanes import SendLane
from isthmus.runtime.links import Links, connect
from isthmus.runtime.listener import Listener
from isthmus.runtime.messages import (
    AnyMessage,
    AssignMessage,
    Failed,
    HaltMessage,
    Heartbeat,
    Join,
    OpenMessage,
    ReadyMessage,
    ReportMessage,
    Weights,
)
from isthmus.training.engine import TorchEngine
from isthmus.training.layout import header_of

HALT_S = 1.0
"""How much later than a neighbour a device may hear that the run is over."""


class _Control:
    """The connection to the coordinator."""

    def __init__(self, channel: SocketChannel, run: str, inbox: queue.SimpleQueue[object], patience_s: float) -> None:
        self.channel = channel
        self.run = run
        self.inbox = inbox
        self.patience_s = patience_s
        self.lane = SendLane(channel, patience_s=patience_s, on_error=self._failed)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _failed(self, error: Exception) -> None:
        self.inbox.put(error)
        self.channel.close()  # whoever waits for the coordinator must not wait on

    def _beat(self) -> None:
        stop = threading.Event()
        while not stop.wait(self.patience_s / 4):
            self.lane.put(Heartbeat(run=self.run))

    def next(self, kind: type[AssignMessage] | type[Weights]) -> tuple[AnyMessage, list[Tensor]]:
        """The next message but heartbeats, which must be of this kind."""
        while True:
            received = self.channel.receive(idle_s=self.patience_s)
            if received is None or isinstance(received[0], HaltMessage):
                raise PeerError("coordinator: ended the run before it began")
            if isinstance(received[0], kind):
                return received
            if not isinstance(received[0], Heartbeat):
                raise PeerError(f"coordinator: sent {type(received[0]).__name__}, expected {kind.__name__}")

    def listen(self) -> None:
        threading.Thread(target=self._listen, name="receive from coordinator", daemon=True).start()

    def _listen(self) -> None:
        try:
            while (received := self.channel.receive(idle_s=self.patience_s)) is not None:
                message = received[0]
                if isinstance(message, OpenMessage):
                    self.inbox.put(Opened(item=message.item, epoch=message.epoch))
                elif isinstance(message, HaltMessage):
                    self.inbox.put(Halted())
                    return
            self.inbox.put(PeerError("coordinator: closed the connection"))
        except Exception as e:  # the executor decides: a lane has no one to raise to
            self.inbox.put(e)

    def report(self, done: Done) -> None:
        headers = tuple(header_of(name, t) for name, t in done.state.items())
        self.lane.put(
            ReportMessage(
                run=self.run, item=done.item, loss=done.loss, count=done.count,
                spans=done.spans, late_s=done.late_s, tensors=headers,
            ),
            list(done.state.values()),
        )  # fmt: skip


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """Where a device is, and how it talks to others."""

    device: str
    host: str = "127.0.0.1"
    """Address to listen on for other devices."""
    port: int = 0
    """0: any that is free."""
    address: str = ""
    """How others reach that address, where it is not the same."""
    identity: Identity | None = None
    """With one all connections are TLS; without, plain TCP."""
    trusted_network: bool = False
    """Plain TCP beyond loopback."""


def serve(coordinator: tuple[str, int], site: Site, run: str, patience_s: float) -> None:
    """Join, set up, run. Errors reach the coordinator before they are raised here."""
    identity = site.identity
    listener = Listener(
        site.host, site.port, identity=identity, trusted_network=site.trusted_network, patience_s=patience_s
    )
    channel = dial(
        *coordinator, "coordinator", patience_s, identity=identity, expected=Party("coordinator", ""),
        most_header_bytes=MAX_ASSIGNMENT_BYTES,
    )  # fmt: skip
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    control = _Control(channel, run, inbox, patience_s)
    control.lane.put(Join(run=run, device=site.device, host=site.address or site.host, port=listener.port))
    try:
        executor = _set_up(control, listener, identity)
        control.listen()
        control.lane.put(ReadyMessage(run=run))
        executor.run()
        executor.links.close()
    except Exception as e:
        if isinstance(e, PeerError) and _halted(inbox):
            return  # a neighbour has left before us at the end of the run
        control.lane.put(Failed(run=run, reason=_reason(e), fault=_fault(e)))
        raise
    finally:
        control.lane.close()
        channel.close()


def _halted(inbox: queue.SimpleQueue[object]) -> bool:
    """Whether the coordinator ends the run, which it tells all devices at once."""
    deadline_s = time.monotonic() + HALT_S
    with contextlib.suppress(queue.Empty):
        while not isinstance(inbox.get(timeout=max(0.0, deadline_s - time.monotonic())), Halted):
            pass
        return True
    return False


def _reason(error: Exception) -> str:
    """One line: whatever was raised here, it is told on another machine."""
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, IsthmusError) else f"{type(error).__name__}: {text}"


def _fault(error: Exception) -> Literal["user", "device", "other"]:
    if isinstance(error, UserError):
        return "user"
    return "other" if isinstance(error, PeerError) else "device"


def _set_up(control: _Control, listener: Listener, identity: Identity | None) -> Executor:
    message, _ = control.next(AssignMessage)
    assert isinstance(message, AssignMessage)
    assignment = message.assignment
    torch.set_num_threads(assignment.threads)
    # Before the data: reading it may take one device longer than another's patience.
    channels = connect(assignment, listener, identity)
    listener.close()
    data = stage_data(assignment, foreign=identity is not None)
    weights, tensors = control.next(Weights)
    values = {h.name: t for h, t in zip(weights.tensors, tensors, strict=True)}
    engine = TorchEngine(
        assignment.train, assignment.evaluation, assignment.engine, values, recompute=assignment.recompute
    )
    executor = Executor(assignment, engine, data, control.inbox, control.report)
    executor.links = Links(
        assignment, channels, expected_parcels(assignment), expected_parts(assignment), control.inbox, executor.record
    )
    return executor


def _end_with_input() -> None:
    """Also out of a long computation, and out of a wait for others that may never come."""
    while os.read(0, 4096):  # not through sys.stdin, whose lock would be held while the interpreter ends
        pass
    os._exit(PeerError.exit_code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinator", required=True, metavar="HOST:PORT")
    parser.add_argument("--device", required=True)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on for other devices")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes any")
    parser.add_argument("--address", default="", help="how others reach it, where that is not the host")
    parser.add_argument("--identity", type=Path, metavar="DIR", help="talk TLS with the key and certificate in here")
    parser.add_argument("--trusted-network", action="store_true", help="talk plain TCP beyond loopback")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds of silence after which a party is lost")
    parser.add_argument("--leash", action="store_true", help="end when standard input closes")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's to handle: it saves, then halts us
    if options.leash:
        threading.Thread(target=_end_with_input, name="leash", daemon=True).start()
    host, _, port = str(options.coordinator).rpartition(":")
    site = Site(
        device=options.device, host=options.host, port=options.port, address=options.address,
        identity=Identity(options.identity) if options.identity is not None else None,
        trusted_network=options.trusted_network,
    )  # fmt: skip
    try:
        serve((host, int(port)), site, os.environ.get("ISTHMUS_RUN", ""), options.patience)
    except IsthmusError as e:
        print(f"device {options.device}: {e}", file=sys.stderr)
        sys.exit(e.exit_code)
    except Exception:
        traceback.print_exc()
        sys.exit(InternalError.exit_code)


if __name__ == "__main__":
    main()
