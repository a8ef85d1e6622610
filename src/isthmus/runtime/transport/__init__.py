"""Connections: frames, TLS, send lanes, several streams, relays, and who is let in."""
