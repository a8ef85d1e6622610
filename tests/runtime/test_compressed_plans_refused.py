"""A run cannot compress yet: a plan that asks for it is refused, not run without."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from isthmus.cli.planning import plan_for
from isthmus.errors import UserError
from isthmus.job import fleet_of, load_job, prepare
from isthmus.plan import Compression, save_plan
from isthmus.runtime.run import RunOptions, Watcher, train

from .commands import write_job


def test_a_compressed_plan_is_not_run(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path))
    prepared, fleet, path = prepare(job), fleet_of(job), tmp_path / "plan.json"
    plan = plan_for(prepared, fleet)
    for field in ("forward_compression", "backward_compression"):
        how = {field: Compression(codec="topk", ratio=100.0, wire_bytes=10)}
        edges = (msgspec.structs.replace(plan.replica.edges[0], **how), *plan.replica.edges[1:])
        packed = msgspec.structs.replace(plan, replicas=(msgspec.structs.replace(plan.replica, edges=edges),))
        with pytest.raises(UserError, match="edge 0 -> 1: compression: got 'topk', expected none"):
            train(prepared, packed, fleet, tmp_path / "run", RunOptions(), Watcher())
        save_plan(packed, path)
        with pytest.raises(UserError, match=r"plan\.json: .*compression: got 'topk'"):
            plan_for(prepared, fleet, path)
    assert not (tmp_path / "run").exists()
