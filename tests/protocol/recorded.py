"""A coordinator that writes down what it asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec

import msgspec
from tests.programs.ports import Asked, Recorder

from isthmus.protocol import Coordinator, Item
from isthmus.protocol.run_messages import Halt, OpenItem
from isthmus.protocol.run_ports import CoordinatorPort, Ending, FinishRun, PlanRequest

P = ParamSpec("P")


class Recorded(Coordinator):
    def __init__(self, *given: Any, **named: Any) -> None:
        """As a coordinator."""
        super().__init__(*given, **named)
        self._recorder = Recorder(CoordinatorPort)
        self.port = self._recorder.port

    def tell(self, method: Callable[P, None], *given: P.args, **named: P.kwargs) -> list[Asked]:
        """Call a method; return what is asked then, each plan as if in the first epoch."""
        self._recorder.took()
        method(*given, **named)
        return [self._without_epoch(*call) for call in self._recorder.took()]

    def _without_epoch(self, name: object, *given: object) -> Asked:
        if isinstance(given[0], PlanRequest):
            assert given[0].epoch == self.epoch, "a plan is asked for in the epoch that it is"
            given = (msgspec.structs.replace(given[0], epoch=0),)
        return name, *given


def halted(epoch: int = 0) -> Asked:
    return "halt", Halt(epoch=epoch)


def ended(outcome: Ending, reason: str = "") -> Asked:
    return "finish_run", FinishRun(outcome, reason)


def opened(item: Item) -> Asked:
    return "open_item", OpenItem(item=item)


def done(item: Item, loss: float | None = None) -> Asked:
    return "item_done", item, loss, "", ()


def planning(*devices: str, must: bool = True, waits: bool = False) -> Asked:
    return "make_plan", PlanRequest(devices, must, waits)
