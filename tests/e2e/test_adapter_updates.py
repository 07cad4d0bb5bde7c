"""Adapters added, changed and removed while the server runs, and invalid adapters."""

import json
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from corun.runtime.demo import chat_prompt, demo_adapters_path
from safetensors.torch import load_file, save_file
from support.demo_answers import Question, ask_all
from support.serving import Served, wait_until

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def copy_of(name: str, directory: Path) -> Path:
    """A demo adapter's files in a directory that may be changed."""
    return Path(shutil.copytree(demo_adapters_path() / name, directory))


def ask(server: Served, model: str, text: str = "hello") -> str:
    return ask_all(server.url, [Question(model, text, "")])[0]


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(directory: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / WEIGHTS)
    edit(tensors)
    save_file(tensors, directory / WEIGHTS)


def load(server: Served, name: str, path: Path, **options: Any) -> httpx.Response:
    return server.post(LOAD, {"lora_name": name, "lora_path": str(path), **options})


def test_load_use_unload(server: Served, tmp_path: Path) -> None:
    path = copy_of("reverse", tmp_path / "one")
    answer = load(server, "backwards", path)
    assert answer.status_code == 200, answer.text
    assert ask(server, "backwards", "planet") == "tenalp"
    copy = copy_of("reverse", tmp_path / "two")
    for same in (path, copy):
        assert load(server, "backwards", same).status_code == 200
    other = load(server, "backwards", copy_of("upper", tmp_path / "other"))
    assert other.status_code == 400
    assert other.json()["error"]["code"] == "adapter_exists"
    assert "load_inplace" in other.json()["error"]["message"]
    assert ask(server, "backwards", "planet") == "tenalp"
    assert server.post(UNLOAD, {"lora_name": "backwards"}).status_code == 200
    gone = server.post("/v1/completions", {"model": "backwards", "prompt": "a"})
    assert gone.status_code == 404
    assert server.post(UNLOAD, {"lora_name": "backwards"}).status_code == 404
    names = [model["id"] for model in httpx.get(server.url + "/v1/models").json()["data"]]
    assert "backwards" not in names


class OpenStream:
    """A greedy stream under an adapter, up to its last token."""

    def __init__(self, server: Served, model: str, num_tokens: int) -> None:
        self.text = ""
        self.began = threading.Event()
        body = {
            "model": model,
            "prompt": chat_prompt("hello"),
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        self._thread = threading.Thread(target=self._read, args=(server.url, body))
        self._thread.start()

    def is_open(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> str:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.text

    def _read(self, url: str, body: dict[str, Any]) -> None:
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self.text += json.loads(line[6:])["choices"][0]["text"]
                    self.began.set()


def test_reload_while_a_stream_runs(server: Served, tmp_path: Path) -> None:
    """The running stream ends with the old content's text; new requests get the new content."""
    path = copy_of("upper", tmp_path / "changing")
    assert load(server, "changing", path).status_code == 200
    expected = OpenStream(server, "changing", 400).wait()
    stream = OpenStream(server, "changing", 400)
    assert stream.began.wait(20)
    shutil.rmtree(path)
    copy_of("vowels", path)
    assert load(server, "changing", path, load_inplace=True).status_code == 200
    assert ask(server, "changing") == "h*ll*"
    assert stream.is_open(), "the stream ended before the adapter had changed"
    assert stream.wait() == expected
    assert expected.startswith("HELLO")
    assert ask(server, "changing") == "h*ll*"
    assert server.post(UNLOAD, {"lora_name": "changing"}).status_code == 200


def device_bytes(server: Served) -> int:
    """Return the bytes of all adapters, including draining versions."""
    with server.client() as http:
        adapters = http.get("/v1/lora_adapters").json()["data"]
    versions = [version for one in adapters for version in (one, *one["draining"])]
    return sum(version["device_bytes"] for version in versions)


def test_unload_while_a_stream_runs(server: Served, tmp_path: Path) -> None:
    assert load(server, "leaving", copy_of("upper", tmp_path / "leaving")).status_code == 200
    expected = OpenStream(server, "leaving", 300).wait()
    num_bytes = device_bytes(server)
    stream = OpenStream(server, "leaving", 300)
    assert stream.began.wait(20)
    assert server.post(UNLOAD, {"lora_name": "leaving"}).status_code == 200
    refused = server.post("/v1/completions", {"model": "leaving", "prompt": "a"})
    assert refused.status_code in (404, 503)
    assert stream.wait() == expected
    wait_until(lambda: device_bytes(server) < num_bytes)
    assert server.post("/v1/completions", {"model": "leaving", "prompt": "a"}).status_code == 404


def _nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[next(iter(tensors))][0, 0] = float("nan")


def _extra(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.layers.99.self_attn.q_proj.lora_A.weight"] = torch.zeros(4, 192)


def _missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[next(name for name in tensors if "lora_B" in name)]


def _wrong_shape(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in tensors if "lora_A" in name)
    tensors[name] = tensors[name][:, :-1].contiguous()


def _raise_rank(path: Path) -> None:
    edit_tensors(path, _high_rank)
    edit_config(path, r=300)


def _high_rank(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        rows = torch.zeros(300, tensor.shape[1]), torch.zeros(tensor.shape[0], 300)
        tensors[name] = rows[0] if "lora_A" in name else rows[1]


def _truncate(path: Path) -> None:
    raw = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(raw[: len(raw) // 2])


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing directory": (shutil.rmtree, "no such adapter directory"),
    "missing weights": (lambda path: (path / WEIGHTS).unlink(), WEIGHTS),
    "truncated": (_truncate, WEIGHTS),
    "NaN": (lambda path: edit_tensors(path, _nan), "NaN|finite"),
    "extra tensor": (lambda path: edit_tensors(path, _extra), "layers.99"),
    "missing tensor": (lambda path: edit_tensors(path, _missing), "lora_B"),
    "wrong shape": (lambda path: edit_tensors(path, _wrong_shape), "191"),
    "rank": (_raise_rank, "300.*256.*--max-lora-rank"),
    "unknown field": (lambda path: edit_config(path, lora_magic=3), "lora_magic"),
    "dora": (lambda path: edit_config(path, use_dora=True), "use_dora"),
    "other method": (lambda path: edit_config(path, peft_type="IA3"), "IA3"),
    "broken JSON": (lambda path: (path / CONFIG).write_text("{"), "JSON"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_adapters_are_refused(server: Served, tmp_path: Path, case: str) -> None:
    spoil, message = WRONG[case]
    path = copy_of("upper", tmp_path / "wrong")
    spoil(path)
    answer = load(server, "wrong", path)
    assert answer.status_code == 400
    assert_message(answer, message)
    assert server.post("/v1/completions", {"model": "wrong", "prompt": "a"}).status_code == 400
    server.post(UNLOAD, {"lora_name": "wrong"})
    assert ask(server, "upper") == "HELLO"


def assert_message(answer: httpx.Response, pattern: str) -> None:
    message = answer.json()["error"]["message"]
    assert re.search(pattern, message, re.DOTALL), message
