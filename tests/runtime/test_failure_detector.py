"""Which device is to blame, and whether it is asked again."""

from isthmus.errors import UserError
from isthmus.session.session import FailureDetector, Loss


def test_a_driver_that_failed_is_the_reason_and_its_device_may_come_back() -> None:
    losses = FailureDetector()
    losses.failed("d0", "AcceleratorError: unspecified launch failure")
    losses.accused("d1", "device 'd0' closed the connection")
    found = losses.decide(0.0, {"d0": "its process ended with code 4"})
    assert losses.certain and found == Loss("d0", "AcceleratorError: unspecified launch failure")
    assert not found.permanent and str(found.failure).startswith("device 'd0' was lost: ")


def test_what_the_job_is_at_fault_for_is_for_good() -> None:
    losses = FailureDetector()
    losses.failed("d0", "AcceleratorError: unspecified launch failure")
    losses.reported("d1", "data: no file there", of_job=True)
    found = losses.decide(0.0, {})
    assert losses.certain and found == Loss("d1", "data: no file there", "job") and found.permanent
    assert isinstance(found.failure, UserError)
    losses.cleared("d1")
    assert losses.certain
    losses.cleared("d0")
    assert not losses.certain and losses.decide(0.0, {}) is None
