"""An accelerator for tests, emulated on the CPU: mistakes that hardware forgives on most days raise here.

It is a device type of torch (PrivateUse1) whose memory is the host's, but out of the host's reach, and whose operators
are the CPU's, so that results have the CPU's bits. Operators are done at once; copies that do not block are put off as
long as the rules of streams allow. What it finds:

- an access without an event or a synchronisation after another stream's access (vector clocks, as CUDA's sanitizer of
  torch has them), and memory that is given back while another stream works with it: order.py, memory.py
- host buffers that are read too early (they hold NaN) or written too early: copies.py
- copies through pageable memory, and whatever lets the host wait: counted, or refused, in counters.py
- tensors of two devices in one operator, refused as on CUDA: kernels.py
- memory that runs out, and hardware that fails, when one asks for it: devices.py
"""

from isthmus_testing.emulated_accelerator.accelerator import Checked, check_settings, open_checked
from isthmus_testing.emulated_accelerator.counters import Counts
from isthmus_testing.emulated_accelerator.misuse import DataRace, FreedTooEarly, HostBufferInUse, Misuse, RefusedWait

__all__ = [
    "Checked",
    "Counts",
    "DataRace",
    "FreedTooEarly",
    "HostBufferInUse",
    "Misuse",
    "RefusedWait",
    "check_settings",
    "open_checked",
]
