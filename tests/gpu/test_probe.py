"""What `isthmus probe` measures of the device: speeds, the way to the host, memory."""

from collections.abc import Callable

from isthmus.accelerators import Accelerator
from isthmus.job import prepare
from isthmus.runtime.messages.probe import AttentionShape, MatrixProduct, MeasureSpeed
from isthmus.runtime.service.fleet_probe import planned_speed, speed_question
from isthmus.runtime.service.speed import measure
from tests.runtime.jobs import TEXT, job_of


def test_every_figure_is_there(gpu: Accelerator, record_property: Callable[[str, object], None]) -> None:
    operators = (
        MatrixProduct(batch=8, m=128, k=256, n=256),
        MatrixProduct(batch=32, m=128, k=64, n=128, count=2),
        AttentionShape(batch=8, heads=4, key_heads=4, queries=128, keys=128, size=32, value_size=32, causal=True),
    )
    model: dict[str, object] = {"vocab_size": 256, "sequence_length": 16, "width": 32, "layers": 2, "heads": 4}
    trial = speed_question(prepare(job_of("gpt", model, TEXT))).trial
    found = measure(gpu, MeasureSpeed(run="", operators=operators, trial=trial))
    kinds = {(figure.what, figure.precision) for figure in found.figures}
    both = {(what, precision) for what in ("products", "attention") for precision in ("fp32", "bf16")}
    assert kinds == both | {("layers", "fp32")} and not found.shorter
    assert min(planned_speed(found.figures, "full"), planned_speed(found.figures, "half")) > 0
    assert min(found.peak_flops_per_s, found.host_bytes_per_s) > 0
    assert 0 < found.memory_bytes <= gpu.memory().total
    for figure in found.figures:
        record_property(f"{figure.what} in {figure.precision}", f"{figure.flops_per_s / 1e12:.3g} TFLOPS")
    record_property("two large matrices in fp32", f"{found.peak_flops_per_s / 1e12:.3g} TFLOPS")
    record_property("to the host and back", f"{found.host_bytes_per_s / 1e9:.3g} GB/s")
