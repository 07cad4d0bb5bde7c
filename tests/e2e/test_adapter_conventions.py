"""An adapter's chat template, end tokens and added tokens are a part of its version.

The base model is a table: the most likely token after "a" is "b", and so on; adapters do not change
it. So answers show the rendered prompt, and what ended them.
"""

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from corun import Engine, RequestError, SamplingParams
from corun.runtime.adapters.checkpoint import WEIGHTS_NAME
from safetensors.torch import load_file, save_file
from support.conventions import NUM_EMBEDDINGS, save_adapter, save_base
from support.serving import Served, wait_until

HELLO = [{"role": "user", "content": "a"}]
GREEDY = SamplingParams(temperature=0, max_tokens=6)
SETTLED_S = 20.0  # two seconds, on a busy machine
OPTIONS = """
    --cpu-threads 1 --memory-gib 0.1 --max-model-len 128 --dtype float32
    --allow-runtime-lora-updating
""".split()


def template(mark: str) -> str:
    return mark + "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"), chat_template=template("x"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def served(base: Path, folder: Path) -> Iterator[Served]:
    with Served(str(base), "--lora-dir", str(folder), *OPTIONS) as served:
        yield served


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with served.client() as http:
        yield http


def adapter(directory: Path, *, seed: int = 0, **files: Any) -> Path:
    """Write files by name ("." is "__"); contents other than text and bytes as JSON."""
    save_adapter(directory, seed=seed)
    for name, content in files.items():
        path = directory / name.replace("__", ".")
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def load(http: httpx.Client, name: str, path: Path, **fields: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **fields}
    return http.post("/v1/load_lora_adapter", json=body)


def chat(http: httpx.Client, model: str | None, content: str = "a", **fields: Any) -> httpx.Response:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 6,
        "return_token_ids": True,
        **fields,
    }
    return http.post("/v1/chat/completions", json=body)


def complete(http: httpx.Client, model: str | None, prompt: Any = "a", **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 6, **fields}
    return http.post("/v1/completions", json=body | {"return_token_ids": True})


def prompt_of(http: httpx.Client, model: str, content: str = "a") -> str:
    """Return the rendered prompt of a conversation."""
    answer = chat(http, model, content)
    assert answer.status_code == 200, answer.text
    ids = answer.json()["prompt_token_ids"]
    return str(http.post("/detokenize", json={"model": model, "tokens": ids}).json()["prompt"])


def token_of(http: httpx.Client, text: str) -> int:
    (token_id,) = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return int(token_id)


def ends(answer: httpx.Response) -> tuple[str, str, Any]:
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text, choice["finish_reason"], choice["stop_reason"]


def shown(http: httpx.Client, name: str) -> dict[str, Any]:
    found: dict[str, Any] = http.get(f"/v1/lora_adapters/{name}").json()
    return found


def test_what_is_written_into_a_folder_without_a_reload_changes_nothing(
    http: httpx.Client, base: Path, tmp_path: Path
) -> None:
    path = adapter(tmp_path / "a", chat_template__jinja=template("y"))
    assert load(http, "kept", path).status_code == 200
    assert prompt_of(http, "kept") == "ya"
    written = {"model": "kept", "messages": [{"role": "user", "content": "a"}]}
    tokens = http.post("/tokenize", json=written).json()["tokens"]
    assert tokens == [token_of(http, "y"), token_of(http, "a")]
    (path / "chat_template.jinja").write_text(template("z"))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    assert prompt_of(http, "kept") == "ya"
    shutil.rmtree(path)
    assert prompt_of(http, "kept") == "ya"
    assert ends(chat(http, "kept"))[1] == "length"


def test_a_reload_takes_a_new_template_and_keeps_kv_and_device_copy(
    http: httpx.Client, base: Path, tmp_path: Path
) -> None:
    path = adapter(tmp_path / "a", chat_template__jinja=template("y"))
    load(http, "again", path)
    prompt = "abcabcabc" * 8
    complete(http, "again", prompt)
    before = shown(http, "again")
    (path / "chat_template.jinja").write_text(template("z"))
    assert load(http, "again", path).status_code == 400  # another version, without load_inplace
    assert prompt_of(http, "again") == "ya"
    assert load(http, "again", path, load_inplace=True).status_code == 200
    assert prompt_of(http, "again") == "za"
    after = shown(http, "again")
    assert after["version"] == before["version"]
    assert after["conventions"] != before["conventions"]
    assert (after["loads"], after["evictions"]) == (before["loads"], before["evictions"])
    assert after["draining"] == []
    usage = complete(http, "again", prompt).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_watched_folder_takes_each_change_as_a_version(
    http: httpx.Client, base: Path, folder: Path
) -> None:
    path = adapter(folder / "watched")
    wait_until(lambda: chat(http, "watched").status_code == 200, SETTLED_S)
    assert prompt_of(http, "watched") == "xa"
    version = shown(http, "watched")["version"]
    (path / "chat_template.jinja").write_text(template("y"))
    wait_until(lambda: prompt_of(http, "watched") == "ya", SETTLED_S)
    assert shown(http, "watched")["version"] == version
    _scale(path / WEIGHTS_NAME)
    wait_until(lambda: shown(http, "watched")["version"] != version, SETTLED_S)
    assert prompt_of(http, "watched") == "ya"
    (path / "chat_template.jinja").unlink()
    wait_until(lambda: prompt_of(http, "watched") == "xa", SETTLED_S)


