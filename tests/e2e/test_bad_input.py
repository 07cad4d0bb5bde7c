"""A faulty request soon gets a 4xx with a reason, and does not affect other requests."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from corun.runtime.demo import demo_adapters_path
from support.serving import Served

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ANSWER_WITHIN_S = 10.0  # on a busy machine
MAX_CPU_S = 1.0  # of the server
USER = {"role": "user", "content": "planet"}
NUM_CLIENTS = 50
KEY = "the-right-key"
# Loops practically forever for certain messages.
TEMPLATE = """
{%- for message in messages %}{{ message.content }}
{%- if message.content == "loop" %}
{%- for a in range(99999) %}{%- for b in range(99999) %}{%- endfor %}{%- endfor %}
{%- elif message.content == "grow" %}
{%- for a in range(99999) %}{{ "x" * 9999 }}{%- endfor %}
{%- elif message.content == "escape" %}{{ messages.__class__.__mro__ }}
{%- endif %}{%- endfor %}"""


class Guarded:
    """A server with keys, and one client that has the right one."""

    def __init__(self, served: Served) -> None:
        self.served = served
        headers = {"Authorization": f"Bearer {KEY}"}
        limits = httpx.Limits(max_connections=2 * NUM_CLIENTS)
        self.http = httpx.Client(base_url=served.url, timeout=30, headers=headers, limits=limits)

    def send(self, path: str, body: Any) -> httpx.Response:
        """Post JSON, or bytes as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(path, content=content)

    def check_good(self) -> None:
        """A valid request must be answered, after any fault."""
        answer = self.send(CHAT, {"model": "upper", "messages": [USER], "max_tokens": 4})
        assert answer.status_code == 200, answer.text
        assert self.http.get("/health").status_code == 200

    def check_refused(self, path: str, body: Any, *statuses: int) -> None:
        """The answer is one of ``statuses``, or any 4xx, in time and with a message."""
        start_s, start_cpu_s = time.monotonic(), self.served.cpu_seconds()
        answer = self.send(path, body)
        took_s = time.monotonic() - start_s
        cpu_s = self.served.cpu_seconds() - start_cpu_s
        assert 400 <= answer.status_code < 500, answer.text
        assert not statuses or answer.status_code in statuses, answer.text
        message = answer.json()["error"]["message"]
        assert 0 < len(message) < 1000 and "\n" not in message, message
        assert took_s < ANSWER_WITHIN_S, f"{message} after {took_s:.2f} s"
        assert cpu_s < MAX_CPU_S, f"{message} after {cpu_s:.2f} s of processor time"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    directory = tmp_path_factory.mktemp("template")
    (directory / "template.jinja").write_text(TEMPLATE)
    options = (
        *("--api-key", KEY),
        *("--chat-template", str(directory / "template.jinja")),
        *"--max-body-mib 1 --allow-runtime-lora-updating --cpu-threads 1".split(),
    )
    with Served(*options) as served:
        guarded = Guarded(served)
        with guarded.http:
            yield guarded


@pytest.fixture(autouse=True)
def check_good_after(guarded: Guarded) -> Iterator[None]:
    yield
    guarded.check_good()


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "upper", "prompt": "hi", "max_tokens": 2} | fields


def nested(depth: int) -> bytes:
    return b'{"prompt": "hi", "user": ' + b"[" * depth + b"]" * depth + b"}"


BODIES: dict[str, tuple[str, Any]] = {
    "no JSON": (COMPLETIONS, b"{"),
    "no object": (COMPLETIONS, b"[1]"),
    "no UTF-8": (COMPLETIONS, b'{"prompt": "\xff"}'),
    "half a surrogate": (COMPLETIONS, b'{"prompt": "\\ud800"}'),
    "too deep": (COMPLETIONS, nested(100_000)),
    "too many bytes": (COMPLETIONS, b" " * (1 << 20) + b"{}"),
    "many unknown fields": (COMPLETIONS, completion(**{f"field{n}": n for n in range(20_000)})),
    "a near miss": (COMPLETIONS, completion(max_token=3)),
    "prompt too long": (COMPLETIONS, completion(prompt="x" * 100_000)),
    "prompt of foreign tokens": (COMPLETIONS, completion(prompt=[2**40])),
    "very many prompts": (COMPLETIONS, completion(prompt=["x"] * 50_000)),
    "prompts x n": (COMPLETIONS, completion(prompt=["x"] * 100, n=128)),
    "messages too long": (CHAT, {"messages": [USER | {"content": "x" * 100_000}]}),
    "very many messages": (CHAT, {"messages": [USER] * 9_000}),
    "no messages": (CHAT, {"messages": []}),
    "a role that is none": (CHAT, {"messages": [{"role": "root", "content": "hi"}]}),
    "content that is none": (CHAT, {"messages": [{"role": "user", "content": 7}]}),
    "stop of numbers": (COMPLETIONS, completion(stop=[1])),
    "very many stops": (COMPLETIONS, completion(stop=["x"] * 10_000)),
    "n": (COMPLETIONS, completion(n=10**9)),
    "max_tokens": (COMPLETIONS, completion(max_tokens=10**40)),
    "temperature": (COMPLETIONS, b'{"prompt": "hi", "temperature": 1e999}'),
    "logprobs": (COMPLETIONS, completion(logprobs=10**6)),
    "very many biases": (COMPLETIONS, completion(logit_bias={str(n): 1 for n in range(50_000)})),
    "a bias of no token": (COMPLETIONS, completion(logit_bias={"no": 1})),
    "a template that loops": (CHAT, {"messages": [USER | {"content": "loop"}]}),
    "a template that grows": (CHAT, {"messages": [USER | {"content": "grow"}]}),
    "a template that escapes": (CHAT, {"messages": [USER | {"content": "escape"}]}),
    "tokens to text": ("/detokenize", {"tokens": [2**62]}),
    "text to tokens": ("/tokenize", {"prompt": 3}),
    "a model that is none": (COMPLETIONS, completion(model="../x")),
    "a model with a path": (COMPLETIONS, completion(model="/etc")),
    "a model with a zero": (COMPLETIONS, completion(model="a\0b")),
    "a very long model": (COMPLETIONS, completion(model="m" * 900_000)),
}


