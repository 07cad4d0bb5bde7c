"""Adapters added, changed and removed in ``--lora-dir`` while the server runs."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from corun.runtime.demo import demo_adapters_path
from support.serving import Served, wait_until

WEIGHTS = "adapter_model.safetensors"
SETTLED_S = 20.0  # two seconds, on a busy machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    shutil.copytree(demo_adapters_path() / "upper", folder / "there")
    return folder


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[httpx.Client]:
    options = ("--lora-dir", str(folder), "--cpu-threads", "1", "--allow-runtime-lora-updating")
    with Served(*options) as served, served.client() as http:
        yield http


def copy(task: str, directory: Path) -> None:
    shutil.copytree(demo_adapters_path() / task, directory, dirs_exist_ok=True)


def names(http: httpx.Client) -> set[str]:
    return {one["id"] for one in http.get("/v1/models").json()["data"]}


def adapter(http: httpx.Client, name: str) -> dict[str, Any]:
    found: dict[str, Any] = http.get(f"/v1/lora_adapters/{name}").json()
    return found


def said(http: httpx.Client, name: str) -> str:
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": name, "messages": messages, "max_tokens": 10, "temperature": 0}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_new_ones_are_listed_before_anybody_asks(folder: Path, http: httpx.Client) -> None:
    copy("reverse", folder / "team" / "new")
    wait_until(lambda: "team/new" in names(http), SETTLED_S)
    assert adapter(http, "team/new")["version"] == ""
    assert said(http, "team/new") == "olleh"


def test_other_content_is_a_new_version(folder: Path, http: httpx.Client) -> None:
    copy("upper", folder / "changing")
    wait_until(lambda: "changing" in names(http), SETTLED_S)
    assert said(http, "changing") == "HELLO"
    version = adapter(http, "changing")["version"]
    copy("reverse", folder / "changing")
    wait_until(lambda: adapter(http, "changing")["version"] != version, SETTLED_S)
    assert said(http, "changing") == "olleh"


def test_a_file_that_is_being_written_is_left_alone(folder: Path, http: httpx.Client) -> None:
    copy("reverse", folder / "slow")
    whole = (folder / "slow" / WEIGHTS).read_bytes()
    (folder / "slow" / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    copy("upper", folder / "sooner")
    wait_until(lambda: "sooner" in names(http), SETTLED_S)
    assert "slow" not in names(http)
    (folder / "slow" / WEIGHTS).write_bytes(whole)
    wait_until(lambda: "slow" in names(http), SETTLED_S)
    assert said(http, "slow") == "olleh"


def test_what_goes_is_not_served_and_what_was_loaded_from_elsewhere_is(
    folder: Path, http: httpx.Client, tmp_path: Path
) -> None:
    copy("upper", folder / "going")
    copy("upper", tmp_path / "elsewhere")
    wait_until(lambda: "going" in names(http), SETTLED_S)
    body = {"lora_name": "staying", "lora_path": str(tmp_path / "elsewhere")}
    assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
    shutil.rmtree(folder / "going")
    wait_until(lambda: "going" not in names(http), SETTLED_S)
    assert said(http, "staying") == said(http, "there") == "HELLO"
