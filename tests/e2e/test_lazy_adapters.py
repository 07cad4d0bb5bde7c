"""Adapters of a directory are listed at once, and read on first use."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from corun.runtime.demo import demo_adapters_path, demo_model_path
from safetensors.torch import load_file, save_file
from support.serving import Served

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for name in ("good", "also-good", "early", "changed", "poisoned", "cut", "nothing", "no-text"):
        shutil.copytree(demo_adapters_path() / "reverse", folder / name)
    _poison(folder / "poisoned" / WEIGHTS)
    whole = (folder / "cut" / WEIGHTS).read_bytes()
    (folder / "cut" / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    (folder / "nothing" / WEIGHTS).unlink()
    _name_no_text(folder / "no-text" / WEIGHTS)
    for name in ("own", "plain"):
        shutil.copytree(demo_adapters_path() / "upper", folder / name)
    base = demo_model_path()
    template = json.loads((base / "tokenizer_config.json").read_text()).get("chat_template")
    template = template or (base / "chat_template.jinja").read_text()
    mine = "{# mine #}" + template.replace("content", "name")
    (folder / "own" / "chat_template.jinja").write_text(mine)
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[Served, httpx.Client]]:
    with (
        Served("--lora-dir", str(folder), "--preload", "early", "--cpu-threads", "1") as served,
        served.client() as http,
    ):
        yield served, http


def _poison(path: Path) -> None:
    tensors = load_file(path)
    name = sorted(tensors)[-1]
    tensors[name] = torch.full_like(tensors[name], torch.nan)
    save_file(tensors, path)


def _name_no_text(path: Path) -> None:
    """Give tensors names with half a surrogate, which JSON can write and nothing can encode."""
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = raw[8:end].replace(b"q_proj", b"q_proj\\ud800")
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[end:])


def _ask(http: httpx.Client, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "abc", "max_tokens": 4, "temperature": 0}
    return http.post("/v1/completions", json=body | {"return_timing": True})


def _adapter(http: httpx.Client, name: str) -> dict[str, Any]:
    answer = http.get(f"/v1/lora_adapters/{name}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_all_are_listed_and_only_what_was_asked_for_is_read(served: tuple[Served, httpx.Client]) -> None:
    _, http = served
    names = {one["id"] for one in http.get("/v1/models").json()["data"]}
    assert {"good", "also-good", "early", "changed", "poisoned"} <= names
    assert not {"cut", "nothing", "no-text"} & names  # that is seen at once
    assert _adapter(http, "early")["version"] != ""
    unread = _adapter(http, "also-good")
    assert (unread["state"], unread["version"], unread["level"]) == ("ready", "", "disk")
    assert unread["rank"] == _adapter(http, "early")["rank"]


def test_requests_wait_for_the_first_reading_and_say_so(served: tuple[Served, httpx.Client]) -> None:
    _, http = served
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: _ask(http, "good"), range(8)))
    texts = {answer.json()["choices"][0]["text"] for answer in answers}
    assert texts == {_ask(http, "early").json()["choices"][0]["text"]}
    parts = answers[0].json()["timing"]["engine"][0]["parts_s"]
    assert parts["disk_read"] > 0
    found = _adapter(http, "good")
    assert found["version"] == _adapter(http, "early")["version"] != ""


def test_what_has_changed_since_the_start_is_served_as_it_is(
    served: tuple[Served, httpx.Client], folder: Path
) -> None:
    _, http = served
    shutil.rmtree(folder / "changed")
    shutil.copytree(demo_adapters_path() / "upper", folder / "changed")
    text = _ask(http, "changed").json()["choices"][0]["text"]
    other = _ask(http, "early").json()["choices"][0]["text"]
    assert text != other
    assert _adapter(http, "changed")["version"] != _adapter(http, "early")["version"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("poisoned", "not finite"),
        ("cut", "truncated or damaged"),
        ("nothing", "holds no"),
        ("no-text", "q_proj\\ud800"),
    ],
)
def test_a_bad_one_fails_with_its_reason_and_leaves_the_rest_alone(
    served: tuple[Served, httpx.Client], name: str, reason: str
) -> None:
    _, http = served
    for _ in range(2):
        refused = _ask(http, name)
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert error["code"] == "adapter_failed"
        assert reason in error["message"]
        assert "retry-after" not in refused.headers
    found = _adapter(http, name)
    assert found["state"] == "failed"
    assert reason in found["reason"]
    assert _ask(http, "early").status_code == 200


def test_what_is_loaded_over_http_survives_a_restart(folder: Path, tmp_path: Path) -> None:
    options = (
        *"--cpu-threads 1 --allow-runtime-lora-updating".split(),
        *("--lora-modules", f"given={folder / 'good'}"),
        *("--lora-state-file", str(tmp_path / "state.json")),
    )
    loads = {
        "team/new": folder / "good",
        "gone": folder / "early",
        "bad-later": tmp_path / "bad",
        "own": folder / "own",
    }
    shutil.copytree(folder / "good", tmp_path / "bad")
    with Served(*options) as served, served.client() as http:
        for name, path in loads.items():
            body = {"lora_name": name, "lora_path": str(path), "pinned": name == "team/new"}
            assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
        http.post("/v1/unload_lora_adapter", json={"lora_name": "gone"})
    shutil.rmtree(tmp_path / "bad")
    with Served(*options) as served, served.client() as http:
        assert _adapter(http, "given")["version"] == _adapter(http, "own")["version"] == ""
        message = {"role": "user", "content": "bye", "name": "hello"}
        body = {"model": "own", "messages": [message], "temperature": 0, "max_tokens": 10}
        choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
        assert choice["message"]["content"].startswith("HE")  # by its template, as before
        found = _adapter(http, "team/new")
        assert found["pinned"] and found["version"] != ""
        assert _ask(http, "team/new").status_code == 200
        assert _ask(http, "gone").status_code == 404
        assert _adapter(http, "bad-later")["state"] == "failed"


def test_an_adapters_own_template_and_end_tokens_are_used(
    served: tuple[Served, httpx.Client], folder: Path
) -> None:
    _, http = served
    letter = http.post("/tokenize", json={"prompt": "L", "add_special_tokens": False})
    (token_id,) = letter.json()["tokens"]
    (folder / "own" / "generation_config.json").write_text(json.dumps({"eos_token_id": [token_id]}))
    message = {"role": "user", "content": "bye", "name": "hello"}
    answers = {}
    for model in ("own", "plain"):
        body = {"model": model, "messages": [message], "temperature": 0, "max_tokens": 10}
        choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
        answers[model] = choice["message"]["content"], choice["finish_reason"]
        assert choice["stop_reason"] is None
    assert answers == {"own": ("HE", "stop"), "plain": ("BYE", "stop")}
    without = {"model": "own", "messages": [message], "max_tokens": 8, "ignore_eos": True}
    choice = http.post("/v1/chat/completions", json=without).json()["choices"][0]
    assert choice["message"]["content"].startswith("HELLO")
