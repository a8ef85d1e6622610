"""What `llm` makes of the endpoint at `sys.argv[1]`, whose model repeats the prompt."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as home:
    os.environ["LLM_USER_PATH"] = home
    models = [
        f"- model_id: {kind}\n  model_name: birds:Parrot\n  api_base: {sys.argv[1]}\n  api_key_name: parrot\n"
        f"  completion: {kind == 'text'}\n"
        for kind in ("chat", "text")
    ]
    Path(home, "extra-openai-models.yaml").write_text("".join(models))
    command = [str(Path(sys.executable).parent / "llm"), "--key", sys.argv[2], "-o", "max_tokens", "4"]
    for kind, prompt, expected in (("chat", "hey", "heyh"), ("text", "abc", "abca")):
        for streams in ([], ["--no-stream"]):
            done = subprocess.run([*command, "-m", kind, *streams, prompt], capture_output=True, text=True, check=False)
            assert done.stdout.strip() == expected, (kind, streams, done.stdout, done.stderr)
