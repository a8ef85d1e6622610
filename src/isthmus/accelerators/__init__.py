"""Where tensors are computed: the CPU, or an accelerator whose streams work beside the host.

accelerator.py says what the engine and the links need of either; host.py is the CPU, available.py whatever
`torch.accelerator` knows, found by name; copies.py copies values there and back.
"""

from isthmus.accelerators.accelerator import HOST, Accelerator, DeviceEvent, MemoryUse, Stream
from isthmus.accelerators.available import AUTO, accelerator_names, open_accelerator, resolve_accelerator

__all__ = [
    "AUTO",
    "HOST",
    "Accelerator",
    "DeviceEvent",
    "MemoryUse",
    "Stream",
    "accelerator_names",
    "open_accelerator",
    "resolve_accelerator",
]
