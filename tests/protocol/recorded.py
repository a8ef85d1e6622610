"""The program of a pipeline, which writes down what it asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ParamSpec

import msgspec
from tests.programs.ports import Asked, Recorder

from isthmus.programs.pipeline import Pipeline
from isthmus.protocol import Item, RunSpec, StateLayout
from isthmus.protocol.run_messages import DeviceReport, Halt, OpenItem
from isthmus.protocol.run_ports import Ending, FinishRun, PipelinePort, PlanRequest
from isthmus.session.program import Policy
from isthmus.session.session import Loss, Observation

P = ParamSpec("P")


FOR_PEOPLE = ("note", "reject_device")


class Recorded(Pipeline):
    def __init__(self, devices: Iterable[str], spec: RunSpec, **named: Any) -> None:
        """As a pipeline."""
        super().__init__(devices, spec, timeout_s=60.0, **named)
        self._recorder = Recorder(PipelinePort)
        self.port = self._recorder.port

    def takes(self, device: str, body: DeviceReport) -> None:
        """A report that came in turn. OutOfPhase for one that its device cannot have to make now."""
        Policy[PipelinePort].heard(self, device, body)

    def loses(self, device: str, reason: str, *, returns: bool = False) -> None:
        self.seen = Observation(returning=frozenset({device} if returns else ()))
        self.lost(Loss(device, reason))

    def gets(self, epoch: int, layout: StateLayout, *, worth_it: bool = True) -> None:
        """A plan that was asked for in this epoch."""
        self.planned(PlanRequest((), must=worth_it, epoch=epoch), layout)

    def gets_none(self, epoch: int, reason: str) -> None:
        self.no_plan(PlanRequest((), epoch=epoch), reason)

    def tell(self, method: Callable[P, None], *given: P.args, **named: P.kwargs) -> list[Asked]:
        """Call a method; return what is asked then, but for what people hear, each plan as if in the first epoch."""
        self._recorder.took()
        method(*given, **named)
        return [self._without_epoch(*call) for call in self._recorder.took() if call[0] not in FOR_PEOPLE]

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
