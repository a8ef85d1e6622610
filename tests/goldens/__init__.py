"""Results that must stay as they are while the code below them moves: bits of runs, costs and bounds of plans, fault
schedules, and the schema of the wire.

`python -m tests.goldens` computes them again and writes them; a change of a file here needs a reason in its commit.
"""
