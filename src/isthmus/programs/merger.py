"""The merger of decoupled replicas: it decides when their changes are merged, and with which weights (Decoupled DiLoCo,
arXiv 2604.21428).

    waiting ──a replica joins──► training ──enough samples──► collecting ──all, or quorum and grace──► training
                                     └─ samples of the whole run, or all are ready ─► closing ──► ending ──► over

Fragments take turns. Nobody waits for a merge: replicas contribute after the step that they make, and go on. A merge
waits for those that have made a step since it was announced or since the merge before, so not for one that is away; it
ends when all of them have contributed, or when the quorum has and the grace is over. A contribution counts by the
samples that it was trained on. One that comes too late is part of the fragment's next merge: a slow replica gives less
often, and nothing that it has learned is lost. One that leaves is asked for all that is not merged: until it has given
that, what it gave before is in no merge, which would count twice.

A replica whose connection closes is out of every merge from then on. Its loss is noted once it is known how its process
ended, where that process is known to run. In the phase `ending` replicas receive the merged model, and hang up.

The trace of a run of merges has steps and contributions as the merger hears of them, merges, and what it sends. A real
run and a simulated one have the same, of the same names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from isthmus.errors import PeerError
from isthmus.programs.merging import Finish, OpenMerge
from isthmus.protocol.decoupled_events import (
    NOTHING_MERGED,
    CollectChanges,
    Contributed,
    Contribution,
    FragmentSent,
    LastStepMade,
    MergeChanges,
    MergedFragment,
    MergeRules,
    MergesDone,
    StepsMade,
)
from isthmus.session.program import OVER, OutOfPhase, Policy, Port, report
from isthmus.session.session import CLOSED, STARTING, Calls, Fault, Loss, Observation, Session
from isthmus.trace import Span, Track

MERGER = "merger"  # the device of merges, and the other end of contributions


class MergeTrace:
    """Gives each span to `add`, which any thread may call. Times are seconds of the host's clock, those of spans count
    since the first replica joined."""

    def __init__(self) -> None:
        self.add: Callable[[Span], None] | None = None  # None: nobody wants them
        self._origin_s: float | None = None
        self._since_s: dict[str, float] = {}
        """When each replica had all fragments, or had made a step: its next step began then."""

    def joined(self, replica: str, now_s: float) -> None:
        self._origin_s = now_s if self._origin_s is None else self._origin_s
        self._since_s[replica] = now_s

    def stepped(self, replica: str, steps: int, now_s: float) -> None:
        """A replica has made a step, the last of so many."""
        self._put(_span(replica, "compute", "step", steps - 1), self._since_s[replica], now_s)
        self._since_s[replica] = now_s

    def computed(self, span: Span, origin_s: float) -> None:
        """A device of a replica that is a pipeline has computed; its span counts from `origin_s`."""
        self._put(span, span.start_s + origin_s, span.end_s + origin_s)

    def contributed(self, replica: str, body: Contributed, size_bytes: int, now_s: float) -> None:
        """It left after the report of the step before it."""
        span = _span(replica, "send", "contribution", body.steps - 1, MERGER, size_bytes)
        self._put(span, self._since_s[replica], now_s)

    def sent(self, replica: str, sent: FragmentSent, start_s: float, end_s: float, size_bytes: int) -> None:
        """A fragment has left for a replica: all of it, or what has changed."""
        name = "fragment" if sent.whole else "change"
        self._put(_span(MERGER, "send", name, sent.merge, replica, size_bytes), start_s, end_s)
        if sent.first:
            self._since_s[replica] = end_s

    def merged(self, merge: int, opened_s: float, now_s: float) -> None:
        self._put(_span(MERGER, "control", f"merge {merge}", merge), opened_s, now_s)

    def _put(self, span: Span, start_s: float, end_s: float) -> None:
        if self.add is not None:
            since_s = self._origin_s or 0.0
            self.add(msgspec.structs.replace(span, start_s=start_s - since_s, end_s=end_s - since_s))


def _span(device: str, track: Track, name: str, step: int, other: str = "", size_bytes: int = 0) -> Span:
    """`step`: of merges and what is sent, the merge's number."""
    return Span(
        device=device, track=track, name=name, start_s=0, end_s=0, step=step, other=other, size_bytes=size_bytes
    )


