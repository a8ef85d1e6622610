"""What `isthmus probe` measures of the device: speeds, the way to the host, memory."""

from collections.abc import Callable

from isthmus.accelerators import Accelerator
from isthmus.runtime.messages.probe import Product
from isthmus.runtime.service.speed import measure


def test_every_figure_is_there(gpu: Accelerator, record_property: Callable[[str, object], None]) -> None:
    products = [Product(batch=8, m=128, k=256, n=256), Product(batch=32, m=128, k=64, n=128, count=2)]
    found = measure(gpu, products)
    assert 0 < found.flops_per_s <= found.peak_flops_per_s
    assert found.half_flops_per_s > 0
    assert found.host_bytes_per_s > 0
    assert 0 < found.memory_bytes <= gpu.memory().total
    for name in ("flops_per_s", "half_flops_per_s", "peak_flops_per_s"):
        record_property(name, f"{getattr(found, name) / 1e12:.3g} TFLOPS")
    record_property("to the host and back", f"{found.host_bytes_per_s / 1e9:.3g} GB/s")
