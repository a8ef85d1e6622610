"""Runs keep AMX off: processors of one name have it or not, and with it bf16 products are rounded otherwise."""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # torch reads it at the first product
