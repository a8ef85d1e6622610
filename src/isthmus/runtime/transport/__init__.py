"""Connections.

`channel` is a framed connection, `lanes` send on it, `secure` is TLS, `listener` accepts, `unauthenticated` bounds
unknown peers, `acceptor` admits the devices of a run, `connect_retries` dials again. `rendezvous` connects two
devices, directly or through the coordinator's `relay`. `multi_stream` makes several streams one, `tcp_congestion`
chooses BBR, `shaping` emulates a link, `rate_limit` limits messages and log lines, `message_sender` sends from any
thread, `heartbeat` sends heartbeats.
"""
