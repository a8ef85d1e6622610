"""A port that writes down what the merger of decoupled replicas asks, or a replica."""

from __future__ import annotations

from isthmus.protocol.decoupled_events import (
    CollectChanges,
    FinishMerges,
    FragmentSent,
    LastStepMade,
    MergeChanges,
    StepsMade,
)

Asked = tuple[object, ...]


class Recorder:
    """A merger's port, and a replica's: it writes down what is asked."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []

    def took(self) -> list[Asked]:
        """Return what was asked since the last call."""
        taken, self.asked = self.asked, []
        return taken

    def ask(self, replica: str, collect: CollectChanges) -> None:
        self.asked.append(("ask", replica, collect))

    def let_go(self, replica: str) -> None:
        self.asked.append(("let go", replica))

    def send_all(self, replica: str) -> None:
        self.asked.append(("send all", replica))

    def merge(self, merge: MergeChanges) -> None:
        self.asked.append(("merge", merge))

    def note(self, text: str) -> None:
        self.asked.append(("note", text))

    def finished(self, finish: FinishMerges) -> None:
        self.asked.append(("finished", finish))

    def take(self, sent: FragmentSent) -> None:
        self.asked.append(("take", sent))

    def train(self, samples: int) -> None:
        self.asked.append(("train", samples))

    def contribute(self, collect: CollectChanges) -> None:
        self.asked.append(("contribute", collect))

    def say(self, body: StepsMade | LastStepMade) -> None:
        self.asked.append(("say", body))

    def stop(self) -> None:
        self.asked.append(("stop",))
