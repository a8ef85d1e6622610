"""What litellm makes of the endpoint at `sys.argv[1]`, whose model repeats the prompt."""

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # asks nobody for prices

import litellm

given = {"api_base": sys.argv[1], "api_key": sys.argv[2], "max_tokens": 4}
parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "y"}]
whole = litellm.completion("openai/birds:Parrot", messages=[{"role": "user", "content": parts}], **given)
message = whole.choices[0].message
assert (message.content, message.role, whole.usage.completion_tokens) == ("heyh", "assistant", 4)
talk = [{"role": "user", "content": "hey"}, {**message.model_dump(), "content": None}]
chunks = list(
    litellm.completion(
        "openai/birds:Parrot", messages=talk, stream=True, stream_options={"include_usage": True}, **given
    )
)
rebuilt = litellm.stream_chunk_builder(chunks, messages=talk)
assert (rebuilt.choices[0].message.content, rebuilt.choices[0].message.role) == ("heyh", "assistant")
assert rebuilt.usage.completion_tokens == 4 and rebuilt.usage.prompt_tokens == 3
text = litellm.text_completion(model="text-completion-openai/birds:Parrot", prompt="abc", **given)
assert text.choices[0].text == "abca"