_INTERVAL_DECAY = 0.5  # weight of the newest time between two merges in their mean
_SHORTEST_S = 1e-3  # between two looks at a merge that could not end
_QUORUM_TIMEOUT = 2.0  # times between two merges after which a quorum counts only replicas that show life
_FASTEST_STEP_S = 1e-3  # seconds per step that an absent replica is assumed to need where no replica's speed is known
_FASTER = 8  # times the fastest pace that was seen: what one that was away may have had


class _Member:
    def __init__(self, now_s: float, before: _Member | None, steps: int, fragments: int) -> None:
        """`before`: on the connection before. `steps` were made before this connection; before the first one, what
        was learned in them is merged or lost."""
        self.present = True  # whether merges count on it
        self.joined_s = now_s
        self.heard_s = before.heard_s if before is not None else now_s
        self.reports = 0  # steps that it has reported on this connection
        self.connections = before.connections + 1 if before is not None else 1
        self.merged_steps = before.merged_steps if before is not None else dict.fromkeys(range(fragments), steps)
        """Steps that it had made when it gave the newest contribution that is merged, by fragment."""
        self.leaves = False  # whether it was asked for all that it has, to end
        self.gave_all = False
        self.steps = steps
        self.shows_life = False  # whether it has made a step since the newest merge was announced
        self.is_ready = False  # whether it has made its last step

    def answers(self, *, last: bool) -> bool:
        """Return whether a merge is to wait for it: one that is ready may have nothing to give before the last one."""
        return last if self.is_ready else self.shows_life


@dataclass(kw_only=True)
class _FragmentMerge(OpenMerge):
    asked: CollectChanges
    invited: set[str]  # those that were asked for a contribution
    expected: set[str]  # those of them that it waits for
    answered: set[str] = field(default_factory=set)  # those that contributed since
    given: set[str] = field(default_factory=set)  # those of which there is what was asked for
    has_quorum: bool = False

    @property
    def outstanding(self) -> int:
        return len(self.expected - self.given)

    def forget(self, replica: str) -> None:
        self.invited.discard(replica)
        self.expected.discard(replica)


class MergerPort(Port, Protocol):
    """The merger asks this of its host. Where it has ended, `finish` says how, and replicas are to end."""

    def ask(self, replica: str, collect: CollectChanges) -> None:
        """Ask a replica for a contribution."""

    def let_go(self, replica: str) -> None:
        """End a replica that has contributed all that it had."""

    def send_all(self, replica: str) -> None:
        """Give a replica every fragment, whatever it was given before."""

    def stepped(self, replica: str, made: StepsMade) -> None:
        """A replica has made a step, which counts."""

    def admit(self, replica: str, body: Contributed) -> int:
        """Keep the changes of the contribution at hand, and return their bytes. PeerError for those that no replica can
        have made."""
        ...

    def merge(self, merge: MergeChanges) -> Mapping[str, str]:
        """Make an outer step; then every replica is to have the result. Return the replicas whose changes are not
        merged, as the weights would be too large, each with the reason."""
        ...


