"""Units: exact in, readable out, and a message that says what was expected."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import UserError
from isthmus.units import (
    format_bandwidth,
    format_compute,
    format_duration,
    format_size,
    parse_bandwidth,
    parse_compute,
    parse_duration,
    parse_size,
)

FLOATS: list[tuple[Callable[[object, str], float], Callable[..., str]]] = [
    (parse_duration, format_duration),
    (parse_bandwidth, format_bandwidth),
    (parse_compute, format_compute),
]
PARSERS = [*(parse for parse, _ in FLOATS), parse_size]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("67 ms", 0.067),
        ("1.5 s", 1.5),
        ("30 us", 30e-6),
        ("30 \u00b5s", 30e-6),
        ("30 \u03bcs", 30e-6),
        ("7 ns", 7e-9),
        ("2 min", 120.0),
        ("1.5 h", 5400.0),
        ("2 d", 172800.0),
        ("67ms", 0.067),
        ("  1e-3   s ", 0.001),
        ("0 s", 0.0),
        (0.25, 0.25),
        (3, 3.0),
    ],
)
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration(text, "latency") == seconds


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("1.15 Gbps", 143_750_000.0),
        ("100 Mbit/s", 12_500_000.0),
        ("100 Mbps", 12_500_000.0),
        ("8 Gbit/s", 1e9),
        ("56 kbit/s", 7000.0),
        ("56 Kbps", 7000.0),
        ("8 bps", 1.0),
        ("12 MB/s", 12e6),
        ("150 GB/s", 150e9),
        ("1 MiB/s", 1048576.0),
        (1e6, 1e6),
    ],
)
def test_bandwidths(text: object, bytes_per_s: float) -> None:
    assert parse_bandwidth(text, "bandwidth") == bytes_per_s


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("16 GiB", 16 * 2**30),
        ("500 MB", 500_000_000),
        ("512 KiB", 524_288),
        ("20 MB", 20_000_000),
        ("1.5 KiB", 1536),
        ("1.1 GiB", 1_181_116_006),
        ("12 B", 12),
        (4096, 4096),
        (4096.0, 4096),
        ("0 B", 0),
    ],
)
def test_sizes(text: object, size_bytes: int) -> None:
    got = parse_size(text, "memory")
    assert got == size_bytes
    assert type(got) is int


@pytest.mark.parametrize(
    ("text", "flops_per_s"),
    [
        ("125 TFLOPS", 125e12),
        ("14 GFLOPS", 14e9),
        ("3.5e9 FLOPS", 3.5e9),
        ("2 TFLOP/s", 2e12),
        ("1 EFLOPS", 1e18),
        (5, 5.0),
    ],
)
def test_compute(text: object, flops_per_s: float) -> None:
    assert parse_compute(text, "compute") == flops_per_s


@pytest.mark.parametrize(
    ("parse", "text", "part"),
    [
        (parse_duration, "67 mss", "there is no unit 'mss'; did you mean 'ms'"),
        (parse_duration, "67", "the unit is missing"),
        (parse_duration, "-1 ms", "must not be negative"),
        (parse_duration, -1.0, "must not be negative"),
        (parse_duration, "soon", 'such as "67 ms"'),
        (parse_duration, "", 'such as "67 ms"'),
        (parse_duration, "1 s 2 ms", 'such as "67 ms"'),
        (parse_duration, "1e999 s", "too large"),
        (parse_duration, "1e9999999 s", 'such as "67 ms"'),
        (parse_duration, True, "got True"),
        (parse_duration, 10**400, "too large"),
        (parse_duration, None, "got None"),
        (parse_duration, {"ms": 5}, "got a dict"),
        (parse_bandwidth, "100 Mb/s", "did you mean 'MB/s' or 'MiB/s' or 'Mbit/s'?"),
        (parse_bandwidth, "1 gbps", "did you mean 'Gbps'"),
        (parse_bandwidth, "0 Mbit/s", "must be above zero"),
        (parse_bandwidth, "1e-999 bit/s", "must be above zero"),
        (parse_bandwidth, 0, "must be above zero"),
        (parse_size, "16 Gib", "did you mean 'GiB'"),
        (parse_size, "0.5 B", "whole number of bytes"),
        (parse_size, 0.5, "whole number of bytes"),
        (parse_size, "1e30 B", "too large"),
        (parse_compute, "125 TFLOPs", "did you mean 'TFLOPS'"),
        (parse_compute, "0 FLOPS", "must be above zero"),
    ],
)
def test_a_refusal_names_the_field_and_what_is_expected(
    parse: Callable[[object, str], float], text: object, part: str
) -> None:
    with pytest.raises(UserError) as caught:
        parse(text, "[links] default: value")
    message = str(caught.value)
    assert message.startswith("[links] default: value: got ")
    assert part in message
    assert "expected a " in message


def test_an_integer_too_long_to_print_is_refused() -> None:
    with pytest.raises(UserError, match=r"^memory: got an integer of 36001 bits \(it is too large\)"):
        parse_size(16**9000, "memory")


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "nan", "inf s", "nan B"])
def test_what_is_not_finite_is_refused(parse: Callable[[object, str], float], value: object) -> None:
    with pytest.raises(UserError, match=r"^x: got "):
        parse(value, "x")


@given(st.text(), st.sampled_from(PARSERS))
def test_any_text_is_a_value_or_a_refusal_on_one_line(text: str, parse: Callable[[object, str], float]) -> None:
    try:
        assert parse(text, "x") >= 0
    except UserError as error:
        assert len(str(error).splitlines()) == 1
        assert len(str(error)) < 300


@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False), st.sampled_from(FLOATS))
def test_exact_text_parses_back_equal(
    value: float, pair: tuple[Callable[[object, str], float], Callable[..., str]]
) -> None:
    parse, write = pair
    assert parse(write(value, exact=True), "x") == value


@given(st.floats(min_value=1e-30, max_value=1e30), st.sampled_from(FLOATS))
def test_rounded_text_is_within_three_digits(
    value: float, pair: tuple[Callable[[object, str], float], Callable[..., str]]
) -> None:
    parse, write = pair
    assert parse(write(value), "x") == pytest.approx(value, rel=0.00501)


@given(st.integers(min_value=0, max_value=2**63 - 1))
def test_exact_sizes_parse_back_equal(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes, exact=True), "x") == size_bytes


@given(st.integers(min_value=0, max_value=2**62))
def test_rounded_sizes_are_within_three_digits(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes), "x") == pytest.approx(size_bytes, rel=0.00501)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_duration(0.067), "67 ms"),
        (format_duration(59.98), "1 min"),
        (format_duration(59.4), "59.4 s"),
        (format_duration(0.99999), "1 s"),
        (format_duration(5e-10), "0.5 ns"),
        (format_duration(-0.067), "-67 ms"),
        (format_duration(0.0), "0 s"),
        (format_duration(math.inf), "inf seconds"),
        (format_duration(0.067123456789, exact=True), "67.123456789 ms"),
        (format_bandwidth(143_750_000), "1.15 Gbit/s"),
        (format_bandwidth(12_345_678), "98.8 Mbit/s"),
        (format_bandwidth(0.125), "1 bit/s"),
        (format_size(16 * 2**30), "16 GiB"),
        (format_size(1023 * 1024), "1023 KiB"),
        (format_size(1), "1 B"),
        (format_size(500_000_000), "477 MiB"),
        (format_size(500_000_000, exact=True), "500 MB"),
        (format_compute(125e12), "125 TFLOPS"),
        (format_compute(149.7e12, exact=True), "149.7 TFLOPS"),
    ],
)
def test_text_for_people(text: str, expected: str) -> None:
    assert text == expected
