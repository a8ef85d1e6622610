"""What openai's client makes of the endpoint at `sys.argv[1]`, whose model repeats the prompt."""

import sys

import openai

MODEL = "birds:Parrot"
client = openai.OpenAI(base_url=sys.argv[1], api_key=sys.argv[2])
assert [model.id for model in client.models.list()] == [MODEL]
assert client.models.retrieve(MODEL).id == MODEL
try:
    client.models.retrieve("another")
    raise AssertionError("a model that is not there")
except openai.NotFoundError as e:
    assert "there is 'birds:Parrot'" in e.message
plain = client.completions.create(model=MODEL, prompt="abc", max_tokens=5)
assert plain.choices[0].text == "abcab" and plain.usage.total_tokens == 8
ids = client.completions.create(model=MODEL, prompt=[97, 98], max_tokens=3, echo=True)
assert ids.choices[0].text == "ababa"
streamed = client.completions.create(
    model=MODEL, prompt="abc", max_tokens=5, stream=True, stream_options={"include_usage": True}
)
chunks = list(streamed)
assert "".join(c.choices[0].text for c in chunks[:-1]) == "abcab" and chunks[-1].usage.total_tokens == 8
parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "y"}]
chat = client.chat.completions.create(
    model=MODEL,
    messages=[{"role": "user", "content": parts}, {"role": "assistant", "content": None}],
    max_completion_tokens=4,
)
assert chat.choices[0].message.content == "heyh" and chat.choices[0].message.role == "assistant"
with client.chat.completions.stream(
    model=MODEL,
    messages=[{"role": "user", "content": "hey!"}, {**chat.choices[0].message.model_dump()}],
    stop="!",
    stream_options={"include_usage": True},
) as stream:
    for _ in stream:
        pass
    whole = stream.get_final_completion()
assert whole.choices[0].message.role == "assistant", whole.choices[0].message.role
assert whole.choices[0].message.content == "hey" and whole.usage.completion_tokens == 4
try:
    client.completions.create(model=MODEL, prompt="a", n=2)
    raise AssertionError("n = 2")
except openai.BadRequestError as e:
    assert "n: got 2, expected 1" in e.message
try:
    openai.OpenAI(base_url=sys.argv[1], api_key="wrong").models.list()
    raise AssertionError("a wrong key")
except openai.AuthenticationError as e:
    assert "expected the key" in e.message
