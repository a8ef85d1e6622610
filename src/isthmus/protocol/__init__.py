"""The pure policies: what happens is a call of a method, what is to be done a call of a port, no I/O.

`session.program` is their kernel. `worker` is a stage, with `compute_lane`,
`feeding` and `exchange`; `device_session` is a device in a run. `run_machine` is a run: `coordinator` with its items
(`work`, `leases`), its devices (`members`, `restarts`, `state_transfer`), recovery (`recovery`, `attempts`,
`memory_shortage`, `finite`), the `failure_detector`, `deadlines` and `interruptions`, and new plans (`adaptation`,
`drift`, `link_reprobe`, `replan_policy`). `federated_coordinator` and `federated_executor` are rounds.
`fleet_membership` is a fleet, with a `membership` for each device. `run_ports` are a run's ports; `run_messages` are
the bodies of frames.
"""

from isthmus.protocol.coordinator import Coordinator
from isthmus.protocol.recovery import Lineage, StateHolding, StateLayout
from isthmus.protocol.work import Item, RunSpec, items
from isthmus.protocol.worker import StageView, Worker

__all__ = ["Coordinator", "Item", "Lineage", "RunSpec", "StageView", "StateHolding", "StateLayout", "Worker", "items"]
