"""Connections.

`channel` is a framed connection, `lanes` send on it, of an emulated link too; `secure` is TLS, `listener` accepts,
`acceptor` admits the devices of a run and limits their messages, `reconnection` dials again. `rendezvous` connects two
devices, directly or through the coordinator's `relay`. `multi_stream` makes several streams one, `tcp` chooses BBR,
`message_sender` sends from any thread.
"""
