"""The pure state machines: events in, instructions out, no I/O.

`worker` is a stage, with `compute_lane`, `feeding`, `exchange` and `state_inventory`. `coordinator` is a run, with
its items (`work`, `leases`), its devices (`members`, `restarts`, `state_transfer`), recovery (`recovery`,
`attempts`, `memory_shortage`, `finite`) and new plans (`drift`, `link_reprobe`, `replan_policy`).
`federated_coordinator` and `federated_executor` are rounds. `events` and `coordinator_events` are what goes in and
comes out.
"""

from isthmus.protocol.coordinator import Coordinator
from isthmus.protocol.recovery import Lineage, StateHolding, StateLayout
from isthmus.protocol.work import Item, RunSpec, items
from isthmus.protocol.worker import StageView, Worker

__all__ = ["Coordinator", "Item", "Lineage", "RunSpec", "StageView", "StateHolding", "StateLayout", "Worker", "items"]
