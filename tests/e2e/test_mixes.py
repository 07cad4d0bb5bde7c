"""Several adapters in one request, over HTTP: answers of the truth, and refusals by name."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from support.parity import AdapterSpec, ParityCase
from support.peft_adapters import edit_config
from support.serving import Served

SPECS = (
    AdapterSpec("a", {"r": 4, "lora_alpha": 6}),
    AdapterSpec("b", {"r": 9, "use_rslora": True}),
    AdapterSpec("large", {"r": 28}),
    AdapterSpec("dora", {"r": 2, "use_dora": True}),
    AdapterSpec("own", {"r": 2, "target_modules": ["q_proj"]}),
    AdapterSpec("other", {"r": 2, "target_modules": ["q_proj"]}),
    AdapterSpec("elsewhere", {"r": 2, "target_modules": ["q_proj"]}),
)
MIX = [{"name": "b", "scale": -0.5}, {"name": "a"}]
PROMPT = " ".join(f"t{7 * i % 90 + 3}" for i in range(40))
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
MESSAGES = [{"role": "user", "content": PROMPT}]
GREEDY = {"temperature": 0, "lora": MIX}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> ParityCase:
    case = ParityCase("llama3-rope", tmp_path_factory.mktemp("case"), specs=SPECS)
    (case.directory / "chat_template.jinja").write_text(TEMPLATE)
    for name in ("own", "other"):
        (case.adapters[name] / "chat_template.jinja").write_text(TEMPLATE + name)
    edit_config(case.adapters["a"], base_model_name_or_path="us/tiny-llama")
    edit_config(case.adapters["elsewhere"], base_model_name_or_path="them/other-1b")
    return case


@pytest.fixture(scope="module")
def http(case: ParityCase) -> Iterator[httpx.Client]:
    folder = case.adapters["a"].parent
    with (
        Served(
            *(str(case.directory), "--device", "cpu", "--dtype", "float32", "--memory-gib", "0.05"),
            *("--lora-dir", str(folder), "--max-lora-rank", "32", "--served-model-name", "base"),
            *("--cpu-threads", "1"),
        ) as served,
        served.client() as http,
    ):
        yield http


def text_of(answer: Any) -> str:
    """The text of an answer of any route."""
    if "choices" in answer:
        choice = answer["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    blocks = answer["content"] if "content" in answer else answer["output"][0]["content"]
    return str(blocks[0]["text"])


def test_answers_of_all_routes_are_those_of_the_truth(case: ParityCase, http: httpx.Client) -> None:
    mix = case.add_mix([("a", 1.0), ("b", -0.5)])
    body = {"prompt": PROMPT, "max_tokens": 6, "logprobs": 20, "return_token_ids": True} | GREEDY
    answer = http.post("/v1/completions", json=body).raise_for_status().json()
    assert answer["model"] == "base"
    (choice,) = answer["choices"]
    prompt, tokens = choice["prompt_token_ids"], choice["token_ids"]
    truth = case.truth(mix.lora_name, prompt + tokens, len(prompt), torch.float32)
    for row, found in zip(truth, choice["logprobs"]["top_logprobs"], strict=True):
        errors = [abs(value - float(row[int(text[1:])])) for text, value in found.items()]
        assert len(errors) >= 20 and max(errors) < 1e-4 * float(truth.abs().max())
    alone = http.post("/v1/completions", json=body | {"lora": None, "model": "a"}).json()
    assert text_of(alone) != text_of(answer)
    for path, fields in {
        "chat/completions": {"messages": MESSAGES, "max_tokens": 6, "model": "base"},
        "responses": {"input": PROMPT, "max_output_tokens": 6},
        "messages": {"messages": MESSAGES, "max_tokens": 6, "model": "base"},
    }.items():
        other = http.post(f"/v1/{path}", json=fields | GREEDY).raise_for_status().json()
        assert text_of(other) == text_of(answer), path
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
        events = [line[6:] for line in stream.iter_lines() if line.startswith("data: {")]
    texts = [choice["text"] for event in events for choice in json.loads(event)["choices"]]
    assert "".join(texts) == text_of(answer)
    listed = http.get("/v1/models").json()["data"]
    assert {one["id"] for one in listed} == {"base", *(spec.name for spec in SPECS)}


@pytest.mark.parametrize(
    ("lora", "status", "param", "text"),
    [
        ('[{"name": "a", "scale": NaN}]', 400, "lora[0].scale", "finite"),
        ('[{"name": "a", "scale": 1e999}]', 400, "lora[0].scale", "finite"),
        ('[{"name": "a", "scale": 1e30}]', 400, "lora", "scale 1e+30 for 'a'"),
        ('[{"name": "a", "scale": 1%s}]' % ("0" * 400), 400, "lora[0].scale", "number"),
        ('[{"name": "a", "scale": 0}]', 400, "lora", "scale 0 for 'a'"),
        ('[{"name": "a", "scale": "1"}]', 400, "lora[0].scale", "number"),
        ('[{"scale": 1}]', 400, "lora[0].name", "missing"),
        ('[{"id": 0, "scale": 1}]', 400, "lora[0].id", "write the adapter's name as name"),
        ('{"a": 1}', 400, "lora", "list"),
        ('[{"name": "a"}, {"name": "b"}, {"name": "a"}]', 400, "lora", "'a' twice"),
        (json.dumps([{"name": name} for name in "abcde"]), 400, "lora", "5 adapters"),
        ('[{"name": "a"}, {"name": "nothing"}]', 404, "lora", "'nothing'"),
        ('[{"name": "a"}, {"name": "base"}]', 404, "lora", "'base'"),
        ('[{"name": "a"}, {"name": "large"}, {"name": "b"}]', 400, None, "41 together"),
        ('[{"name": "a"}, {"name": "dora"}]', 400, None, "'dora' is a DoRA adapter"),
        ('[{"name": "a"}, {"name": "elsewhere"}]', 400, None, "'elsewhere' for them/other-1b"),
        ('[{"name": "own"}, {"name": "other"}]', 400, "lora", "different chat templates"),
    ],
)
def test_what_is_refused(http: httpx.Client, lora: str, status: int, param: str | None, text: str) -> None:
    for stream in ("false", "true"):
        body = f'{{"prompt": "t5", "max_tokens": 2, "stream": {stream}, "lora": {lora}}}'
        answer = http.post("/v1/completions", content=body)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert text in error["message"] and error["param"] == param, error


def test_beside_a_name_of_an_adapter(http: httpx.Client) -> None:
    body = {"prompt": "t5", "model": "a", "max_tokens": 2}
    answer = http.post("/v1/completions", json=body | {"lora": [{"name": "b"}]})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "lora"
    assert "model names the adapter 'a'" in answer.json()["error"]["message"]
    for lora in ("null", "[]"):
        fields = body | {"lora": json.loads(lora)}
        http.post("/v1/completions", json=fields).raise_for_status()