class Merger(Policy[MergerPort], Session):
    """Its host sets `port`, and says `clock` before each other call that may open or end a merge, and at `due_s`."""

    def __init__(
        self,
        rules: MergeRules,
        replicas: Collection[str],
        *,
        calls: bool = False,
        final_s: float | None = None,
        begun: MergesDone = NOTHING_MERGED,
    ) -> None:
        """`calls`: replicas are devices of a fleet, called whenever they are there; else each has one process, and no
        other one where that has ended. `final_s`: how long replicas may take to receive the merged model at the end;
        None: they do not get it. `begun`: from where a run goes on."""
        Policy.__init__(self, "waiting")
        Session.__init__(self, lambda text: self.port.note(text), timeout_s=rules.timeout_s, grace_s=0.0)
        self.rules, self.final_s, self.begun = rules, final_s, begun
        self.finish: Finish | None = None  # how the run ended, once nothing more is merged
        self.samples = begun.samples  # samples that all replicas have trained on so far
        self.merge = begun.merge  # number of the newest merge that was announced
        self._admissible = set(replicas)
        """All but those that sent what no replica can have done: these do not come back."""
        self._calls = calls
        self._processes = set[str]() if calls else set(replicas)  # replicas whose process is not known to have ended
        self._again = Calls()
        self._leaving: set[str] = set()  # devices that were asked to leave while they were called or at work
        self._due_s: float | None = None  # when time alone opens or ends a merge, or the run
        self._members: dict[str, _Member] = {}
        self._announced_s = 0.0
        self._step_s = math.inf  # seconds per step of the fastest replica, as far as is known
        self._interval_s = 0.0  # from one announcement to the next, as it was lately
        self._merged_samples = begun.samples  # samples of all replicas when the newest merge was announced
        self._turn = begun.merge % rules.fragments  # the fragment of the next merge
        self._open: _FragmentMerge | None = None
        self._held: list[dict[str, Contribution]] = [{} for _ in range(rules.fragments)]
        """Contributions that are not merged yet, by fragment and replica."""
        self.trace = MergeTrace()
        self.late = 0  # contributions that came after their merge had ended
        self._outcome: Literal["done", "interrupted"] = "done"

    @property
    def present(self) -> list[str]:
        """Replicas that merges count on, by name."""
        return sorted(name for name, member in self._members.items() if member.present)

    @property
    def expected(self) -> Collection[str]:
        return self._processes - self.connected

    @property
    def due_s(self) -> float | None:
        times_s = (self._due_s, super().due_s)
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def steps(self, replica: str) -> int:
        """Return the steps that it has made, as far as is known."""
        return self._members[replica].steps if replica in self._members else self.begun.steps.get(replica, 0)

    @property
    def merges_done(self) -> MergesDone:
        """Where the run is, if what is not merged yet is lost."""
        names = {*self._members, *self.begun.steps}
        steps = {replica: self.steps(replica) for replica in sorted(names)}
        return MergesDone(merge=self.merge, samples=self.samples, steps=steps)

    def check(self, replica: str, body: StepsMade | Contributed) -> None:
        """PeerError for figures that are not of what this replica can have done."""
        member, most = self._members[replica], self._most_steps(replica)
        least = 0 if isinstance(body, Contributed) else most if member.reports else 1
        if not least <= body.steps <= most:
            expected = f"at most {most}" if body.steps > most else f"at least {least}"
            raise PeerError(f"reported {body.steps} steps after {member.steps}, expected {expected}")
        each = self.rules.step_samples
        if isinstance(body, StepsMade):
            if each is not None and body.samples > each:
                raise PeerError(f"reported a step of {body.samples} samples, expected at most {each}")
            return
        if body.merge > self.merge:
            raise PeerError(f"contributed to merge {body.merge}, expected at most {self.merge}")
        numbers = set(body.fragments)
        if len(numbers) < len(body.fragments) or any(f >= self.rules.fragments for f in numbers):
            raise PeerError(f"contributed to fragments {list(body.fragments)}, expected some of {self.rules.fragments}")
        self._check_taken(member, body)
        for fragment, samples in zip(body.fragments, body.samples, strict=True):
            merged = member.merged_steps.get(fragment, 0)
            if body.steps <= merged:
                raise PeerError(f"contributed fragment {fragment} after {body.steps} steps again: it is merged already")
            if each is not None and samples > each * (body.steps - merged):
                limit = each * (body.steps - merged)
                raise PeerError(f"contributed fragment {fragment} of {samples} samples, expected at most {limit}")

    def _check_taken(self, member: _Member, body: Contributed) -> None:
        """Each connection gives every fragment once, and each merge one, but for the last."""
        fragments = self.rules.fragments
        most = self.merge + fragments * (member.connections + 1)
        if (found := body.taken_before + len(body.taken)) > most:
            raise PeerError(f"took {found} versions, expected at most {most}")
        for taken in body.taken:
            if taken.fragment >= fragments or taken.merge > self.merge or taken.steps > body.steps:
                raise PeerError(
                    f"took version {taken.merge} of fragment {taken.fragment} after {taken.steps} steps, expected one "
                    f"of {fragments} fragments, at most version {self.merge} and {body.steps} steps"
                )

    def _most_steps(self, replica: str) -> int:
        """The most that it can have made. On a connection each one is reported, nobody trains before the first one, and
        one that was away may have trained on."""
        member = self._members[replica]
        if member.reports or member.connections == 1:
            return member.steps + 1
        step_s = self._step_s if math.isfinite(self._step_s) else _FASTER * _FASTEST_STEP_S
        return member.steps + 1 + int(_FASTER * (self.now_s - member.heard_s) / step_s)

    # What the host says

    def clock(self, now_s: float) -> None:
        if self.over:
            return
        super().clock(now_s)
        if self.phase == "waiting" and self._due_s is None:
            self._due_s = now_s + STARTING * self.rules.timeout_s
        if self._due_s is None or now_s < self._due_s:
            return
        if self.phase == "waiting":
            self._finish(Finish("lost", f"no replica came within {self.rules.timeout_s:g} s"))
        elif self.phase == "ending":
            self.phase = OVER
        else:
            self._due_s = None
            self._look(grace_is_over=True)

    def joined(self, replica: str) -> None:
        """It has a connection: the first one, or one after another was lost."""
        if self.over:
            return
        if replica in self.connected:  # how its process ended was waited for, and it goes on
            self.lost(Loss(replica, CLOSED))
        before = self._members.get(replica)
        self._members[replica] = _Member(self.now_s, before, self.steps(replica), self.rules.fragments)
        self.connected.add(replica)
        self._processes.add(replica)
        self.trace.joined(replica, self.now_s)
        if self._open is not None:
            self._open.forget(replica)
        for held in self._held:
            held.pop(replica, None)  # it gives the same again
        if self.phase == "waiting":
            self.phase, self._due_s = "training", None
            self._announced_s = self.now_s if self.merge == self.begun.merge else self._announced_s
        if before is not None and self.finish is None:
            text = f"is back after {before.steps} steps: it takes the current fragments and goes on"
            self.port.note(f"{replica} {text}")
        self.port.send_all(replica)

    def failed(self, device: str, reason: str, fault: Fault, *, starts_again: bool = False) -> None:
        """Its process ends, and accuses no other replica. The exit is not noted besides."""
        self._ended(device)
        super().failed(device, reason, "device", starts_again=True)

    def heard(self, device: str, body: msgspec.Struct) -> None:
        try:
            super().heard(device, body)
        except (PeerError, OutOfPhase) as e:
            self.disbelieve(device, e)

    def is_late(self, device: str, body: msgspec.Struct) -> bool:
        return self.finish is not None or device not in self.present

    def looked(self, seen: Observation) -> None:
        super().looked(seen)
        for replica in filter(self._failures.silent, self.present):
            if self._members[replica].leaves:
                self.lost(Loss(replica, CLOSED))
            else:
                self.port.reject(replica, permanent=False)
                self._leave(replica)
        if self.finish is not None:
            return
        self._leaving |= seen.leaving & (self.connected | seen.starting)
        for replica in sorted(self._leaving):  # also one whose process connects later, or again
            self._release(replica)
        absent = self._admissible.intersection(seen.offers) - self.connected
        for device in self._again.due(absent, self.now_s):
            self._processes.add(device)
            self._leaving.discard(device)  # it left, and has come back
            self.port.note(f"{device} is here, and is called to train")
            self.port.call(device)

    def lost(self, loss: Loss) -> None:
        device, reason, permanent = loss.device, loss.reason, loss.permanent
        was_connected = device in self.connected
        self.forget(device)
        if device in self.seen.ended:
            self._ended(device)
        if permanent:
            self._admissible.discard(device)
            self._processes.discard(device)
        if permanent or device in self.present:
            self.port.reject(device, permanent=permanent)
        if was_connected and self.finish is None:
            self._note_loss(device, reason)
        elif permanent or not was_connected:
            self.port.note(f"{device}{' is left out' if permanent else ''}: {reason}")
        self._leave(device)
        if self.finish is not None or self.connected:
            return
        if not (self._admissible if self._calls else self._processes):
            self._finish(Finish("lost", "every replica's process has ended"))
        elif was_connected and self._calls:
            self.port.note("no device is left: the run waits for one; if it is stopped, what is merged is saved")

    def stop(self) -> None:
        """Somebody wants the run to end."""
        if self.finish is not None:
            return
        self._outcome = "interrupted"
        if not self.present:
            self._open = None
            self._finish()
        elif self.phase != "closing":
            self._announce(tuple(range(self.rules.fragments)), last=True)

    def missed(self) -> tuple[()]:
        """A replica may be away for as long as it likes."""
        return ()

    def _ended(self, replica: str) -> None:
        """Its process has ended other than well, or is about to."""
        if replica in self._processes:
            self._processes.remove(replica)
            self._again.failed(replica, self.now_s)

    def _leave(self, replica: str) -> None:
        if self.over or replica not in self.present:
            return
        self._members[replica].present = False
        if self._open is not None:
            self._open.expected.discard(replica)
        if self.phase == "ending":
            self.phase = self.phase if self.present else OVER
            return
        self._look()
        if self.phase == "training" and self.present:
            self._close()  # the others may all be ready
        elif self.present or self.over:
            return
        elif self.phase == "closing":
            self._finish()
        else:
            self.phase, self._open = "waiting", None
            self._due_s = self.now_s + self.rules.timeout_s

    def _release(self, replica: str) -> None:
        """Have it contribute all that it has, and end; once on each connection."""
        member = self._members.get(replica)
        if member is None or not member.present or member.leaves:
            return
        member.leaves = True
        if member.gave_all:
            self.port.let_go(replica)
            return
        fragments = tuple(range(self.rules.fragments))
        self.port.ask(replica, CollectChanges(merge=self.merge, fragments=fragments, last=True))

    def _note_loss(self, replica: str, reason: str) -> None:
        leaves = self._members[replica].leaves
        self.port.note(f"{replica} {'has left' if leaves else f'is lost: {reason}; the others go on'}")

    # What replicas report

    @report(StepsMade, "training", "collecting", "closing")
    def stepped(self, replica: str, made: StepsMade) -> None:
        self.check(replica, made)
        member = self._members[replica]
        self.samples += made.samples * max(1, made.steps - member.steps)  # also those made without a connection
        if made.steps <= member.steps:
            member.merged_steps = {}  # it has begun anew: one that goes on has made another step
        member.steps, member.shows_life = made.steps, True
        member.heard_s, member.reports = self.now_s, member.reports + 1
        self.trace.stepped(replica, made.steps, self.now_s)
        if member.reports > 1 and self.now_s > member.joined_s:
            self._step_s = min(self._step_s, (self.now_s - member.joined_s) / member.reports)
        if self._open is not None and replica in self._open.invited:
            self._open.expected.add(replica)  # it will answer: what it was asked is on its way
        if self.phase == "training":
            self._next()
        self.port.stepped(replica, made)

    @report(LastStepMade, "training", "collecting", "closing")
    def last_step(self, replica: str, body: LastStepMade) -> None:
        self._members[replica].is_ready = True
        if self.phase == "training":
            self._close()

    @report(Contributed, "training", "collecting", "closing")
    def contributed(self, replica: str, body: Contributed) -> None:
        self.check(replica, body)
        self.trace.contributed(replica, body, self.port.admit(replica, body), self.now_s)
        for fragment, samples in zip(body.fragments, body.samples, strict=True):
            self._held[fragment][replica] = Contribution(
                replica=replica,
                number=body.merge,
                steps=body.steps,
                samples=samples,
                taken=body.taken,
                taken_before=body.taken_before,
            )
        member = self._members[replica]
        member.gave_all |= body.last
        if self._open is not None and body.merge == self._open.asked.merge:
            self._open.answered.add(replica)
        elif not member.leaves:
            self.late += 1
        self._look()
        if member.leaves and body.last:  # what was on its way when it was asked to leave is not that
            self.port.let_go(replica)

    # Merges

    def _next(self) -> None:
        """Announce a merge where one is due. No merge is open."""
        if self._is_over:
            self._close()
        elif self.samples - self._merged_samples >= self.rules.merge_every:
            turn, self._turn = self._turn, (self._turn + 1) % self.rules.fragments
            self._announce((turn,), last=False)
            self._look()  # all may have given before

    def _close(self) -> None:
        """Announce the last merge where nobody is to train on. Any other one comes with a step: replicas that are back
        after all were lost may have made none since, though samples for a merge are there. No merge is open."""
        if self.present and self._is_over:
            self._announce(tuple(range(self.rules.fragments)), last=True)

    @property
    def _is_over(self) -> bool:
        """Return whether nobody is to train on."""
        return self._are_ready or (self.rules.samples is not None and self.samples >= self.rules.samples)

    @property
    def _are_ready(self) -> bool:
        """Return whether nobody trains on."""
        return all(self._members[name].is_ready for name in self.present)

    def _announce(self, fragments: tuple[int, ...], *, last: bool) -> None:
        self.merge += 1
        lately_s = self.now_s - self._announced_s
        first = self.merge == self.begun.merge + 1
        self._interval_s += (lately_s - self._interval_s) * (1.0 if first else _INTERVAL_DECAY)
        self._announced_s, self._merged_samples = self.now_s, self.samples
        invited = {name for name in self.present if not self._members[name].leaves}
        self._open = _FragmentMerge(
            opened_s=self.now_s,
            asked=CollectChanges(merge=self.merge, fragments=fragments, last=last),
            invited=invited,
            expected={name for name in invited if self._members[name].answers(last=last)},
        )
        for member in self._members.values():
            member.shows_life = False
        self.phase = "closing" if last else "collecting"
        self._due_s = self.now_s + (self._grace_s if last else _QUORUM_TIMEOUT * self._interval_s)
        for name in sorted(invited):
            self.port.ask(name, self._open.asked)

    @property
    def _grace_s(self) -> float:
        return self.rules.grace * self._interval_s

    def _count(self, opened: _FragmentMerge) -> None:
        """Count the replicas of which there is what it asked for, and its quorum: as many as are at work if those are
        fewer."""
        held = [self._ready(fragment) for fragment in opened.asked.fragments]
        opened.given = opened.answered if opened.asked.last else set.intersection(*held)
        there = {name for name in self.present if self._members[name].shows_life} | opened.given
        if self.now_s - opened.opened_s < _QUORUM_TIMEOUT * self._interval_s:
            there |= opened.expected
        opened.done, opened.enough = len(opened.given), max(1, min(self.rules.quorum, len(there)))

    def _look(self, *, grace_is_over: bool = False) -> None:
        """End the open merge where nothing more is to be waited for."""
        if (opened := self._open) is None:
            return
        self._count(opened)
        asked, are_ready = opened.asked, self._are_ready
        if not opened.given and self.present and opened.invited.isdisjoint(self.present):
            self._ask_again(asked)
            return
        if grace_is_over and not opened.given and are_ready and not asked.last:
            self._open, self.phase = None, "training"  # who could give to it is lost
            self._next()
            return
        idle = asked.last and are_ready  # waiting for all costs nobody a step
        why = opened.why_over(self.now_s, grace_is_over=grace_is_over and not idle)
        if why is None or not opened.given:
            reached = opened.done >= opened.enough and not opened.has_quorum
            if grace_is_over or reached:
                opened.has_quorum |= reached
                self._due_s = self.now_s + max(self._grace_s, _SHORTEST_S)
            return
        self._open, self._due_s = None, None
        found = [self._taken_out(fragment, last=asked.last) for fragment in asked.fragments]
        fragments = tuple(fragment for fragment in found if fragment.contributions)
        refused = self.port.merge(MergeChanges(merge=asked.merge, fragments=fragments, samples=self.samples))
        self._admissible -= refused.keys()
        self.trace.merged(asked.merge, opened.opened_s, self.now_s)
        if asked.last:
            self._finish()
        else:
            self.phase = "training"
            self._next()
        for replica, why_not in refused.items():
            if self.over:
                self.port.note(f"{replica} is left out: {why_not}")
            else:
                self.disbelieve(replica, why_not)

    def _ask_again(self, asked: CollectChanges) -> None:
        """All that were asked for a merge are lost, or began again; those that came since were not asked."""
        self._open, self._due_s, self.phase = None, None, "training"
        if asked.last:
            self._announce(asked.fragments, last=True)
        else:
            self._next()

    def _ready(self, fragment: int) -> set[str]:
        """Replicas whose contributions to a fragment can be merged: not one that is about to give more of the same."""
        leaving = (name for name, m in self._members.items() if m.present and m.leaves and not m.gave_all)
        return self._held[fragment].keys() - leaving

    def _taken_out(self, fragment: int, *, last: bool) -> MergedFragment:
        """The contributions to a fragment of this merge; all to the last one."""
        all_held = self._held[fragment]
        held = {name: all_held.pop(name) for name in (set(all_held) if last else self._ready(fragment))}
        for name, contribution in held.items():
            self._members[name].merged_steps[fragment] = contribution.steps
        contributions = tuple(held[name] for name in sorted(self._admissible.intersection(held)))
        return MergedFragment(fragment=fragment, contributions=contributions)

    def _finish(self, finish: Finish | None = None) -> None:
        for replica in sorted(self.connected.difference(self.present)):
            self.forget(replica)
            self._note_loss(replica, CLOSED)
        self.phase, self._due_s = OVER, None
        if self.final_s is not None and self.present:
            self.phase, self._due_s = "ending", self.now_s + self.final_s
        self.finish = finish or Finish(self._outcome)
        self.port.ended(self.finish.reason)
