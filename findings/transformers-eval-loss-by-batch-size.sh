#!/usr/bin/env bash
# transformers 5.24.0, Trainer.evaluate: `eval_loss` of a language model depends on per_device_eval_batch_size.
#
# Expected: the loss of the evaluation set, one number of model and data; the guide for language models takes its
# exponent for the perplexity (https://huggingface.co/docs/transformers/tasks/language_modeling).
# Seen: each batch's loss is its mean over tokens that have a label, and eval_loss is the mean of these weighted by
# sequences. Where sequences have different numbers of labelled tokens (padding, prompts masked with -100), another
# batch size gives another number: a sequence of one token weighs as much as one of fifteen in batches of one, and a
# fifteenth of it in one batch. GPT-2's loss is too small besides, here by a ninth: the Trainer divides by the number of
# labels, and leaves out each sequence's first, which is no target, only if the class's name says ForCausalLM.
# Why it matters: devices of unlike memory evaluate with unlike batch sizes, so the same model has another loss on
# each, and a mean over them is none of any data set. Early stopping and comparisons go wrong silently.
# Instead: sum losses and tokens over batches and divide once, or evaluate with the same batches everywhere.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 accelerate==1.15.0
cd "$folder"
venv/bin/python -W ignore - 2> log <<'PY' || { cat log; exit 1; }
import torch
import transformers
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

assert transformers.__version__ == "5.24.0", transformers.__version__
torch.manual_seed(0)
shape = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0}
gpt = GPT2LMHeadModel(GPT2Config(n_positions=16, n_embd=16, n_layer=1, n_head=2, **shape))
narrow = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
llama = LlamaForCausalLM(LlamaConfig(**narrow, **shape))
for model in (gpt, llama):
    model.eval().lm_head.weight.data.normal_()  # losses of tokens differ more than a fresh model's


class Sequences(Dataset):
    """Eight sequences of 16 tokens; the odd ones have one labelled target, the even ones fifteen."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(32, (16,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        if index % 2:
            labels[2:] = -100
        return {"input_ids": tokens, "labels": labels}


def eval_loss(model: torch.nn.Module, batch: int) -> float:
    options = TrainingArguments("out", per_device_eval_batch_size=batch, report_to=[], use_cpu=True, disable_tqdm=True)
    return Trainer(model, options, eval_dataset=Sequences()).evaluate()["eval_loss"]


def mean_over_tokens(model: torch.nn.Module) -> float:
    total = 0.0
    for index in range(8):
        one = Sequences()[index]
        with torch.no_grad():
            total += model(**{name: value[None] for name, value in one.items()}).loss.item() * (1 if index % 2 else 15)
    return total / 64


for model, targets_of_labels in ((llama, 1.0), (gpt, 64 / 72)):
    right, alone, whole = mean_over_tokens(model), eval_loss(model, 1), eval_loss(model, 8)
    print(f"{type(model).__name__}: batches of 1 {alone:.4f}, one of 8 {whole:.4f}, mean over tokens {right:.4f}")
    assert abs(whole - targets_of_labels * right) < 1e-3 and abs(alone - whole) > 0.05, "the behaviour changed"
PY
