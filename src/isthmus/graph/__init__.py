"""Models as operator graphs, where they may be cut, and the stages that a cut makes.

`isthmus.graph.capture` turns a torch module into a graph: it and what it uses are the parts here that import torch.
"""

from isthmus.graph.cuts import Cut, Flow, cuts
from isthmus.graph.opgraph import Affine, Op, OpGraph, Ref, TensorSpec, decode, encode
from isthmus.graph.partition import Crossing, StageGraph, assign, partition

__all__ = [
    "Affine",
    "Crossing",
    "Cut",
    "Flow",
    "Op",
    "OpGraph",
    "Ref",
    "StageGraph",
    "TensorSpec",
    "assign",
    "cuts",
    "decode",
    "encode",
    "partition",
]
