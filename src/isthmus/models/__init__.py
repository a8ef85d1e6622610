"""The models that a job can name, and how to add one."""

from isthmus.models.boundary import Bottleneck, BoundaryOptions, has_bottlenecks
from isthmus.models.gpt import GPT, GPTConfig
from isthmus.models.hugging_face import as_eager, is_hugging_face, save_hugging_face
from isthmus.models.lora import LoraOptions, base_of, is_peft, merged, save_adapter, taken_off
from isthmus.models.mlp import CNN, MLP, CNNConfig, MLPConfig
from isthmus.models.registry import ModelSpec, build_model, describe_model, model_names, model_on_meta, summarize_model
from isthmus.models.subspace import has_subspace, widened
from isthmus.models.unet import UNet, UNetConfig

__all__ = [
    "CNN",
    "GPT",
    "MLP",
    "Bottleneck",
    "BoundaryOptions",
    "CNNConfig",
    "GPTConfig",
    "LoraOptions",
    "MLPConfig",
    "ModelSpec",
    "UNet",
    "UNetConfig",
    "as_eager",
    "base_of",
    "build_model",
    "describe_model",
    "has_bottlenecks",
    "has_subspace",
    "is_hugging_face",
    "is_peft",
    "merged",
    "model_names",
    "model_on_meta",
    "save_adapter",
    "save_hugging_face",
    "summarize_model",
    "taken_off",
    "widened",
]
