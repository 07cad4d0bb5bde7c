"""Memory and time of long texts follow from the context, not from the text."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

pytestmark = pytest.mark.faults

MAX_BYTES = 300 << 20

# Prints the number of tokens or the error, the peak of memory in bytes, and the seconds.
_SCRIPT = """
import asyncio, json, sys, time
from corun.runtime.errors import RequestError
from corun.runtime.frontend.chat_template import ChatTemplate
from corun.runtime.frontend.codec import PlainCodec
from corun.runtime.frontend.tokenizer import Tokenizer
from corun.runtime.limits import prompt_limit
import tokenizers

backend = tokenizers.Tokenizer.from_str(sys.stdin.read())
text = eval(sys.argv[1])
tokenizer = Tokenizer(PlainCodec(backend, ChatTemplate(None, {})))
limit = prompt_limit(int(sys.argv[2]), json.loads(sys.argv[3]))
began_s = time.monotonic()
try:
    tokens = asyncio.run(tokenizer.encode_async(text, add_special_tokens=False, limit=limit))
    result = [len(tokens), tokens == [tokens[0]] * len(tokens)]
except RequestError as error:
    result = [str(error), False]
tokenizer.close()
# ru_maxrss would also count the process that started this one.
(line,) = (one for one in open("/proc/self/status") if one.startswith("VmHWM:"))
peak_bytes = int(line.split()[1]) << 10
print(json.dumps([*result, peak_bytes, time.monotonic() - began_s]))
"""


CASES: list[tuple[str, int, int | None, int | str]] = [
    ("' ' * (128 * 131_071)", 131_072, None, 131_071),
    ("' ' * (128 * 131_072)", 131_072, None, "more than 131071 tokens"),
    ("' ' * (1 << 25)", 131_072, None, "more than 131071 tokens"),
    ("'the world, ' * 3_000_000", 131_072, None, "more than 131071 tokens"),
    ("'the world, ' * 3_000_000", 512, None, "more than 511 tokens"),
    ("'the world, ' * 3_000_000", 131_072, 1000, 1000),
    ("' ' * 2_000_000", 131_072, 1000, 1000),
    ("' ' * (1 << 25)", 131_072, 1000, "cannot be tokenized in parts"),
    ("' ' * (1 << 25)", 512, 8, "cannot be tokenized in parts"),
    ("'x' * (1 << 25)", 131_072, None, "more than 131071 tokens"),
]


def run(text: str, max_model_len: int, num_kept: int | None) -> list[Any]:
    from support.tokenizers import run_tokenizer

    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, text, str(max_model_len), json.dumps(num_kept)],
        input=run_tokenizer(128).to_str(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: list[Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[int, Future[list[Any]]]]:
    """The results of the cases that are tested, two of which run at a time."""
    wanted = {
        item.callspec.params["case"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_memory_and_time
    }
    with ThreadPoolExecutor(2) as pool:
        yield {number: pool.submit(run, *case[:3]) for number, case in enumerate(CASES) if number in wanted}


@pytest.mark.parametrize("case", range(len(CASES)), ids=[str(one[:3]) for one in CASES])
def test_memory_and_time(runs: dict[int, Future[list[Any]]], case: int) -> None:
    expected = CASES[case][3]
    number, _, peak_bytes, took_s = runs[case].result()
    assert number == expected if isinstance(expected, int) else expected in number
    assert peak_bytes < MAX_BYTES, f"{peak_bytes / 2**20:.0f} MiB"
    assert took_s < 120
