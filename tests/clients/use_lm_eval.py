"""What lm-eval makes of the endpoint at `sys.argv[1]`, whose model repeats the prompt."""

import os
import sys

os.environ["OPENAI_API_KEY"] = sys.argv[2]

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI


def asked(model: object, text: str) -> list[str]:
    options = {"until": ["zz"], "max_gen_toks": 4, "temperature": 0.0}
    return model.generate_until([Instance("generate_until", {}, (text, options), 0)], disable_tqdm=True)


given = {"model": "birds:Parrot", "tokenizer_backend": None, "tokenized_requests": False, "max_length": 64}
assert asked(LocalCompletionsAPI(base_url=f"{sys.argv[1]}/completions", **given), "abc") == ["abca"]
chat = LocalChatCompletion(base_url=f"{sys.argv[1]}/chat/completions", **given)
messages = chat.apply_chat_template([{"role": "user", "content": "hey"}])
assert asked(chat, messages) == ["heyh"]
