"""Models, adapters, version, tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from corun.runtime.engine.tokenizer import load_tokenizer
from corun.runtime.frontend.codec import codec_of
from corun.runtime.frontend.tokenizer import Tokenizer
from support.tokenizers import save_sample_tokenizer


def test_models(http: httpx.Client) -> None:
    body = http.get("/v1/models").json()
    assert body["object"] == "list"
    cards = {card["id"]: card for card in body["data"]}
    assert list(cards) == ["tiny", "alias", "upper", "digits"]  # the failed one is not offered
    assert cards["tiny"] == {
        "id": "tiny",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "corun",
        "root": "demo/tiny",
        "parent": None,
        "max_model_len": 4096,
    }
    assert cards["upper"]["root"] == "/adapters/upper"
    assert cards["upper"]["parent"] == "tiny"
    for name in ("tiny", "alias", "upper", "tiny:upper"):
        card = http.get(f"/v1/models/{name}").json()
        assert card == cards[name.removeprefix("tiny:")]
    failed = http.get("/v1/models/broken")
    assert failed.status_code == 400
    assert "rank 512" in failed.json()["error"]["message"]


def test_model_names_with_slashes(http: httpx.Client, engine: Any) -> None:
    engine.adapters["team/upper"] = engine.adapters["upper"].__class__(
        "team/upper", "/x", "ready", None, 8, 1, "ab", True
    )
    assert http.get("/v1/models/team/upper").json()["id"] == "team/upper"


def test_adapter_list_tells_states(http: httpx.Client) -> None:
    data = http.get("/v1/lora_adapters").json()["data"]
    states = {adapter["name"]: (adapter["state"], adapter["reason"]) for adapter in data}
    assert states["upper"] == ("ready", None)
    assert states["broken"] == ("failed", "rank 512 is over the limit")


def test_served_name_defaults_to_the_models(start_server: Callable[..., Any], engine: Any) -> None:
    server = start_server(type(engine)(), served_names=())
    body = httpx.get(server.url + "/v1/models").json()
    assert body["data"][0]["id"] == "demo/tiny"


def test_version(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": "1.2.3"}


def test_tokens_become_text_and_the_same_tokens_again(
    start_server: Callable[..., Any], tmp_path: Path, engine: Any
) -> None:
    save_sample_tokenizer("byte level", tmp_path)
    engine = type(engine)()
    engine.tokenizer = Tokenizer(codec_of(load_tokenizer(str(tmp_path))))
    with httpx.Client(base_url=start_server(engine).url, timeout=20) as http:
        for text in ("Hello world", "<|begin|>Hello<tool>café<|end|>", "  don't 😀\n", "<|end|>"):
            for add_special_tokens in (True, False):
                body: dict[str, Any] = {"prompt": text, "add_special_tokens": add_special_tokens}
                tokens = http.post("/tokenize", json=body).json()["tokens"]
                shown = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
                assert shown == ("<|begin|>" if add_special_tokens else "") + text
                body = {"prompt": shown, "add_special_tokens": False}
                assert http.post("/tokenize", json=body).json()["tokens"] == tokens


def test_a_conversation_is_tokenized_as_chats_are(http: httpx.Client, engine: Any) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for fields in (
        {},
        {"continue_final_message": True},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"preamble": "!"}},
        {"add_special_tokens": True},
    ):
        tokens = http.post("/tokenize", json={"messages": messages, **fields}).json()["tokens"]
        body = {"messages": messages, "max_tokens": 1, **fields}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        assert engine.seen[-1][0] == tokens
    names = http.post("/tokenize", json={"prompt": "a", "return_token_strs": True}).json()
    assert names["token_strs"] == ["token 1", "token 97"]


def test_tokenize_and_back(http: httpx.Client, engine: Any) -> None:
    body = http.post("/tokenize", json={"prompt": "ab"}).json()
    assert body == {"count": 3, "max_model_len": 4096, "tokens": [1, 97, 98]}
    body = http.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]}).json()
    assert "".join(map(chr, body["tokens"])) == "<user>a<assistant>"
    assert http.post("/detokenize", json={"tokens": [97, 8364]}).json() == {"prompt": "a€"}
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    for body in ({}, {"prompt": "a", "messages": []}):
        assert http.post("/tokenize", json=body).status_code == 400
    response = http.post("/detokenize", json={"tokens": [-1]})
    assert "-1" in response.json()["error"]["message"]
    engine.vocab_size = 98  # of an adapter
    assert http.post("/detokenize", json={"tokens": [97]}).status_code == 200
    assert http.post("/detokenize", json={"tokens": [98]}).status_code == 400


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_adapter_updates_are_off(http: httpx.Client, engine: Any, prefix: str) -> None:
    for verb in ("load", "unload"):
        body = {"lora_name": "new", "lora_path": "/x"}
        response = http.post(f"{prefix}/{verb}_lora_adapter", json=body)
        assert response.status_code == 403
        error = response.json()["error"]
        assert error["type"] == "permission_error"
        assert "--allow-runtime-lora-updating" in error["message"]
    assert "new" not in engine.adapters


def test_adapters_are_loaded_from_allowed_directories_alone(
    start_server: Callable[..., Any], engine: Any, tmp_path: Path
) -> None:
    engine = type(engine)()
    allowed = tmp_path / "allowed"
    (allowed / "sql").mkdir(parents=True)
    (allowed / "out").symlink_to("/etc")
    server = start_server(engine, allow_lora_updates=True, allowed_lora_dirs=(str(allowed),))
    with httpx.Client(base_url=server.url, timeout=20) as http:

        def load(path: object) -> httpx.Response:
            body = {"lora_name": "new", "lora_path": str(path)}
            return http.post("/v1/load_lora_adapter", json=body)

        refused = [load(path) for path in ("/etc", allowed / "out", allowed / "no", "../x")]
        assert {answer.status_code for answer in refused} == {400}
        assert len({answer.json()["error"]["message"] for answer in refused}) == 1
        assert refused[0].json()["error"]["param"] == "lora_path"
        assert "new" not in engine.adapters
        assert load(allowed / "sql").json()["adapter"]["path"] == str(allowed / "sql")


def test_adapter_updates(start_server: Callable[..., Any], engine: Any) -> None:
    engine = type(engine)()
    server = start_server(engine, allow_lora_updates=True)
    with httpx.Client(base_url=server.url, timeout=20) as http:

        def post(path: str, **body: Any) -> httpx.Response:
            return http.post(path, json=body)

        done = post("/v1/load_lora_adapter", lora_name="new", lora_path="/x")
        assert done.status_code == 200
        assert done.json()["adapter"]["path"] == "/x"
        body = {"prompt": "hi", "model": "new"}
        assert http.post("/v1/completions", json=body).status_code == 200
        taken = post("/load_lora_adapter", lora_name="new", lora_path="/y")
        assert taken.status_code == 400
        assert "load_inplace" in taken.json()["error"]["message"]
        again = post("/load_lora_adapter", lora_name="new", lora_path="/y", load_inplace=True)
        assert again.json()["adapter"]["path"] == "/y"
        bad = post("/v1/load_lora_adapter", lora_name="bad", lora_path="/missing")
        assert bad.status_code == 400
        assert bad.json()["error"]["code"] == "adapter_refused"
        assert "/missing" in bad.json()["error"]["message"]
        for name in ("", "tiny", "a\nb", "x" * 300):
            refused = post("/v1/load_lora_adapter", lora_name=name, lora_path="/x")
            assert refused.json()["error"]["param"] == "lora_name"
        pinned = post("/v1/load_lora_adapter", lora_name="p", lora_path="/x", pinned=True)
        assert pinned.json()["adapter"]["pinned"] is True
        unpinned = post("/v1/load_lora_adapter", lora_name="p", pinned=False).json()
        assert (unpinned["status"], unpinned["adapter"]["pinned"]) == ("unpinned", False)
        assert post("/v1/load_lora_adapter", lora_name="nobody", pinned=True).status_code == 404
        neither = post("/v1/load_lora_adapter", lora_name="p")
        assert (neither.status_code, neither.json()["error"]["param"]) == (400, "lora_path")
        assert "missing" in neither.json()["error"]["message"]
        assert post("/v1/unload_lora_adapter", lora_name="new").status_code == 200
        assert post("/v1/unload_lora_adapter", lora_name="broken").status_code == 200  # it failed
        gone = post("/unload_lora_adapter", lora_name="uper")
        assert gone.status_code == 404
        assert "'upper'" in gone.json()["error"]["message"]
        assert "new" not in [card["id"] for card in http.get("/v1/models").json()["data"]]