def _scale(path: Path) -> None:
    save_file({name: 2 * tensor for name, tensor in load_file(path).items()}, path)


def test_a_watched_folder_replaced_by_rename_is_one_version_or_the_other(
    http: httpx.Client, base: Path, folder: Path, tmp_path: Path
) -> None:
    adapter(folder / "swapped", chat_template__jinja=template("y"))
    wait_until(lambda: chat(http, "swapped").status_code == 200, SETTLED_S)
    version = shown(http, "swapped")["version"]
    stop = threading.Event()
    seen: set[tuple[str, int]] = set()
    y, z = (token_of(http, mark) for mark in "yz")

    def ask() -> None:
        while not stop.is_set():
            before = shown(http, "swapped")
            answer = chat(http, "swapped")
            after = shown(http, "swapped")
            if answer.status_code == 200 and before.get("version") == after.get("version"):
                seen.add((before["version"], answer.json()["prompt_token_ids"][0]))

    new = adapter(folder / ".new", seed=1, chat_template__jinja=template("z"))
    thread = threading.Thread(target=ask)
    thread.start()
    try:
        (folder / "swapped").rename(tmp_path / "old")
        new.rename(folder / "swapped")
        wait_until(lambda: shown(http, "swapped")["version"] != version, SETTLED_S)
    finally:
        stop.set()
        thread.join()
    now = shown(http, "swapped")["version"]
    assert prompt_of(http, "swapped") == "za"
    assert seen <= {(version, y), (now, z)} and (version, y) in seen


def test_one_folder_under_two_names_is_two_versions(http: httpx.Client, base: Path, tmp_path: Path) -> None:
    path = adapter(tmp_path / "a", chat_template__jinja=template("y"))
    load(http, "one", path)
    (path / "chat_template.jinja").write_text(template("z"))
    load(http, "two", path)
    assert (prompt_of(http, "one"), prompt_of(http, "two")) == ("ya", "za")
    assert shown(http, "one")["version"] == shown(http, "two")["version"]


def test_the_first_request_reads_template_and_weights(base: Path, tmp_path: Path) -> None:
    files: dict[str, Any] = {
        "chat_template__jinja": template("y"),
        "tokenizer_config__json": {"eos_token": "c"},
    }
    named = {chat: "by-chat", complete: "by-prompt"}
    modules = [f"{name}={adapter(tmp_path / name, **files)}" for name in named.values()]
    by_ids = adapter(tmp_path / "by-ids", added_tokens__json={"<near>": 20})
    modules.append(f"by-ids={by_ids}")
    with Served(str(base), "--lora-modules", *modules, *OPTIONS) as served, served.client() as http:
        for ask, name in named.items():
            assert shown(http, name)["version"] == ""
            answer = ask(http, name, return_timing=True)
            assert ends(answer)[:2] == ("b", "stop")
            assert answer.json()["timing"]["engine"][0]["parts_s"]["disk_read"] > 0
            assert prompt_of(http, name) == "ya"
        # A prompt of token ids needs no tokenizer, its answer does.
        assert ends(complete(http, "by-ids", [3], allowed_token_ids=[20], max_tokens=2)) == (
            "<near><near>",
            "length",
            None,
        )


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config__json": {"eos_token": "c"}},
        {"tokenizer_config__json": {"eos_token": {"content": "c", "special": True}}},
        {"special_tokens_map__json": {"eos_token": "c"}},
        {"special_tokens_map__json": {"eos_token": [{"content": "c"}]}},
        {"generation_config__json": {"eos_token_id": "ID"}},
        {"generation_config__json": {"eos_token_id": ["ID"]}},
    ],
)
def test_its_end_token_ends_its_answers(http: httpx.Client, base: Path, tmp_path: Path, files: Any) -> None:
    text = json.dumps(files).replace('"ID"', str(token_of(http, "c")))
    load(http, "ending", adapter(tmp_path / "a", **json.loads(text)), load_inplace=True)
    for ask in (chat, complete):
        assert ends(ask(http, "ending")) == ("b", "stop", None)
        assert ends(ask(http, "ending", ignore_eos=True))[1] == "length"
        assert ends(ask(http, "ending", include_stop_str_in_output=True))[0] == "bc"
        assert len(ends(ask(http, "ending", min_tokens=6))[0]) > 1
    assert ends(complete(http, None))[1] == "length"


