"""How many executors a run takes, where the job leaves it to a measurement."""

import pytest

from isthmus.runtime.federated.trainer import fastest_count


@pytest.mark.parametrize(
    ("rates", "most", "expected"),
    [
        ({1: 10, 2: 20, 4: 40, 8: 80}, 8, 8),
        ({1: 10, 2: 20, 4: 21}, 8, 2),
        ({1: 10, 2: 9}, 8, 1),
        ({1: 10, 2: 20, 3: 30}, 3, 3),
        ({}, 1, 1),
    ],
)
def test_they_double_while_that_gains(rates: dict[int, float], most: int, expected: int) -> None:
    assert fastest_count(lambda count: rates[count], most) == expected
