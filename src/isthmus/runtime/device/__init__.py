"""A device at work for a run.

`device` is one of the device's stages in a run, `coordinator_link` its connection to the coordinator. `stage_runner`
drives the stage's state machine: `stage_data` gives samples, `tasklets` order its compute, `copy_streams` move tensors
to the accelerator and back, `links` send and receive on connections that `peer_connections` makes. `snapshots` and
`state_transfer` copy its state.
"""
