"""Calls operators of the allow-list as a hostile graph would; a program of its own, since a call may end the process.

`python hostile_calls.py SEED CALLS SECONDS [NAME ...]` makes `CALLS` calls of every operator, again with the next seed
while seconds are left, and prints what it found, one line of JSON each. Calls go the way that a device goes, from the
graph's JSON form (`hostile_arguments`).

Inputs lie against pages that nobody may touch, and each call runs twice, with two fillings of freshly allocated
memory: a kernel that reads beyond a tensor ends the process, one that returns what it has not written gives
two results. Results are compared bit by bit, with all of the memory that they lie in.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import signal
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.fx.experimental.symbolic_shapes  # autograd imports it: once, not in every child
from hostile_arguments import FLOATS, Call, Input
from torch import Tensor
from torch.utils._pytree import tree_leaves

from isthmus.errors import UserError
from isthmus.graph.operators import ALLOWED, IN_PLACE, bind, is_callable, operator_of

M_PERTURB, M_MMAP_THRESHOLD = -6, -3
PAGE, SLOT_PAGES, SLOTS = 4096, 4, 24
CHILD_BYTES = 600 << 20
COMPARED_BYTES = 1 << 20
LONGEST_S = 0.3
"""Of computing, then the next call: a long computation is not what is looked for."""
LARGER_MEMORY = {"col2im", "im2col", "embedding_bag", "ldexp", "mse_loss", "multilabel_margin_loss", "smooth_l1_loss"}
"""Operators whose results lie in more memory than they fill: no view and no message reaches the rest."""
RACING = {"max_unpool2d", "max_unpool3d"}
"""Operators whose threads may write one element, each a value of the input."""

libc = ctypes.CDLL(None)


class Arena:
    """Memory for inputs, with an inaccessible page on both sides of each."""

    def __init__(self) -> None:
        self._stride = (SLOT_PAGES + 1) * PAGE
        self._map = mmap.mmap(-1, self._stride * SLOTS + PAGE)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for number in range(SLOTS + 1):
            assert libc.mprotect(ctypes.c_void_p(self._start + number * self._stride), PAGE, 0) == 0

    def place(self, slot: int, value: Tensor, filling: int, *, at_end: bool) -> Tensor:
        """A flat tensor with these values, beside a page that nobody may touch; `filling` is on its other side."""
        size = value.numel() * value.element_size()
        if slot >= SLOTS or not 0 < size <= SLOT_PAGES * PAGE:
            return value.clone()
        first = PAGE + slot * self._stride
        ctypes.memset(self._start + first, filling, SLOT_PAGES * PAGE)
        offset = first + (SLOT_PAGES * PAGE - size if at_end else 0)
        placed = torch.frombuffer(self._map, dtype=value.dtype, count=value.numel(), offset=offset)
        return placed.copy_(value)


class Result(NamedTuple):
    """A tensor as it lies in its memory."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    reach: bytes
    """From its first element to its last, gaps included: what `as_strided` lets a graph see."""
    rest: bytes
    """Of the memory that it lies in."""


class Attempt:
    """One call, to be made with two fillings of memory."""

    def __init__(self, target: str, seed: int, arena: Arena) -> None:
        self.call = Call(target, seed)
        draw = self.call.random
        self._arena = arena
        self._at_end = draw.random() < 0.6
        self._in_place = target.split(".")[0] in IN_PLACE
        learns = draw.random() < 0.5
        self._learn = [learns and draw.random() < 0.8 for _ in self.call.inputs]
        self._gradient = draw.choice(("ones", "ones", "one", "transposed", *FLOATS))
        self._roots = draw.getrandbits(4) or 1

    def run(self, filling: int) -> list[Result]:
        """Results, and gradients if any are taken; freshly allocated memory holds `filling`."""
        libc.mallopt(M_PERTURB, filling)
        torch.default_generator.manual_seed(0)
        inputs = [self._place(slot, given, filling) for slot, given in enumerate(self.call.inputs)]
        leaves = [t for t in inputs if t.requires_grad]
        if self._in_place:
            inputs = [t.clone() if t.requires_grad else t for t in inputs]  # no leaf may be written
        args, kwargs = bind(self.call.op, lambda ref: inputs[ref.index], 1, torch.device("cpu"))
        result = operator_of(self.call.op.target)(*args, **kwargs)
        results = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        for tensor in results:
            check_inside(tensor)
        roots = [t for i, t in enumerate(results) if t.requires_grad and self._roots >> i % 4 & 1]
        if roots and leaves:
            given = [self._grad(t) for t in roots]
            results += [t for t in torch.autograd.grad(roots, leaves, given, allow_unused=True) if t is not None]
        return [as_it_lies(t) for t in results]

    def _place(self, slot: int, given: Input, filling: int) -> Tensor:
        flat = self._arena.place(slot, given.memory, filling, at_end=self._at_end)
        placed = flat.as_strided(given.shape, given.stride, given.offset)
        placed = placed.conj() if given.conjugate else placed
        learns = self._learn[slot] and (placed.is_floating_point() or placed.is_complex())
        return placed.detach().requires_grad_() if learns else placed

    def _grad(self, root: Tensor) -> Tensor:
        match self._gradient:
            case "ones":
                return torch.ones_like(root)
            case "one":
                return torch.ones((), dtype=root.dtype).expand(root.shape)
            case "transposed":
                return torch.ones(root.shape[::-1], dtype=root.dtype).permute(*reversed(range(root.dim())))
            case value:
                return torch.full_like(root, value)


