"""How good an allocation of layers is (Sky Computing's problem): the least largest workload, with a proven bound."""

from isthmus_testing.allocation.certified import certified_layers

__all__ = ["certified_layers"]
