"""The coordinator of a run.

`run` is one training run, `host` drives the state machine over connections, `backend` gives it devices. `plans`
keeps the run's plans; `stages` and `stage_assignments` turn one into what each device gets; `parameter_store` has
the weights, `recovery_record` what a coordinator that is started again needs. Private data: `data_holders`,
`activation_privacy`.
"""