def test_an_end_token_of_several_tokens_is_said_once_and_not_used(
    served: Served, http: httpx.Client, base: Path, tmp_path: Path
) -> None:
    config = {"eos_token": "<|no token|>"}
    load(http, "several", adapter(tmp_path / "several", tokenizer_config__json=config))
    for _ in range(2):
        assert ends(complete(http, "several"))[1] == "length"
    (line,) = [line for line in served.log_lines if str(tmp_path / "several") in line]
    assert "'<|no token|>'" in line and "ends no answer" in line


def _tokenizer(base: Path, *added: dict[str, Any]) -> str:
    """The tokenizer of the base, with more tokens."""
    tokenizer: dict[str, Any] = json.loads((base / "tokenizer.json").read_text())
    like = tokenizer["added_tokens"][-1]
    tokenizer["added_tokens"] += [{**like, **one} for one in added]
    return json.dumps(tokenizer)


def test_a_tokenizer_with_more_tokens_keeps_its_template(
    http: httpx.Client, base: Path, tmp_path: Path
) -> None:
    more = ({"content": "<pad>", "id": NUM_EMBEDDINGS}, {"content": "<near>", "id": 20})
    path = adapter(
        tmp_path / "a", chat_template__jinja=template("y"), tokenizer__json=_tokenizer(base, *more)
    )
    load(http, "more", path)
    assert prompt_of(http, "more") == "ya"
    assert chat(http, "more", "<near>a").json()["prompt_token_ids"][1] == 20
    assert complete(http, "more", "<near>a").json()["choices"][0]["prompt_token_ids"][0] == 20
    assert prompt_of(http, "more", "<near>a") == "y<near>a"
    for ask, param in ((chat, "messages"), (complete, "prompt")):
        refused = ask(http, "more", "a<pad>")
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert "'<pad>'" in error["message"] and error["param"] == param
        assert ask(http, "more", "a").status_code == 200
    assert complete(http, None, "a<pad>").status_code == 200


def test_another_tokenizer_refuses_conversations_and_nothing_else(
    served: Served, http: httpx.Client, base: Path, tmp_path: Path
) -> None:
    other = json.loads(_tokenizer(base))
    vocab = other["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    files = {"chat_template__jinja": template("y"), "tokenizer__json": other}
    assert load(http, "other", adapter(tmp_path / "other", **files)).status_code == 200
    _refuses(served, http, "other", "its tokenizer is not the base's")


def _refuses(served: Served, http: httpx.Client, name: str, reason: str) -> None:
    refused = chat(http, name)
    assert refused.status_code == 400, refused.text
    message = refused.json()["error"]["message"]
    assert repr(name) in message and reason in message and "/v1/completions" in message
    assert reason in shown(http, name)["messages_refused"]
    assert complete(http, name).status_code == 200
    assert chat(http, None).status_code == 200
    assert sum(reason in line for line in served.log_lines) >= 1


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"chat_template__jinja": b"a\xff"}, "chat_template.jinja is not valid UTF-8"),
        ({"chat_template__jinja": "x" * ((1 << 20) + 1)}, "has more than 1048576 bytes"),
        ({"tokenizer_config__json": b'{"\xff": 1}'}, "tokenizer_config.json is not valid UTF-8"),
        ({"tokenizer_config__json": " " * ((16 << 20) + 1)}, "has more than 16777216 bytes"),
        ({"tokenizer__json": "{"}, "tokenizer.json is not a tokenizer"),
        ({"added_tokens__json": {"<x>": 10**30}}, "'<x>' in added_tokens.json"),
        ({"chat_template__jinja": "x", "tokenizer_config__json": {"bos_token": "\ud800"}}, "utf-8"),
    ],
)
def test_files_that_cannot_be_read_refuse_conversations_and_nothing_else(
    served: Served, http: httpx.Client, base: Path, tmp_path: Path, files: Any, reason: str
) -> None:
    path = adapter(tmp_path / "faulty", **files)
    assert load(http, "faulty", path, load_inplace=True).status_code == 200
    _refuses(served, http, "faulty", reason)


def engine_of(base: Path, **options: Any) -> Engine:
    return Engine(
        model=str(base), cpu_threads=1, memory_gib=0.1, max_model_len=128, dtype="float32", **options
    )


