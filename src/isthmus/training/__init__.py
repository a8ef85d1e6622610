"""Stage execution, optimizers and checkpoints."""

from isthmus.training.checkpoint import latest_checkpoint, load_checkpoint, read_tensors
from isthmus.training.engine import Engine, EngineConfig, TorchEngine
from isthmus.training.learning_rate import LearningRate
from isthmus.training.optim import OptimizerConfig

__all__ = [
    "Engine",
    "EngineConfig",
    "LearningRate",
    "OptimizerConfig",
    "TorchEngine",
    "latest_checkpoint",
    "load_checkpoint",
    "read_tensors",
]
