"""Use a running server (``make serve``) through OpenAI's client, which needs no changes."""

import os

from openai import OpenAI

url = os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1")
key = os.environ.get("OPENAI_API_KEY", "none")  # one of --api-key, if the server has any
with OpenAI(base_url=url, api_key=key) as client:
    for model in client.models.list():
        print(model.id)  # the base model, then each adapter

    answer = client.chat.completions.create(
        model="upper",  # the adapter's name
        messages=[{"role": "user", "content": "hello world"}],
        temperature=0,
    )
    print(answer.choices[0].message.content)  # HELLO WORLD

    stream = client.chat.completions.create(
        model="reverse", messages=[{"role": "user", "content": "desserts"}], temperature=0, stream=True
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="")  # stressed
    print()
