"""Directories of adapters that other users write: no file elsewhere is read, and nothing stops."""

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from corun.runtime.demo import demo_adapters_path
from support.serving import Served, wait_until

WEIGHTS, CONFIG, TEMPLATE = ("adapter_model.safetensors", "adapter_config.json", "chat_template.jinja")
SECRET = "the-secret-of-another-user"
SETTLED_S = 40.0
MESSAGES = [{"role": "user", "content": "hello"}]


def copy(task: str, directory: Path) -> Path:
    shutil.copytree(demo_adapters_path() / task, directory)
    return directory


def link_template(directory: Path, target: Path) -> None:
    (directory / TEMPLATE).unlink(missing_ok=True)
    (directory / TEMPLATE).symlink_to(target)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("files")
    (root / "secret").write_text(SECRET)
    loras, allowed = root / "loras", root / "allowed"
    for name in ("there", "team/versioned", "spy", "waits", "going"):
        copy("upper", loras / name)
    link_template(loras / "spy", root / "secret")
    os.mkfifo(loras / "waits" / TEMPLATE)
    (loras / "shared.jinja").write_text("{{ messages[0]['content'] }}")
    link_template(loras / "team" / "versioned", Path("../../shared.jinja"))
    (loras / "pipe").mkdir()
    shutil.copy(loras / "there" / CONFIG, loras / "pipe")
    os.mkfifo(loras / "pipe" / WEIGHTS)
    os.mkfifo(loras / "entry")
    copy("upper", root / "operators")
    (loras / "linked").symlink_to(root / "operators")
    # What clients have loaded before this start.
    link_template(copy("upper", allowed / "swapped-file"), root / "secret")
    (allowed / "swapped-folder").symlink_to(copy("upper", root / "elsewhere"))
    copy("upper", allowed / "good")
    adapters = [
        {"name": name, "path": str(allowed / name), "pinned": False}
        for name in ("swapped-file", "swapped-folder")
    ]
    (root / "state.json").write_text(json.dumps({"version": 1, "adapters": adapters}))
    return root


@pytest.fixture(scope="module")
def http(root: Path) -> Iterator[httpx.Client]:
    options = (
        *("--lora-dir", str(root / "loras")),
        *("--allowed-lora-dirs", str(root / "allowed")),
        *("--lora-state-file", str(root / "state.json")),
        *"--cpu-threads 1 --allow-runtime-lora-updating".split(),
    )
    with Served(*options) as served, served.client() as http:
        yield http


def names(http: httpx.Client) -> set[str]:
    return {one["id"] for one in http.get("/v1/models").json()["data"]}


def chat(http: httpx.Client, name: str) -> httpx.Response:
    body = {"model": name, "messages": MESSAGES, "max_tokens": 10, "temperature": 0}
    return http.post("/v1/chat/completions", json=body)


def complete(http: httpx.Client, name: str) -> httpx.Response:
    body = {"model": name, "prompt": "abc", "max_tokens": 2, "temperature": 0}
    return http.post("/v1/completions", json=body)


def tokenized(http: httpx.Client, name: str) -> httpx.Response:
    body = {"model": name, "messages": MESSAGES, "return_token_strs": True}
    return http.post("/tokenize", json=body)


def reason_of(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    assert SECRET not in answer.text
    return str(answer.json()["error"]["message"])


def adapter(http: httpx.Client, name: str) -> dict[str, Any]:
    found: dict[str, Any] = http.get(f"/v1/lora_adapters/{name}").json()
    return found


def test_a_template_elsewhere_is_not_read(http: httpx.Client, root: Path) -> None:
    for ask in (chat, tokenized):
        reason = reason_of(ask(http, "spy"))
        assert f"outside of its directory {root / 'loras' / 'spy'}" in reason
        assert f"--lora-dir {root / 'loras'}" in reason and "--allowed-lora-dirs" in reason
    assert "--allowed-lora-dirs" in adapter(http, "spy")["messages_refused"]
    assert complete(http, "spy").status_code == 200


def test_links_of_the_operator_and_within_the_directory_are_followed(http: httpx.Client) -> None:
    assert tokenized(http, "team/versioned").status_code == 200
    assert chat(http, "linked").json()["choices"][0]["message"]["content"] == "HELLO"


def test_pipes_stop_no_other_adapter(http: httpx.Client) -> None:
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: chat(http, "waits"), range(20)))
    assert {reason_of(one) for one in answers} == {reason_of(chat(http, "waits"))}
    assert "is not a file" in reason_of(chat(http, "waits"))
    assert chat(http, "there").json()["choices"][0]["message"]["content"] == "HELLO"
    assert "pipe" not in names(http) or complete(http, "pipe").status_code == 400


def test_removals_are_noticed_beside_pipes(http: httpx.Client, root: Path) -> None:
    assert complete(http, "going").status_code == 200
    copy("upper", root / "loras" / "late")
    wait_until(lambda: "late" in names(http), SETTLED_S)
    os.mkfifo(root / "loras" / "late" / "x")
    shutil.rmtree(root / "loras" / "going")
    wait_until(lambda: "going" not in names(http), SETTLED_S)
    assert complete(http, "going").status_code == 404
    (root / "loras" / "late" / WEIGHTS).unlink()
    os.mkfifo(root / "loras" / "late" / WEIGHTS)
    wait_until(lambda: "late" not in names(http), SETTLED_S)


def test_a_link_that_is_swapped_after_the_load_is_refused(http: httpx.Client, root: Path) -> None:
    reason = reason_of(tokenized(http, "swapped-file"))
    assert f"--allowed-lora-dirs {root / 'allowed'}" in reason
    assert complete(http, "swapped-file").status_code == 200
    # All of its files are elsewhere.
    answer = complete(http, "swapped-folder")
    assert answer.status_code == 400, answer.text
    good = root / "allowed" / "good"
    body = {"lora_name": "good", "lora_path": str(good), "load_inplace": True}
    assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
    assert chat(http, "good").json()["choices"][0]["message"]["content"] == "HELLO"
    link_template(good, root / "secret")
    assert "--allowed-lora-dirs" in reason_of(http.post("/v1/load_lora_adapter", json=body))
    assert chat(http, "good").json()["choices"][0]["message"]["content"] == "HELLO"  # as read
    state = json.loads((root / "state.json").read_text())
    assert [one["name"] for one in state["adapters"]][-1] == "good"


def test_a_template_that_becomes_a_link_is_refused(http: httpx.Client, root: Path) -> None:
    assert tokenized(http, "there").status_code == 200
    link_template(root / "loras" / "there", root / "secret")
    wait_until(lambda: tokenized(http, "there").status_code == 400, SETTLED_S)
    assert "it is a link" in reason_of(tokenized(http, "there"))
    (root / "loras" / "there" / TEMPLATE).unlink()
    wait_until(lambda: tokenized(http, "there").status_code == 200, SETTLED_S)


def test_metrics_say_when_the_directory_is_not_looked_at(http: httpx.Client) -> None:
    text = http.get("/metrics").text
    (line,) = [one for one in text.splitlines() if one.startswith("corun:lora_dir_unseen_seconds")]
    assert float(line.rpartition(" ")[2]) == 0.0
