"""The programs: what the members of a session do. They are pure: no clock, connection or thread.

`pipeline` is a training run over stages. `merging` is what rounds and merges have in common: `rounds` are federated
rounds (`open_phase` is one of their phases), `masked` those whose sums are masked, `merger` the merges of decoupled
replicas. `tokens` is a service that generates text. `queue` has no members: it decides which job of a fleet runs next.
"""
