"""Calls operators of the allow-list as a hostile graph would; a program of its own, since a call may end the process.

`python hostile_calls.py SEED CALLS SECONDS` makes `CALLS` calls of every operator, again with the next seed while
seconds are left, and prints what it found, one line of JSON each. A call is one of `operator_calls.json` with some
of its arguments replaced, or made up from the schema. It goes the way that a device goes, from the graph's JSON form.

Inputs lie against pages that nobody may touch, and each call runs twice, with two fillings of freshly allocated
memory: a kernel that reads beyond a tensor ends the process, one that returns what it has not written gives
two results.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import random
import resource
import signal
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.fx.experimental.symbolic_shapes  # autograd imports it: once, not in every child
from torch import Tensor
from torch.utils._pytree import tree_leaves

from isthmus.errors import UserError
from isthmus.graph.allowlist import ALLOWED
from isthmus.graph.operators import is_callable, operator_of, overload_of
from isthmus.graph.opgraph import DTYPE_BYTES, Arg, ArgList, Named, Op, Ref
from isthmus.graph.resolve import bind

CALLS: dict[str, list] = json.loads(Path(__file__).with_name("operator_calls.json").read_text())
DTYPES = tuple(DTYPE_BYTES)
INTEGERS = (-(2**63), 2**63 - 1, 2**62, -(2**62), 2**40, 2**33 + 1, 2**31, -(2**31), 65536, -1, -2, 0, 1, 2, 3, 7)
FLOATS = (0.0, -1.0, 0.5, 2.0, 3.7, 1e30, -1e30, 5e-324, 1e308, math.nan, math.inf, -math.inf)
TEXTS = ("", "x", "mean", "sum", "ij,jk", "fro", "nuc", "circular", "reflect", "same", "floor", "meta", "cpu", "amax")
M_PERTURB, M_MMAP_THRESHOLD = -6, -3
PAGE, SLOT_PAGES, SLOTS = 4096, 4, 24
CHILD_BYTES = 600 << 20

libc = ctypes.CDLL(None)


class Arena:
    """Memory for inputs, with an inaccessible page on both sides of each."""

    def __init__(self) -> None:
        self._stride = (SLOT_PAGES + 1) * PAGE
        self._map = mmap.mmap(-1, self._stride * SLOTS + PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for number in range(SLOTS + 1):
            assert libc.mprotect(ctypes.c_void_p(start + number * self._stride), PAGE, 0) == 0

    def place(self, slot: int, value: Tensor, *, at_end: bool) -> Tensor:
        """A flat tensor with these values, beside a page that nobody may touch."""
        size = value.numel() * value.element_size()
        if slot >= SLOTS or not 0 < size <= SLOT_PAGES * PAGE:
            return value.clone()
        offset = PAGE + slot * self._stride + (SLOT_PAGES * PAGE - size if at_end else 0)
        placed = torch.frombuffer(self._map, dtype=value.dtype, count=value.numel(), offset=offset)
        return placed.copy_(value)


class Call:
    """One call of an operator in a graph's JSON form, drawn from a seed."""

    def __init__(self, target: str, seed: int, arena: Arena) -> None:
        self.random = random.Random(f"{target}/{seed}")
        self.values: list[tuple[Tensor, tuple[int, ...]]] = []
        """Flat values and shape of each input."""
        self._arena = arena
        self._at_end = self.random.random() < 0.6
        known = CALLS.get(target)
        if known and self.random.random() < 0.85:
            self.changes = self.random.choice((0.0, 0.05, 0.1, 0.2, 0.3, 0.5))
            args, kwargs = self.random.choice(known)
            made, named = [self._known(a) for a in args], {k: self._known(v) for k, v in kwargs.items()}
        else:
            made, named = self._from_schema(f"aten.{target}")
        self.op = Op(name="o", kind="operator", target=f"aten.{target}", args=tuple(made), kwargs=named)
        self.backward = self.random.random() < 0.4

    def run(self, filling: int) -> list[Tensor]:
        """Results, and gradients if any are taken; freshly allocated memory holds `filling`."""
        libc.mallopt(M_PERTURB, filling)
        torch.default_generator.manual_seed(0)
        inputs: list[Tensor] = []
        for slot, (flat, shape) in enumerate(self.values):
            placed = self._arena.place(slot, flat, at_end=self._at_end)
            placed = placed[: math.prod(shape)].view(shape)
            floating = placed.dtype.is_floating_point or placed.dtype.is_complex
            inputs.append(placed.requires_grad_() if self.backward and floating else placed)
        args, kwargs = bind(self.op, lambda ref: inputs[ref.index], 1, torch.device("cpu"))
        result = operator_of(self.op.target)(*args, **kwargs)
        results = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        for tensor in results:
            check_inside(tensor)
        roots, leaves = [t for t in results if t.requires_grad], [t for t in inputs if t.requires_grad]
        if roots and leaves:
            ones = [torch.ones_like(t) for t in roots]
            results += [t for t in torch.autograd.grad(roots, leaves, ones, allow_unused=True) if t is not None]
        return [t.detach().clone() for t in results if t.numel() < 100_000 and t.layout is torch.strided]

    def _tensor(self, dtype: str, shape: list[int], given: list | None, *, hostile: bool) -> Ref:
        draw, count = self.random, max(math.prod(shape), 1)
        kind = getattr(torch, dtype)
        generator = torch.Generator().manual_seed(draw.getrandbits(30))
        if given is not None and len(given) == count:
            flat = torch.tensor(given, dtype=kind)
        elif kind.is_floating_point or kind.is_complex:
            flat = torch.randn(count, generator=generator).to(kind)
        else:
            flat = torch.randint(0, 2 if kind is torch.bool else 3, (count,), generator=generator).to(kind)
        for _ in range(draw.choice((1, 2, count)) if hostile and count < 1000 else 0):
            flat[draw.randrange(count)] = self._element(kind)
        self.values.append((flat, tuple(shape)))
        return Ref("t", len(self.values) - 1)

    def _element(self, kind: torch.dtype) -> Tensor:
        if kind.is_floating_point or kind.is_complex:
            return torch.tensor(self.random.choice(FLOATS), dtype=torch.float64).to(kind)
        return torch.tensor(self.random.choice(INTEGERS)).to(kind)

    def _known(self, given: object) -> Arg:
        """A value of `operator_calls.json`, changed by chance."""
        draw, changed = self.random, self.random.random() < self.changes
        match given:
            case {"t": dtype, "s": shape}:
                return self._known_tensor(str(dtype), [*shape], given.get("v"), changed=changed)
            case {"d": name}:
                return Named("dtype", draw.choice(DTYPES) if changed else str(name))
            case {"m": name}:
                return Named("memory_format", str(name))
            case list():
                items = [self._known(v) for v in given]
                if changed and items:
                    items = draw.choice((items[:-1], [*items, items[-1]], [items[0]] * len(items), []))
                return ArgList(tuple(items))
            case bool() if changed:
                return not given
            case int() if changed:
                return draw.choice((*INTEGERS, given - 1, given + 1, given + 2))
            case float() if changed:
                return number(draw.choice(FLOATS))
            case str() if changed:
                return draw.choice(TEXTS)
            case None if changed:
                some = self._tensor(draw.choice(("float32", "int64")), [3], None, hostile=True)
                return draw.choice((None, True, 0.5, ArgList((1, 2)), some, *INTEGERS))
        return number(given) if isinstance(given, float) else given

    def _known_tensor(self, dtype: str, shape: list[int], given: list | None, *, changed: bool) -> Ref:
        draw, how = self.random, self.random.randrange(5) if changed else None
        if how == 0 and shape:
            axis = draw.randrange(len(shape))
            shape[axis] = draw.choice((0, 0, 1, 2, 3, shape[axis] + 1, shape[axis] * 2))
        elif how == 1:
            shape = shape[:-1] if draw.random() < 0.5 else [*shape, draw.choice((0, 1, 2))]
        elif how == 2:
            dtype = draw.choice(DTYPES)
        elif how == 3:
            shape = [draw.choice((0, 1, 2, 3)) for _ in range(draw.randrange(6))]
        return self._tensor(dtype, shape, given, hostile=how == 4)

    def _from_schema(self, target: str) -> tuple[list[Arg], dict[str, Arg]]:
        draw, args, kwargs = self.random, list[Arg](), dict[str, Arg]()
        common = [draw.choice((0, 1, 2, 3, 4)) for _ in range(draw.choice((0, 1, 1, 2, 2, 3, 4, 5)))]
        by_position = True
        for argument in overload_of(target)._schema.arguments:
            if argument.has_default_value() and draw.random() < 0.5:
                by_position = False
                continue
            value = self._of_type(str(argument.type), str(argument.real_type), common)
            if by_position and not argument.kwarg_only:
                args.append(value)
            else:
                kwargs[argument.name] = value
        return args, kwargs

    def _of_type(self, kind: str, real: str, common: list[int]) -> Arg:
        draw = self.random
        if kind.startswith("Optional["):
            return None if draw.random() < 0.5 else self._of_type(kind[9:-1], real, common)
        if kind.startswith("List["):
            length = draw.choice((0, 1, 1, 2, 2, 3, 4, 5, 6))
            return ArgList(tuple(self._of_type(kind[5:-1], real, common) for _ in range(length)))
        if kind == "Tensor":
            dtype = draw.choices(("float32", "int64", *DTYPES), (8, 5, *[1] * len(DTYPES)))[0]
            shape = common if draw.random() < 0.7 else [draw.choice((0, 1, 2, 3)) for _ in range(draw.randrange(6))]
            return self._tensor(dtype, [*shape], None, hostile=draw.random() < 0.3)
        if draw.random() < 0.9 and kind != "number":
            if "ScalarType" in real:
                return Named("dtype", draw.choice(DTYPES))
            if "MemoryFormat" in real:
                return Named("memory_format", "channels_last")
            if "Layout" in real:
                return Named("layout", "strided")
            if kind == "Device":
                return Named("device", "stage")
        if kind == "int":
            return draw.choice((0, 1, 2, 3, -1)) if draw.random() < 0.6 else draw.choice(INTEGERS)
        numbers = (*FLOATS, *INTEGERS)
        choices: dict[str, tuple[object, ...]] = {"float": FLOATS, "number": numbers, "bool": (True, False)}
        found = draw.choice(choices.get(kind, TEXTS))
        return number(found) if isinstance(found, float) else found


