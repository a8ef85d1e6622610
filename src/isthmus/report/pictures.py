"""Pictures of plans and runs. Matplotlib is imported when one is drawn: it takes half a second of a core."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus.report.fleet_picture import draw_plan as draw_plan
    from isthmus.report.timeline import draw_faults as draw_faults
    from isthmus.report.timeline import draw_loss as draw_loss
    from isthmus.report.timeline import draw_timeline as draw_timeline
else:

    def _later(module: str, name: str, does: str) -> Callable[..., None]:
        def draw(*args: object, **options: object) -> None:
            getattr(importlib.import_module(f"isthmus.report.{module}"), name)(*args, **options)

        draw.__doc__ = does
        return draw

    draw_plan = _later("fleet_picture", "draw_plan", "Draw a plan on its fleet: every link's bandwidth.")
    draw_faults = _later("timeline", "draw_faults", "Draw a run's steps over time, and what struck it.")
    draw_loss = _later("timeline", "draw_loss", "Draw training loss and held-out loss over the steps.")
    draw_timeline = _later("timeline", "draw_timeline", "Draw typical steps, below the same as predicted.")
