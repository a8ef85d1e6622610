"""Federated rounds over processes and sites."""
