"""Large bodies beside streams: none holds up the streams, takes much memory or ends the server."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from support.attacked import MIB, Attacked, Rows, streams_on
from support.memory_group import memory_group
from support.serving import Served, corun_command

pytestmark = pytest.mark.faults

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
GROUP_BYTES = 3 << 30
TEMPLATE = """
{%- for message in messages %}
{%- if message.content == "wordwrap" %}{{ ("a " * 2000000) | wordwrap(1) }}
{%- elif message.content == "urlize" %}{{ ("a.b " * 250000) | urlize }}
{%- elif message.content == "chain" %}
{%- for i in range(999) %}{{ ("a " * 100000) | title | wordwrap(2) | length }}{% endfor %}
{%- elif message.content == "nested" %}{% set ns = namespace(x=[1]) %}
{%- for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}
{%- elif message.content == "compared" %}{% set ns = namespace(x=1, y=1) %}
{%- for i in range(60) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% set ns.y = dict(a=ns.y, b=ns.y) %}
{%- endfor %}{{ ns.x == ns.y }}
{%- elif message.content == "escapes" %}{{ ("&" * 4000000) | forceescape | forceescape | length }}
{%- elif message.content == "translate" %}{{ ("a" * 4000000).translate({97: "b" * 200}) | length }}
{%- else %}{{ message.content }}{% endif %}{% endfor %}"""


def chat(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "hi", "max_tokens": 4, **fields}


def words(num_bytes: int) -> str:
    return ("the quick brown fox, and 1234 others " * (num_bytes // 37 + 1))[:num_bytes]


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    calls = [{"type": "function", "id": "x", "function": function}]
    messages = [{"role": "assistant", "tool_calls": calls}, {"role": "user", "content": "a"}]
    return {"messages": messages, "max_tokens": 4}


# The path, what makes the body, and the statuses that may answer it.
BODIES: dict[str, tuple[str, Callable[[], Any], set[int]]] = {
    "a prompt of 31 MB": (COMPLETIONS, lambda: completion(prompt=words(31 * MIB)), {400}),
    "a conversation of 31 MB": (CHAT, lambda: chat(words(31 * MIB)), {400}),
    "10 MB of spaces": (COMPLETIONS, lambda: completion(prompt=" " * (10 * MIB)), {200, 400}),
    "10 MB of spaces, truncated": (
        COMPLETIONS,
        lambda: completion(prompt=" " * (10 * MIB), truncate_prompt_tokens=8),
        {200, 400},
    ),
    "31 MB, truncated": (
        COMPLETIONS,
        lambda: completion(prompt=words(31 * MIB), truncate_prompt_tokens=8),
        {200},
    ),
    "1000 prompts of 4000 characters": (
        COMPLETIONS,
        lambda: completion(prompt=[words(4000)] * 1000),
        {200, 400, 429},
    ),
    "1,000,000 prompts": (COMPLETIONS, lambda: completion(prompt=["a"] * 10**6), {400}),
    "5,000,000 tokens": (COMPLETIONS, lambda: completion(prompt=[5] * (5 * 10**6)), {400}),
    "16 stop strings of 1 MB": (COMPLETIONS, lambda: completion(stop=["ab" * 2**19] * 16), {400}),
    "16 KiB of stop strings x 128": (
        COMPLETIONS,
        lambda: completion(stop=["ab" * 512] * 16, n=128),
        {200, 400, 429},
    ),
    "100 bad words of 90 kB": (COMPLETIONS, lambda: completion(bad_words=["b" * 90_000] * 100), {400}),
    "64 KiB of bad words": (COMPLETIONS, lambda: completion(bad_words=["b" * 512] * 128), {200}),
    "5,000,000 allowed tokens": (COMPLETIONS, lambda: completion(allowed_token_ids=[5] * (5 * 10**6)), {400}),
    "5,000,000 stop tokens": (COMPLETIONS, lambda: completion(stop_token_ids=[5] * (5 * 10**6)), {400}),
    "1,000,000 biases": (
        COMPLETIONS,
        lambda: completion(logit_bias={str(n): 1 for n in range(10**6)}),
        {400},
    ),
    "500,000 content parts": (CHAT, lambda: chat([{"type": "text", "text": "a"}] * 500_000), {400}),
    "8192 content parts": (CHAT, lambda: chat([{"type": "text", "text": "a", "x": 1}] * 8192), {200, 400}),
    "arguments of 10,000,000 items": (CHAT, lambda: call("[" + "1," * 10**7 + "1]"), {400}),
    "250,000 items": (CHAT, lambda: chat("a", chat_template_kwargs={"x": [[]] * 125_000}), {200, 400}),
    "130,000 names": (COMPLETIONS, lambda: completion(user={str(n): 1 for n in range(130_000)}), {200, 400}),
    "10,000,000 lists": (COMPLETIONS, lambda: completion(user=[[]] * (8 * 10**6)), {400}),
    "20 MB of escapes": (COMPLETIONS, lambda: completion(prompt='\n"' * (5 * 10**6)), {400}),
    "a model of 31 MB": (COMPLETIONS, lambda: completion(model="m" * (31 * MIB)), {400}),
    "a model that is a list": (COMPLETIONS, lambda: completion(model=[1] * 10**6), {400}),
    "a salt of 31 MB": (COMPLETIONS, lambda: completion(cache_salt="m" * (31 * MIB)), {400}),
    "/tokenize of 30 MB": (TOKENIZE, lambda: {"prompt": words(30 * MIB)}, {400}),
    "/tokenize with texts": (
        TOKENIZE,
        lambda: {"prompt": words(400_000), "return_token_strs": True},
        {200, 400},
    ),
    "/detokenize of 5,000,000 ids": (DETOKENIZE, lambda: {"tokens": [5] * (5 * 10**6)}, {400}),
    "/detokenize of 131,072 ids": (DETOKENIZE, lambda: {"tokens": [5] * 131_072}, {200}),
    "wordwrap of 4 MB": (CHAT, lambda: chat("wordwrap"), {400}),
    "urlize of 1 MB": (CHAT, lambda: chat("urlize"), {400}),
    "a chain of filters": (CHAT, lambda: chat("chain"), {400}),
    "nested lists": (CHAT, lambda: chat("nested"), {400}),
    "compared lists": (CHAT, lambda: chat("compared"), {400}),
    "escapes": (CHAT, lambda: chat("escapes"), {400}),
    "a translation": (CHAT, lambda: chat("translate"), {400}),
}


@pytest.fixture(scope="module")
def attacked(rows: Rows, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    with ExitStack() as stack:
        command, group = corun_command(), None
        try:
            group = stack.enter_context(memory_group(GROUP_BYTES))
            command = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$0" "$@"', *command]
        except pytest.skip.Exception:
            pass  # the test that needs it says so
        served = stack.enter_context(
            Served(
                *"--device cpu --memory-gib 0.25".split(),
                *("--chat-template", str(template)),
                *("--max-body-mib", "32"),
                command=command,
            )
        )
        yield stack.enter_context(streams_on(served, rows, group))


def send(served: Served, path: str, body: bytes, timeout_s: float = 60.0) -> int:
    headers = {"content-type": "application/json"}
    answer = httpx.post(served.url + path, content=body, headers=headers, timeout=timeout_s)
    if answer.status_code == 429:
        assert int(answer.headers["retry-after"]) >= 1
    return answer.status_code


def test_without_an_attack(attacked: Attacked) -> None:
    attacked.check("nothing", lambda: time.sleep(3))


@pytest.mark.parametrize("name", BODIES)
def test_a_large_body(attacked: Attacked, name: str) -> None:
    path, make, statuses = BODIES[name]
    body = json.dumps(make()).encode()

    def attack() -> int:
        status = send(attacked.served, path, body)
        assert status in statuses, status
        return status

    attacked.check(name, attack)


def left_by_client(served: Served, body: bytes) -> None:
    """Send a body and close the connection."""
    host, _, port = served.url.removeprefix("http://").partition(":")
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head.encode() + body)
        time.sleep(0.2)


def test_prompts_of_clients_that_have_left_hold_up_no_other(attacked: Attacked) -> None:
    large = json.dumps(completion(prompt=words(12 * MIB))).encode()
    usual = json.dumps(completion(prompt="a b " * 60)).encode()

    def attack() -> int:
        for _ in range(2):
            left_by_client(attacked.served, large)
        began_s = time.monotonic()
        status = send(attacked.served, COMPLETIONS, usual)
        assert time.monotonic() - began_s < 5, "it waited for prompts whose clients have left"
        assert status == 200
        return status

    attacked.check("2 x 12 MB, clients left", attack)


def test_many_large_bodies_at_once(attacked: Attacked) -> None:
    body = json.dumps(completion(prompt=words(12 * MIB))).encode()

    def attack() -> list[int]:
        statuses: set[int] = set()

        def client() -> None:
            statuses.add(send(attacked.served, COMPLETIONS, body))

        threads = [threading.Thread(target=client) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert statuses <= {400, 429}
        return sorted(statuses)

    attacked.check("20 x 12 MB at once", attack)


def test_nothing_is_killed_in_a_control_group(attacked: Attacked) -> None:
    """It runs after the others."""
    if attacked.group is None:
        pytest.skip("no control group of memory can be made here")
    assert attacked.num_killed() == 0
    for process in attacked.served.processes:
        assert process.is_running()