def test_a_base_without_a_template_and_with_two_end_tokens(base: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(base, tmp_path / "base")
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((bare / "tokenizer_config.json").read_text()) | {"eos_token": "c"}
    config.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    pad = _tokenizer(base, {"content": "<pad>", "id": NUM_EMBEDDINGS})
    own = adapter(tmp_path / "own", chat_template__jinja=template("y"), tokenizer__json=pad)
    none = adapter(tmp_path / "none")
    with engine_of(bare, lora_modules=(f"own={own}", f"none={none}")) as engine:
        assert engine.apply_chat_template(HELLO, "own") == "ya"
        with pytest.raises(RequestError, match="neither adapter 'none' nor the model has a chat template"):
            engine.apply_chat_template(HELLO, "none")
        # The last one ends at </s>, of generation_config.json.
        params = [GREEDY, replace(GREEDY, ignore_eos=True), GREEDY]
        outputs = [one.outputs[0] for one in engine.generate(["a", "a", ">"], params)]
        assert [one.finish_reason for one in outputs] == ["stop", "length", "stop"]
        assert (outputs[0].text, outputs[0].stop_reason) == ("b", None)


def test_templates_of_adapters_can_be_left(base: Path, tmp_path: Path) -> None:
    path = adapter(
        tmp_path / "a",
        chat_template__jinja=template("y"),
        generation_config__json={"eos_token_id": 3},
        tokenizer_config__json="{",
    )
    with engine_of(base, adapter_templates="ignore", lora_modules=(f"a={path}",)) as engine:
        assert engine.apply_chat_template(HELLO, "a") == "xa"
        (output,) = engine.generate("a", GREEDY, "a")
        assert output.outputs[0].finish_reason == "length"


def test_each_answer_is_of_one_version_however_often_it_changes(
    http: httpx.Client, base: Path, tmp_path: Path
) -> None:
    """Each version has a mark in its template, and an end token of its own."""
    for mark, end in (("y", "c"), ("z", "d")):
        adapter(
            tmp_path / mark, chat_template__jinja=template(mark), tokenizer_config__json={"eos_token": end}
        )
    load(http, "both", tmp_path / "y")
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            for mark in "zy":
                assert load(http, "both", tmp_path / mark, load_inplace=True).status_code == 200

    thread = threading.Thread(target=change)
    thread.start()
    try:
        seen = set()
        for number in range(600):
            answer = chat(http, "both")
            assert answer.status_code == 200, answer.text
            seen.add((answer.json()["prompt_token_ids"][0], ends(answer)[0]))
            if number >= 60 and len(seen) > 1:
                break
    finally:
        stop.set()
        thread.join()
    assert seen == {(token_of(http, "y"), "b"), (token_of(http, "z"), "bc")}


def test_tokens_beyond_the_base_are_generated_and_read_for_their_adapter_alone(
    http: httpx.Client, base: Path, tmp_path: Path
) -> None:
    """The adapter says "<new>" after "d", and goes on as after "b"."""
    new = NUM_EMBEDDINGS
    path = adapter(tmp_path / "new_token", added_tokens__json={"<new>": new})
    weights = load_file(base / "model.safetensors")
    b, d = token_of(http, "b"), token_of(http, "d")
    saved = {}
    for name, column in (("model.embed_tokens", b), ("lm_head", d)):
        row = torch.zeros(1, 64)
        row[0, column] = 3.0
        saved[f"base_model.model.{name}.weight"] = torch.cat([weights[f"{name}.weight"], row])
    save_file(load_file(path / WEIGHTS_NAME) | saved, path / WEIGHTS_NAME)
    assert load(http, "new_token", path).status_code == 200
    assert ends(complete(http, "new_token", max_tokens=8))[0] == "bcd<new>cd<new>c"
    assert ends(complete(http, "new_token", "<new>"))[0].startswith("cd<new>")
    assert ends(complete(http, "new_token", [new]))[0].startswith("cd<new>")
    tokens = {"model": "new_token", "prompt": "a<new>"}
    ids = http.post("/tokenize", json=tokens).json()["tokens"]
    text = http.post("/detokenize", json={"model": "new_token", "tokens": ids}).json()["prompt"]
    assert (ids[-1], text) == (new, "a<new>")
    assert ends(complete(http, None, max_tokens=8))[0] == "bcdabcda"
    for model, prompt in ((None, [new]), ("new_token", [new + 1])):
        refused = complete(http, model, prompt)
        assert refused.status_code == 400 and "the model's ids are 0 to" in refused.text
    answer = http.post("/detokenize", json={"tokens": [new]})
    assert answer.status_code == 400
