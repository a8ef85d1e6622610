"""The sizes of a default config become small, and nothing else changes."""

from __future__ import annotations

from tests.lazy import Lazy

configs = Lazy("configs")  # with transformers


def test_sizes_layers_and_dropout_of_a_config_become_small() -> None:
    text = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "rope_theta": 10000.0}
    known = {
        "vocab_size": 32000,
        "image_size": 224,
        "attention_dropout": 0.1,
        "use_drop": True,
        "n_inner": None,
        "layer_types": ["full", "full", "sliding"],
        "depths": [3, 4, 6],
        "text_config": text,
        "hidden_act": "gelu",
    }
    assert configs.shrunk(known) == {
        "vocab_size": configs.VOCABULARY,
        "image_size": 32,
        "attention_dropout": 0.0,
        "layer_types": ["full", "sliding"],
        "depths": [1, 1, 1],
        "text_config": {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2},
    }
