"""How good a placement of stages is (DT-FM's problem): a lower bound on what any placement costs."""

from isthmus_testing.placement.bounds import lower_bound_s

__all__ = ["lower_bound_s"]
