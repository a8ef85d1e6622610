"""Engines that start devices of a fleet: one agent per node of a cluster that somebody has."""
