"""The pure policies: what happens is a call of a method, what is to be done a call of a port, no I/O.

`session.program` is their kernel. `worker` is a stage, `compute_lane` what it shares with others of its device;
`device_session` is a device in a run. `programs.pipeline` uses a run's items (`leases`), its devices (`members`),
recovery (`recovery`, `failures`, `finite`) and new plans (`adaptation`, `drift`).
`run_ports` is its port, `run_messages` are its items and the bodies of its frames. `federated_executor` trains the
clients of rounds. `fleet_membership` is a fleet, and each device of it.
"""

from isthmus.protocol.recovery import Lineage, StateHolding, StateLayout
from isthmus.protocol.run_messages import Item, RunSpec, items
from isthmus.protocol.worker import StageView, Worker

__all__ = ["Item", "Lineage", "RunSpec", "StageView", "StateHolding", "StateLayout", "Worker", "items"]
