"""Stages computed by JAX: a table of operators, and a program that runs stretches of them as one compiled function."""
