"""A run's variables, as far as its coordinator has them: a module's first values, a checkpoint's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from pathlib import Path

from torch import Tensor

from isthmus.job import Prepared
from isthmus.job.first_weights import FirstWeights, first_weights
from isthmus.protocol.draws import Draw
from isthmus.training.checkpoint import OPTIMIZER, check_base, digest_of, read_manifest, rest
from isthmus.training.scaling import LOSS_SCALE, LossScale
from isthmus.training.snapshot import part_of
from isthmus.training.stored import Sent, StoredTensor
from isthmus.training.weights import resume


class ParameterStore:
    """A table of tensors: of those in files, where they lie.

    The module is built when something of it is wanted, and not before: of a large one that takes long, and a
    coordinator that was started again finds everything in its devices' memory."""

    def __init__(
        self,
        prepared: Prepared,
        written: frozenset[str],
        given: Mapping[str, Tensor] | None = None,
        noted: Callable[[str], None] = lambda text: None,
        folder: Path | None = None,
        begun: Callable[[], FirstWeights] | None = None,
    ) -> None:
        """`written`: names of all that training changes; `given`: all variables, in place of the module's first
        values; `folder`: where these are in a temporary file, None for the system's own place; `begun` gives them once,
        if they are being made already."""
        self._prepared = prepared
        self._noted = noted
        self._folder = folder
        self._begun = begun
        self._space: object = None  # what the module's first values are in
        self.draws: tuple[Draw, ...] = ()
        """Random draws, in order, that the module's first values are, once it is built."""
        self._written = written
        self._given = given
        self._found: Mapping[str, Sent] = {}
        self._others: Mapping[int, Mapping[str, Sent]] = {}
        """State of replicas but the first that a checkpoint holds for them alone."""
        self._rest: Mapping[str, Sent] | None = None
        self._base: Future[str] | None = None

    @property
    def base(self) -> str:
        """Digest of what is read again where it came from, once the module is built: no part of a checkpoint. It is
        found in the background: of a large model that takes as long as reading its files."""
        return self._base.result() if self._base is not None else ""

    @property
    def rest(self) -> Mapping[str, Sent]:
        """Variables that no stage uses or changes: they are part of a checkpoint all the same."""
        return self._complete()[1]

    def begin(self) -> None:
        """From the very beginning."""
        self._others = {}
        self._found, self._rest = self._built()

    def load(self, checkpoint: Path) -> None:
        """UserError when it is torn, or of another model or optimizer."""
        found, unused = self._complete()
        check_base(read_manifest(checkpoint), self.base, checkpoint)
        expected = self._written | unused.keys()
        self._found, self._others = resume(found, expected, self._prepared.job.optimizer, checkpoint)

    def reads(self, checkpoint: Path) -> bool:
        """Return whether values that training does not change are to be read from this checkpoint's files: others come
        from devices' memory once the run has begun."""
        kept = (t for name, t in self._found.items() if name not in self._written and not name.startswith(OPTIMIZER))
        return any(isinstance(t, StoredTensor) and t.path.parent == checkpoint for t in kept)

    def forget_others(self) -> None:
        """Forget the state of single replicas: it is in their memory now, or lost."""
        self._others = {}

    def of(
        self, names: Collection[str], prefixes: tuple[str, ...], *, replica: int, without: Collection[str]
    ) -> dict[str, Sent]:
        """Variables of these names, and all that begins with one of these; `without` some parts of the state."""
        if not self._found.keys() >= {name for name in names if part_of(name) not in without}:
            self._complete()
        values = {**self._found, **self._others.get(replica, {})}
        return {k: v for k, v in values.items() if (k in names or k.startswith(prefixes)) and part_of(k) not in without}

    def _complete(self) -> tuple[Mapping[str, Sent], Mapping[str, Sent]]:
        """All variables, and those that no stage holds."""
        if self._rest is None:
            built, self._rest = self._built()
            self._found = {**built, **self._found}
        return self._found, self._rest

    def _built(self) -> tuple[dict[str, Sent], dict[str, Sent]]:
        made, job = self._prepared, self._prepared.job
        found: dict[str, Sent] = {}
        found |= self._given if self._given is not None else self._first()
        # Tensors that are neither parameters nor buffers are the module's own again when it is built.
        constants = {op.target for op in (*made.captured.train.ops, *made.captured.eval.ops) if op.kind == "constant"}
        own = found.keys() - constants - made.captured.constants.keys()
        if (scaling := job.training.loss_scaling) is not None:
            found[LOSS_SCALE] = LossScale(scaling).state()
        unused = rest(found, set(self._written), own)
        if not job.model.base_is_kept:
            return found, unused
        self._base = _in_background(lambda: digest_of(unused))
        return found, {}

    def _first(self) -> dict[str, Sent]:
        found = first_weights(self._prepared, self._folder) if self._begun is None else self._begun()
        self._begun = None
        self._space, self.draws = found.space, found.draws
        if found.note:
            self._noted(found.note)
        return found.values


def _in_background(act: Callable[[], str]) -> Future[str]:
    """The process may end before it is done."""
    found: Future[str] = Future()

    def run() -> None:
        try:
            found.set_result(act())
        except Exception as e:  # raised where the result is wanted
            found.set_exception(e)

    threading.Thread(target=run, name="digest of the base", daemon=True).start()
    return found
