"""A device at work for a run.

`process` is the device's process (forked by `fork_server`), `device` one of its stages in a run,
`coordinator_link` its connection to the coordinator. `stage_runner` drives the stage's state machine: `batches`
and `stage_data` give samples, `tasklets` and `compute_turns` order its compute, `copy_streams` move tensors to the
accelerator and back, `links` send and receive on connections that `peer_connections` makes. `snapshots`,
`snapshot_replicas` and `state_transfer` copy its state.
"""
