"""What the commands of a fleet's folder refuse, and say."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.errors import UserError
from isthmus.runtime.service.fleet_state import FleetState


def test_one_coordinator_serves_a_folder(tmp_path: Path) -> None:
    first, second = FleetState(tmp_path), FleetState(tmp_path)
    with first.served(), pytest.raises(UserError, match="another coordinator serves this fleet"), second.served():
        pass
    with second.served():
        pass
    first.close()
    second.close()
