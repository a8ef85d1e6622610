"""In front of a device's commands (`ProcessPlace.prefix`): its device processes flip the lowest bit of one gradient, in
the third step that each computes."""

from __future__ import annotations

import os
import sys

import torch

from isthmus.runtime import device_fork_server as fork_server
from isthmus.runtime.device.device import DeviceWorker
from isthmus.runtime.processes.fork_server import DEVICES
from isthmus.training.engine import Engine

WRONG_STEP = 3


def main() -> None:
    make = DeviceWorker._engine

    def made(worker: DeviceWorker, *arguments: object) -> Engine:
        engine = make(worker, *arguments)  # type: ignore[arg-type]
        collect, done = engine.collect, 0

        def collected(count: float | None) -> torch.Tensor:
            nonlocal done
            norms = collect(count)
            done += 1
            if done == WRONG_STEP:
                gradient = next(iter(engine.gradients().values()))
                gradient.detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1)
            return norms

        engine.collect = collected  # type: ignore[method-assign]
        return engine

    DeviceWorker._engine = made  # type: ignore[method-assign]
    fork_server.main()


if __name__ == "__main__":
    command = sys.argv[1:]
    if command[-1] != DEVICES:
        os.execv(command[0], command)
    main()
