"""Unregistered names: found in a directory, on a hub, and nowhere."""

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from corun.runtime.cli.main import main
from corun.runtime.demo import demo_adapters_path
from support.fake_hub import fake_hub
from support.serving import Served

MAX_ANSWER_S = 5.0  # half of the time limit of a hub
ADMIN_KEY = "admin"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("resolved")
    folders = {name: root / name for name in ("here", "hub", "elsewhere", "cache")}
    shutil.copytree(demo_adapters_path() / "reverse", folders["here"] / "team" / "reverse")
    shutil.copytree(demo_adapters_path() / "upper", folders["hub"])
    (folders["hub"] / "notes.txt").write_text("not to be fetched")
    (folders["hub"] / "chat_template.jinja").write_text("fetched")
    shutil.copytree(demo_adapters_path() / "upper", folders["elsewhere"])
    (folders["here"] / "link").symlink_to(folders["elsewhere"])
    shutil.copytree(demo_adapters_path() / "reverse", folders["here"] / "broken")
    (folders["here"] / "broken" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    return folders


@pytest.fixture(scope="module")
def http(folders: dict[str, Path]) -> Iterator[httpx.Client]:
    with (
        fake_hub({"acme/upper": folders["hub"]}) as url,
        Served(
            *("--cpu-threads", "1"),
            *("--lora-resolver", f"directory:{folders['here']}"),
            *("--lora-resolver", "hub:acme"),
            environment={"HF_ENDPOINT": url, "HF_HOME": str(folders["cache"]), "HF_HUB_OFFLINE": "0"},
        ) as served,
        served.client() as http,
    ):
        yield http


def ask(http: httpx.Client, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "abc", "max_tokens": 4, "temperature": 0}
    return http.post("/v1/completions", json=body)


def names(http: httpx.Client) -> set[str]:
    return {one["id"] for one in http.get("/v1/models").json()["data"]}


def test_from_a_directory(http: httpx.Client) -> None:
    assert "team/reverse" not in names(http)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(http, "team/reverse"), range(8)))
    assert {one.status_code for one in answers} == {200}
    assert len({one.json()["choices"][0]["text"] for one in answers}) == 1
    assert "team/reverse" in names(http)
    tokens = http.post("/tokenize", json={"model": "team/reverse", "prompt": "abc"})
    assert tokens.status_code == 200


def test_from_a_hub(http: httpx.Client, folders: dict[str, Path]) -> None:
    assert ask(http, "acme/upper@main").status_code == 200
    assert ask(http, "acme/upper").status_code == 200
    assert {"acme/upper", "acme/upper@main"} <= names(http)
    fetched = {path.name for path in (folders["cache"] / "hub").rglob("snapshots/*/*")}
    assert fetched == {"adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"}


@pytest.mark.parametrize(
    "model",
    [
        "unknown",
        "acme/unknown",
        "acme/upper@unknown",
        "other/upper",
        "../elsewhere",
        "link",
        "a/b/c",
        "acme/upper@",
        "acme/..",
        "%00",
        "a\0b",
        "acme/" + "m" * 9999,
    ],
)
def test_what_there_is_not(http: httpx.Client, folders: dict[str, Path], model: str) -> None:
    for name in (model, str(folders["elsewhere"])):
        start_s = time.monotonic()
        answer = ask(http, name)
        assert time.monotonic() - start_s < MAX_ANSWER_S
        assert answer.status_code == 404, answer.text
        assert "no model or adapter" in answer.json()["error"]["message"]


def test_one_that_cannot_be_served_says_why(http: httpx.Client) -> None:
    for _ in range(2):
        answer = ask(http, "broken")
        assert answer.status_code == 400, answer.text
        assert "adapter_config.json" in answer.json()["error"]["message"]
    assert ask(http, "team/reverse").status_code == 200


def test_a_hub_that_cannot_be_reached(http: httpx.Client, folders: dict[str, Path]) -> None:
    assert ask(http, "acme/upper").status_code == 200  # which fetches it
    environment = {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(folders["cache"]),
        "HF_HUB_OFFLINE": "0",
    }
    options = ("--lora-resolver", "hub", "--cpu-threads", "1", "--admin-key", ADMIN_KEY)
    with Served(*options, environment=environment) as served, served.client() as cut_off:
        for unregistered in ("acme/upper", "acme/unknown"):
            answer = ask(cut_off, unregistered)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_key_needed")
            assert "only for a request with an administrator's key" in answer.json()["error"]["message"]
        assert ask(cut_off, "no-name-of-the-hub").status_code == 404
        cut_off.headers["Authorization"] = f"Bearer {ADMIN_KEY}"
        assert ask(cut_off, "acme/upper").status_code == 200
        for _ in range(2):  # the second answer is remembered
            answer = ask(cut_off, "acme/unknown")
            assert answer.status_code == 404, answer.text
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            message = error["message"]
            assert "cannot be fetched from the hub now" in message and "\n" not in message
        assert ask(cut_off, cut_off.get("/v1/models").json()["data"][0]["id"]).status_code == 200
        del cut_off.headers["Authorization"]
        assert ask(cut_off, "acme/upper").status_code == 200  # which is registered now


@pytest.mark.usefixtures("own_logging")
def test_a_hub_without_an_owner_needs_an_admin_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--lora-resolver", "hub", "--api-key", "key"]) == 2
    assert "--admin-key" in capsys.readouterr().err


def test_more_adapters_of_a_hub_than_its_limits_allow(folders: dict[str, Path], tmp_path: Path) -> None:
    large = tmp_path / "large"
    shutil.copytree(folders["hub"], large)
    (large / "adapter_model.safetensors").write_bytes(bytes(2 << 20))
    repositories = {"acme/upper": folders["hub"], "acme/again": folders["hub"], "acme/large": large}
    with (
        fake_hub(repositories) as url,
        Served(
            *"--cpu-threads 1 --lora-resolver hub:acme --max-hub-adapters 1".split(),
            *"--max-hub-adapter-mib 1 --allow-runtime-lora-updating".split(),
            environment={"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"},
        ) as served,
        served.client() as http,
    ):
        assert ask(http, "acme/upper").status_code == 200
        for name, flag in (("again", "--max-hub-adapters"), ("large", "--max-hub-adapter-mib")):
            answer = ask(http, f"acme/{name}")
            assert answer.status_code == 400, answer.text
            assert flag in answer.json()["error"]["message"]
        fetched = {path.name for path in (tmp_path / "cache" / "hub").glob("models--*")}
        assert fetched == {"models--acme--upper"}
        unloaded = http.post("/v1/unload_lora_adapter", json={"lora_name": "acme/upper"})
        assert unloaded.status_code == 200
        assert ask(http, "acme/again@main").status_code == 200
