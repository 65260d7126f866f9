"""A server on a free port, asked by OpenAI's own client, as any program that speaks to it would."""

import re
import subprocess
import sys

from openai import OpenAI

command = [sys.executable, "-m", "mlxinfer.cli", "serve", "-m", "demo", "--port", "0"]
server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
try:
    assert server.stderr is not None
    ready = server.stderr.readline()  # mlxinfer serves demo at http://127.0.0.1:40123/v1 (…)
    address = re.search(r"http://\S+/v1", ready)
    assert address, ready

    with OpenAI(base_url=address[0], api_key="none") as client:
        messages = [{"role": "user", "content": "What is a KV cache?"}]
        stream = client.chat.completions.create(model="demo", messages=messages, stream=True)
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()
finally:
    server.terminate()  # it ends when running requests have
    server.communicate()
