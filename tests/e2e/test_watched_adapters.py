"""Adapters added, changed, removed and unreadable in ``--lora-dir`` while the server runs."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from corun.runtime.demo import demo_adapters_path
from support.serving import Served, corun_command, wait_until

WEIGHTS = "adapter_model.safetensors"
SETTLED_S = 60.0  # two seconds, on a busy machine
# Root reads everything; a user without capabilities in a namespace of its own does not.
CAN_UNSHARE = os.system("unshare --user true 2>/dev/null") == 0
_COMMAND = ["unshare", "--user", *corun_command()] if CAN_UNSHARE else corun_command()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    for name in ("there", "team/two", "2026-11-25T16:45:00", "secret"):
        copy("upper", folder / name)
    (folder / "lost+found").mkdir(mode=0)
    (folder / "secret").chmod(0)
    yield folder
    for path in folder.iterdir():
        path.chmod(0o755)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    options = ("--lora-dir", str(folder), "--cpu-threads", "1", "--allow-runtime-lora-updating")
    with Served(*options, command=_COMMAND) as served:
        yield served


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with served.client() as http:
        yield http


def copy(task: str, directory: Path) -> None:
    shutil.copytree(demo_adapters_path() / task, directory, dirs_exist_ok=True)


def names(http: httpx.Client) -> set[str]:
    return {one["id"] for one in http.get("/v1/models").json()["data"]}


def adapter(http: httpx.Client, name: str) -> dict[str, Any]:
    found: dict[str, Any] = http.get(f"/v1/lora_adapters/{name}").json()
    return found


def num_unreadable(http: httpx.Client) -> int:
    text = http.get("/metrics").text
    found = re.search(r"^\S*lora_dir_unreadable_entries\S* (\S+)$", text, re.MULTILINE)
    assert found is not None, text
    return int(float(found[1]))


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


@pytest.mark.skipif(not CAN_UNSHARE, reason="no user namespaces here")
def test_unreadable_folders_do_not_affect_others(served: Served, http: httpx.Client, folder: Path) -> None:
    others = names(http) - {"there", "team/two"}
    assert names(http) == others | {"there", "team/two"} and "secret" not in others
    assert said(http, "there") == said(http, "team/two") == "HELLO"
    wait_until(lambda: num_unreadable(http) == 2, SETTLED_S)
    # Another one is added while the server runs, and a served one becomes unreadable.
    (folder / "coming").mkdir(mode=0)
    (folder / "team").chmod(0)
    wait_until(lambda: num_unreadable(http) == 4, SETTLED_S)
    assert names(http) == others | {"there", "team/two"}
    assert said(http, "there") == said(http, "team/two") == "HELLO"
    # The directory itself.
    folder.chmod(0)
    wait_until(lambda: num_unreadable(http) == 1, SETTLED_S)
    assert said(http, "there") == "HELLO"
    folder.chmod(0o755)
    # Readable adapters are served, removed ones are not.
    (folder / "secret").chmod(0o755)
    (folder / "team").chmod(0o755)
    shutil.rmtree(folder / "there")
    wait_until(lambda: names(http) == others | {"secret", "team/two"}, SETTLED_S)
    wait_until(lambda: num_unreadable(http) == 2, SETTLED_S)
    assert said(http, "secret") == "HELLO"
    warnings = [line for line in served.log_lines if "cannot be read" in line]
    assert sum("'lost+found'" in line for line in warnings) <= 2, warnings
    assert any("'team'" in line for line in warnings), warnings
    assert any("2026-11-25T16:45:00" in line for line in served.log_lines)
