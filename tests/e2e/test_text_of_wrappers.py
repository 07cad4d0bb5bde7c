"""A multimodal model over HTTP: it answers text, and refuses images by name."""

import json
from collections.abc import Iterator

import pytest
from support.architectures import save_model
from support.serving import Served
from support.tokenizers import save_word_tokenizer

# Iterates over the parts of a message, as templates of such models do.
_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = save_model("qwen2_5_vl", tmp_path_factory.mktemp("model") / "wrapper")
    save_word_tokenizer(directory, 96)
    (directory / "chat_template.jinja").write_text(_TEMPLATE)
    with Served(str(directory), "--cpu-threads", "1", "--memory-gib", "0.1") as served:
        yield served


def test_text_is_answered(server: Served) -> None:
    body = {
        "model": "wrapper",
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": "w5 w9 w31"}],
    }
    chat = server.post("/v1/chat/completions", body).json()
    assert chat["usage"]["completion_tokens"] == 4
    prompt = {"model": "wrapper", "prompt": "w5 w9 w31 ", "max_tokens": 4, "temperature": 0}
    completion = server.post("/v1/completions", {**prompt, "ignore_eos": True}).json()
    assert chat["choices"][0]["message"]["content"] == completion["choices"][0]["text"]


def test_images_are_refused_by_name(server: Served) -> None:
    content = [
        {"type": "text", "text": "w5"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    ]
    body = {"model": "wrapper", "messages": [{"role": "user", "content": content}]}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "messages[0].content[1].image_url"
    assert "this server takes text only" in error["message"], json.dumps(error)
