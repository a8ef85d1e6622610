"""What langchain-openai makes of the endpoint at `sys.argv[1]`, whose model repeats the prompt."""

import sys

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI

given = {"model": "birds:Parrot", "base_url": sys.argv[1], "api_key": sys.argv[2], "max_tokens": 4}
chat = ChatOpenAI(**given)
assert chat.invoke("hey").content == "heyh"
call = {"name": "now", "args": {"zone": "UTC"}, "id": "1"}
talk = [
    HumanMessage([{"type": "text", "text": "he"}, {"type": "text", "text": "y"}]),
    AIMessage("", tool_calls=[call]),
    ToolMessage("12:00", tool_call_id="1"),
]
assert chat.invoke(talk).content == "heyh"
added = None
for chunk in ChatOpenAI(**given, stream_usage=True).stream(talk):
    added = chunk if added is None else added + chunk
assert added.content == "heyh" and added.usage_metadata["output_tokens"] == 4, added
assert OpenAI(**given).invoke("abc") == "abca"
