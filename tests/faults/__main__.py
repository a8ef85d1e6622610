"""`python -m tests.faults SEED`: one schedule again, told; without a seed, thousands."""

from __future__ import annotations

import sys

import msgspec

from .schedule import drawn
from .simulated import Simulated

if __name__ == "__main__":
    seeds = [int(a) for a in sys.argv[1:]] or range(20_000)
    for seed in seeds:
        run = Simulated(drawn(seed))
        if len(sys.argv) > 1:
            print(msgspec.json.format(msgspec.json.encode(drawn(seed)), indent=1).decode())
        try:
            finish = run.run()
        except Exception as e:
            if len(sys.argv) > 1:
                raise
            print(f"seed {seed}: {type(e).__name__}: {e}")
            continue
        if len(sys.argv) > 1:
            print(f"{finish}, {run.recoveries} recoveries, {run.end_s:.1f} s of the virtual clock")
