"""A fleet of machines that join, stay, are probed and are called to work.

`fleet_coordinator` with `fleet_state`, `enrollment`, `job_queue` and `status_file` is the coordinator's side: the host
of the fleet's membership (`isthmus.protocol.fleet_membership`). `agent` and `machine` are the device's side.
A probe: `fleet_probe` chooses what is measured, asks devices, and ranks what `device_probe` answers; `speed` measures
it. `data_queries` compares data. `doctor` finds a broken hop.
"""