def as_it_lies(tensor: Tensor) -> Result:
    layout = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
    if not tensor.numel():  # nothing looks into what is empty
        return Result(*layout, b"", b"")
    memory, item = tensor.untyped_storage(), tensor.element_size()
    start, end = tensor.storage_offset() * item, (tensor.storage_offset() + last_element(tensor) + 1) * item
    reach, before, behind = (
        ctypes.string_at(memory.data_ptr() + first, min(last - first, COMPARED_BYTES)) if last > first else b""
        for first, last in ((start, end), (0, start), (end, memory.nbytes()))
    )
    return Result(*layout, reach, before + behind)


def last_element(tensor: Tensor) -> int:
    """How far it lies behind the first."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def check_inside(tensor: Tensor) -> None:
    """AssertionError unless every element of the tensor lies in its storage."""
    assert tensor.layout is torch.strided and tensor.device.type == "cpu", f"{tensor.layout} {tensor.device}"
    end = (tensor.storage_offset() + last_element(tensor) + 1) * tensor.element_size()
    inside = end <= tensor.untyped_storage().nbytes()
    assert tensor.numel() == 0 or (inside and tensor.storage_offset() >= 0 and min(tensor.stride(), default=0) >= 0)


def outcome(target: str, seed: int, arena: Arena) -> str | None:
    """What is wrong with a call; None for a result or an error."""
    attempt = Attempt(target, seed, arena)
    try:
        first, second = attempt.run(0x11), attempt.run(0xEE)
    except AssertionError as e:
        return f"a result outside of its memory: {e}: {attempt.call}"
    except (RuntimeError, UserError, ValueError, TypeError, LookupError, ArithmeticError, MemoryError):
        return None
    if target.split(".")[0] in LARGER_MEMORY:
        first, second = ([result._replace(rest=b"") for result in results] for results in (first, second))
    return None if first == second else f"memory that nothing has written: {attempt.call}"


def operators(names: list[str]) -> list[str]:
    """Every overload that a graph may call, such as `linear.default`."""
    allowed = sorted({entry.split(".")[0] for entry in ALLOWED})
    found = [f"{name}.{overload}" for name in allowed for overload in getattr(torch.ops.aten, name).overloads()]
    return [f for f in found if is_callable(f"aten.{f}") and (not names or f in names or f.split(".")[0] in names)]


def child(targets: list[str], first: tuple[int, int], seed: int, calls: int, at: mmap.mmap) -> None:
    """Call the operators from `first` on; `at` says which call is running, should it end the process."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * PAGE + CHILD_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
    arena, (operator, start) = Arena(), first
    for number, target in enumerate(targets[operator:], start=operator):
        torch.set_num_threads(2 if seed % 4 == 3 and target.split(".")[0] not in RACING else 1)
        for call in range(start if number == operator else 0, calls):
            at[:16] = struct.pack("qq", number, call)
            signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_S)
            wrong = outcome(target, seed * 1000 + call, arena)
            if wrong is not None:
                print(json.dumps([target, seed * 1000 + call, wrong]), flush=True)


def search(targets: list[str], seed: int, calls: int) -> Iterator[tuple[str, int, str]]:
    """Crashes of one round over all operators."""
    at, first = mmap.mmap(-1, 16), (0, 0)
    while first[0] < len(targets):
        pid = os.fork()
        if pid == 0:
            try:
                child(targets, first, seed, calls, at)
            except BaseException:
                print(json.dumps(["?", 0, traceback.format_exc()]), flush=True)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            return
        number, call = struct.unpack("qq", at[:16])
        if os.WTERMSIG(status) == signal.SIGVTALRM:
            first = (number, call + 1)
        else:
            yield targets[number], seed * 1000 + call, signal.Signals(os.WTERMSIG(status)).name
            first = (number + 1, 0)


def main() -> None:
    seed, calls, seconds, *names = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    targets, end, now = operators(names), time.monotonic() + float(seconds), int(seed)
    while True:
        for found in search(targets, now, int(calls)):
            print(json.dumps(found), flush=True)
        now += 1
        if time.monotonic() >= end:
            print(json.dumps(["done", len(targets), now - int(seed)]), flush=True)
            return


if __name__ == "__main__":
    main()
