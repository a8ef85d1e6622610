"""S-SGD without overlap: all gradients are averaged in one message when backward is over (DreamDDP, Eq. 3)."""

from __future__ import annotations

from isthmus.sync.every_step import EveryStep
from isthmus.sync.mode import Setting


class SSgd(EveryStep):
    """The baseline that hides nothing."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._everything = list(reversed(range(len(setting.model.layers))))

    def ready(self, number: int) -> None:
        """Nothing leaves before all is there."""

    def backward_ended(self) -> None:
        self._send(self._everything)
        super().backward_ended()
