"""Which of an accelerator's kernels compute: as torch's own defaults are, or as a job asks."""

from __future__ import annotations

import operator
import os
from typing import Any

import msgspec
import torch

from isthmus.accelerators import Accelerator

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""cuBLAS reads it when the first matrix product is computed; without it its bits depend on the stream."""
_TF32_KIND = "cuda"


class Kernels(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tf32: bool | None = None
    """Whether float32 products and convolutions may use TF32; None: as torch has it, in convolutions alone."""
    deterministic: bool = False
    """Whether equal inputs must give equal bits: an operator that has no such kernel is refused when it runs."""

    compile: bool = False  # whether stages compute compiled where that is quicker (`compile_where_it_pays`)

    def use(self, accelerator: Accelerator) -> str:
        """In this whole process, before it has computed anything. Returns what the hardware cannot do, if anything."""
        if self.deterministic:
            os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
        if self.tf32 is None:
            return ""
        if accelerator.device.type != _TF32_KIND:
            return f"runtime.tf32: ignored: {accelerator.name} has none" if self.tf32 else ""
        for family in ("cuda.matmul", "cudnn.conv", "cudnn.rnn"):
            backend: Any = operator.attrgetter(family)(torch.backends)
            backend.fp32_precision = "tf32" if self.tf32 else "ieee"
        return ""
