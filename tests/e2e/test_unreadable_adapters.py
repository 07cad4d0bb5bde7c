"""Unreadable folders in ``--lora-dir`` do not affect other adapters."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from corun.runtime.demo import demo_adapters_path
from support.serving import Served, corun_command, wait_until

SETTLED_S = 60.0
# Root reads everything; a user without capabilities in a namespace of its own does not.
_UNPRIVILEGED = ["unshare", "--user", *corun_command()]


def can_unshare() -> bool:
    return os.system("unshare --user true 2>/dev/null") == 0


pytestmark = pytest.mark.skipif(not can_unshare(), reason="no user namespaces here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    for name in ("there", "team/two", "2026-11-25T16:45:00", "secret"):
        shutil.copytree(demo_adapters_path() / "upper", folder / name)
    (folder / "lost+found").mkdir(mode=0)
    (folder / "secret").chmod(0)
    yield folder
    for path in folder.iterdir():
        path.chmod(0o755)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with Served("--lora-dir", str(folder), "--cpu-threads", "1", command=_UNPRIVILEGED) as served:
        yield served


def names(http: httpx.Client) -> set[str]:
    return {one["id"] for one in http.get("/v1/models").json()["data"]}


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


def test_from_the_start_to_the_end_of_it(served: Served, folder: Path) -> None:
    with served.client() as http:
        base = names(http) - {"there", "team/two"}
        assert len(base) == 1
        assert names(http) == base | {"there", "team/two"}
        assert said(http, "there") == said(http, "team/two") == "HELLO"
        wait_until(lambda: num_unreadable(http) == 2, SETTLED_S)
        # Another one is added while the server runs, and a served one becomes unreadable.
        (folder / "coming").mkdir(mode=0)
        (folder / "team").chmod(0)
        wait_until(lambda: num_unreadable(http) == 4, SETTLED_S)
        assert names(http) == base | {"there", "team/two"}
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
        wait_until(lambda: names(http) == base | {"secret", "team/two"}, SETTLED_S)
        wait_until(lambda: num_unreadable(http) == 2, SETTLED_S)
        assert said(http, "secret") == "HELLO"
    warnings = [line for line in served.log_lines if "cannot be read" in line]
    assert sum("'lost+found'" in line for line in warnings) <= 2, warnings
    assert any("'team'" in line for line in warnings), warnings
    assert any("2026-11-25T16:45:00" in line for line in served.log_lines)
