"""A port that writes down what a program asks."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.errors import UserError
from isthmus.protocol.generation import Prompt

Asked = tuple[object, ...]


class ServingRecorder:
    """`chains` are what `plan` answers, one after another; a text is the reason why there is none."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.chains: list[Sequence[str] | str] = []

    def took(self) -> list[Asked]:
        """Return what was asked since the last call."""
        taken, self.asked = self.asked, []
        return taken

    def call(self, device: str) -> None:
        self.asked.append(("call", device))

    def note(self, text: str) -> None:
        self.asked.append(("note", text))

    def ended(self, reason: str) -> None:
        self.asked.append(("ended", reason))

    def plan(self, devices: Sequence[str]) -> Sequence[str]:
        self.asked.append(("plan", *devices))
        found = self.chains.pop(0)
        if isinstance(found, str):
            raise UserError(found)
        return found

    def load(self, chain: Sequence[str], epoch: int) -> None:
        self.asked.append(("load", *chain, epoch))

    def start(self, prompt: Prompt, made: Sequence[int]) -> None:
        self.asked.append(("start", prompt.number, *made))

    def forget(self, number: int) -> None:
        self.asked.append(("forget", number))

    def deliver(self, number: int, token: int, *, last: bool) -> None:
        self.asked.append(("deliver", number, token, last))

    def refuse(self, number: int, reason: str, *, of_request: bool = False) -> None:
        self.asked.append(("refuse", number, reason, of_request))
