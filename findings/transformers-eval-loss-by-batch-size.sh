#!/usr/bin/env bash
# transformers 5.24.0, Trainer.evaluate: `eval_loss` of a language model depends on per_device_eval_batch_size.
#
# Expected: the loss of the evaluation set, one number of model and data; the guide for language models takes its
# exponent for the perplexity (https://huggingface.co/docs/transformers/tasks/language_modeling).
# Seen: each batch's loss is its mean over tokens that have a label, and eval_loss is the mean of these weighted by
# sequences. Where sequences have different numbers of labelled tokens (padding, prompts masked with -100), another
# batch size gives another number: a sequence of one token weighs as much as one of fifteen in batches of one, and a
# fifteenth of it in one batch.
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
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

assert transformers.__version__ == "5.24.0", transformers.__version__
torch.manual_seed(0)
shape = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(shape).eval()
with torch.no_grad():
    model.lm_head.weight.normal_()  # losses of tokens differ more than a fresh model's


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


def eval_loss(batch: int) -> float:
    options = TrainingArguments("out", per_device_eval_batch_size=batch, report_to=[], use_cpu=True, disable_tqdm=True)
    return Trainer(model, options, eval_dataset=Sequences()).evaluate()["eval_loss"]


total = tokens = 0
for one in Sequences():
    targets = int((one["labels"][1:] != -100).sum())
    with torch.no_grad():
        total += model(**{name: value[None] for name, value in one.items()}).loss.item() * targets
    tokens += targets
right, alone, whole = total / tokens, eval_loss(1), eval_loss(8)
print(f"eval_loss with batches of 1: {alone:.4f}, with one batch of 8: {whole:.4f}; mean over tokens: {right:.4f}")
assert abs(whole - right) < 1e-3 and abs(alone - right) > 0.05, "the behaviour changed"
PY
