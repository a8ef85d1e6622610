"""Which device is to blame, and whether it is asked again."""

from isthmus.errors import UserError
from isthmus.session.failures import FailureDetector, without_name


def test_a_driver_that_failed_is_the_reason_and_its_device_may_come_back() -> None:
    losses = FailureDetector()
    losses.failed("d0", "AcceleratorError: unspecified launch failure")
    losses.accused("d1", "device 'd0' closed the connection")
    assert losses.certain and not losses.permanent
    found = losses.decide(0.0, {"d0": "its process ended with code 4"})
    assert found is not None and found[0] == "d0"
    assert without_name(found[1], "d0") == "AcceleratorError: unspecified launch failure"


def test_what_the_job_is_at_fault_for_is_for_good() -> None:
    losses = FailureDetector()
    losses.failed("d0", "AcceleratorError: unspecified launch failure")
    losses.reported("d1", UserError("device 'd1': data: no file there"))
    assert losses.certain and losses.permanent
    found = losses.decide(0.0, {})
    assert found is not None and found[0] == "d1"
    losses.cleared("d1")
    assert not losses.permanent and losses.certain
    losses.cleared("d0")
    assert not losses.certain and losses.decide(0.0, {}) is None