def number(value: float) -> float | Named:
    return value if math.isfinite(value) else Named("float", str(value))


def check_inside(tensor: Tensor) -> None:
    """AssertionError unless every element of the tensor lies in its storage."""
    assert tensor.layout is torch.strided and tensor.device.type == "cpu", f"{tensor.layout} {tensor.device}"
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    inside = (tensor.storage_offset() + last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()
    assert tensor.numel() == 0 or (inside and tensor.storage_offset() >= 0 and min(tensor.stride(), default=0) >= 0)


def outcome(target: str, seed: int, arena: Arena) -> str | None:
    """What is wrong with a call; None for a result or an error."""
    call = Call(target, seed, arena)
    try:
        first, second = call.run(0x11), call.run(0xEE)
    except AssertionError as e:
        return f"a result outside of its memory: {e}: {call.op.args} {call.op.kwargs}"
    except (RuntimeError, UserError, ValueError, TypeError, LookupError, ArithmeticError, MemoryError):
        return None
    if len(first) == len(second) and all(map(same, first, second)):
        return None
    return f"memory that nothing has written: {call.op.args} {call.op.kwargs} {[v.shape for v, _ in call.values]}"


def same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.numel() == 0:
        return True
    return torch.allclose(a, b, equal_nan=True, rtol=1e-4) if a.dtype != torch.bool else torch.equal(a, b)


def operators(names: list[str]) -> list[str]:
    """Every overload that a graph may call, such as `linear.default`."""
    allowed = sorted({entry.split(".")[0] for entry in ALLOWED})
    found = [f"{name}.{overload}" for name in allowed for overload in getattr(torch.ops.aten, name).overloads()]
    return [f for f in found if is_callable(f"aten.{f}") and (not names or f in names or f.split(".")[0] in names)]


def child(targets: list[str], first: int, seed: int, calls: int, at: mmap.mmap) -> None:
    """Call the operators from `first` on; `at` says which call is running, should it end the process."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * PAGE + CHILD_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
    arena = Arena()
    for number, target in enumerate(targets[first:], start=first):
        for call in range(calls):
            at[:16] = struct.pack("qq", number, seed * 1000 + call)
            signal.setitimer(signal.ITIMER_VIRTUAL, 1.0)  # of computing: a long computation is not what is looked for
            wrong = outcome(target, seed * 1000 + call, arena)
            if wrong is not None:
                print(json.dumps([target, seed * 1000 + call, wrong]), flush=True)


def search(targets: list[str], seed: int, calls: int) -> Iterator[tuple[str, int, str]]:
    """Crashes of one round over all operators."""
    at, first = mmap.mmap(-1, 16), 0
    while first < len(targets):
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
        if os.WTERMSIG(status) != signal.SIGVTALRM:
            yield targets[number], call, signal.Signals(os.WTERMSIG(status)).name
        first = number + 1


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