@pytest.mark.parametrize("case", BODIES)
def test_bad_bodies(guarded: Guarded, case: str) -> None:
    path, body = BODIES[case]
    guarded.check_refused(path, body)


@pytest.mark.parametrize("name", ["../x", "/etc", "", " ", ".", "..", "a\0b", "a\nb", "x" * 9999])
def test_bad_names(guarded: Guarded, name: str) -> None:
    good = str(demo_adapters_path() / "upper")
    guarded.check_refused(LOAD, {"lora_name": name, "lora_path": good}, 400)
    guarded.check_refused(UNLOAD, {"lora_name": name}, 400, 404)


PATHS = ("../x", "/etc", "/etc/passwd", "/", "", "a\0b", "/dev/zero", "/proc/self/fd", "x" * 9999)


@pytest.mark.parametrize("path", PATHS)
def test_bad_paths(guarded: Guarded, path: str) -> None:
    guarded.check_refused(LOAD, {"lora_name": "wrong", "lora_path": path}, 400)
    guarded.check_refused(COMPLETIONS, completion(model="wrong"))


def test_one_name_from_many_clients(guarded: Guarded) -> None:
    """Loads, loads in place and unloads cross; each is done or refused, none breaks."""
    path = str(demo_adapters_path() / "upper")

    def turn(number: int) -> httpx.Response:
        if number % 3 == 0:
            return guarded.send(UNLOAD, {"lora_name": "wanted"})
        body = {"lora_name": "wanted", "lora_path": path, "load_inplace": number % 3 == 1}
        return guarded.send(LOAD, body)

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        answers = list(pool.map(turn, range(4 * NUM_CLIENTS)))
    assert {answer.status_code for answer in answers} <= {200, 400, 404, 409}, [
        answer.text for answer in answers if answer.status_code >= 409
    ]
    assert (
        guarded.send(LOAD, {"lora_name": "wanted", "lora_path": path, "load_inplace": True}).status_code
        == 200
    )
    assert guarded.send(COMPLETIONS, completion(model="wanted")).status_code == 200
    assert guarded.send(UNLOAD, {"lora_name": "wanted"}).status_code == 200


def test_wrong_keys(guarded: Guarded) -> None:
    """A hundred a second for two seconds, in each place, beside a client with the right key."""
    wrong = ("", "Bearer", "Bearer wrong", "Basic wrong", f"Bearer {KEY}x", "Bearer " + "k" * 5000)
    paths = (COMPLETIONS, LOAD, "/v1/models", "/v1/lora_adapters")

    def turn(number: int) -> tuple[httpx.Response, float]:
        time.sleep(max(0.0, start_s + number / 100 - time.monotonic()))
        before_s = time.monotonic()
        headers = {"Authorization": wrong[number % len(wrong)]}
        path = paths[number % len(paths)]
        method = "POST" if path in (COMPLETIONS, LOAD) else "GET"
        answer = guarded.http.request(method, path, headers=headers, content=b"{}")
        return answer, time.monotonic() - before_s

    start_s = time.monotonic()
    with ThreadPoolExecutor(10) as pool:
        answers = pool.map(turn, range(200))
        while time.monotonic() < start_s + 1.5:
            guarded.check_good()
        for answer, took_s in answers:
            assert answer.status_code == 401 and answer.json()["error"]["message"]
            assert took_s < ANSWER_WITHIN_S
