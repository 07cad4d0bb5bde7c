"""What does structured output cost: in the engine's thread, in a batch, and until a first token?

- ``mask``: time of the engine's thread for a row with a grammar, beside a free one, with a
  vocabulary of 151,640 tokens: waiting for its mask, applying it, and consuming the token. The mask
  is filled by a thread during a pause, as during a forward pass. Also with forced tokens.
- ``rows``: 8 rows with grammars beside 8 free ones, against 16 free ones, in a model of 150 M. All
  answers have as many tokens. With all tokens drawn, masks are the only difference. With forced
  tokens, the rows with grammars end earlier, and the free ones then share their steps with fewer.
- ``forced``: tokens/s of whole records with forced tokens, over the same with all tokens drawn, for
  one client and eight, in a model of 150 M (``--size 1b``: 1.1 B).
- ``first``: first tokens of requests with schemas that were never seen, against free requests.
- ``--peer``: answers with schemas and free ones over HTTP, beside another project's server with the
  model that the other parts leave in ``bench/results/structure``, converted.

The last line is JSON.

    python bench/structure.py [--parts mask rows forced first] [--pairs 7] [--size 1b]
    python bench/structure.py --parts --peer "llama-server -m model.gguf --port {port} -t 2 -np 8"
"""

import argparse
import asyncio
import functools
import itertools
import json
import random
import shlex
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from corun import Engine, SamplingParams, StructuredOutput
from corun.gpu.execution.request_table import RequestState
from corun.gpu.execution.sampler import Sampler
from corun.runtime.grammar.compile import start_forcing, start_matcher
from corun.runtime.grammar.matcher import Matcher
from corun.runtime.grammar.tokenizer import make_ll_tokenizer
from corun.runtime.plan import BASE_ADAPTER, NewRequest, RequestId
from models import SIZES, one_torch_thread, save_model
from paired import compare, report, seconds
from serve import corun_server, free_port, running_server
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LARGE_VOCAB_SIZE = 151_640
MAX_ROW_US, MIN_ROWS_RATIO, MAX_FIRST_MS = 60.0, 0.97, 30.0
MIN_FORCED_RATIO = 1.3
MAX_ROWS_CONTROL = 0.02
NUM_TOKENS = 48
END = "<end>"
_PAUSE_S = 0.004  # of a forward pass
_FOLDER = Path(__file__).parent / "results" / "structure"
_CLIENTS, _ANSWER_TOKENS = (1, 8), 64
_ANSWER_TIMEOUT_S = 120.0


def byte_level_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a tokenizer of bytes, pairs and longer pieces of printable characters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    frequent = [chr(code) for code in range(33, 127)] + ["Ġ"]
    pairs = [(a, b) for a in frequent for b in frequent]
    longer = ((a + b, c) for (a, b), c in itertools.product(pairs, frequent))
    num_merges = vocab_size - len(letters) - 1
    merges = list(itertools.islice(itertools.chain(pairs, longer), num_merges))
    pieces = [*letters, *(a + b for a, b in merges)]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


def schema(number: int = 0) -> StructuredOutput:
    """Return an endless list of records; each number is another schema."""
    record = {
        "type": "object",
        "properties": {
            f"name_{number}": {"type": "string"},
            "count": {"type": "integer"},
            "kind": {"enum": ["new", "old", "lost"]},
            "place": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
        "required": [f"name_{number}", "count", "kind"],
        "additionalProperties": False,
    }
    text = json.dumps({"type": "array", "items": record, "minItems": 1000})
    return StructuredOutput("json_schema", text)


_TEXT, _COUNT = (
    {"type": "string", "minLength": 3, "maxLength": 12},
    {"type": "integer", "minimum": 0, "maximum": 999},
)
_RECORDS: tuple[dict[str, Any], ...] = (
    {"first_name": _TEXT, "last_name": _TEXT, "age": _COUNT, "email": _TEXT},
    {"label": {"enum": ["positive", "negative", "neutral"]}, "confidence": _COUNT},
    {
        "order_number": _COUNT,
        "status": {"enum": ["open", "shipped", "returned"]},
        "items": {
            "type": "array",
            "minItems": 2,
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {"product": _TEXT, "quantity": _COUNT},
                "required": ["product", "quantity"],
                "additionalProperties": False,
            },
        },
    },
    {"title": _TEXT, "location": _TEXT, "is_online": {"type": "boolean"}, "participants": _COUNT},
)


def records() -> list[StructuredOutput]:
    """Return schemas of records as extraction and classification have them; each answer ends."""
    return [
        StructuredOutput(
            "json_schema",
            json.dumps(
                {
                    "type": "object",
                    "properties": properties,
                    "required": list(properties),
                    "additionalProperties": False,
                }
            ),
        )
        for properties in _RECORDS
    ]


@one_torch_thread()
def measure_mask(num_steps: int) -> dict[str, Any]:
    """Return microseconds of a row with a grammar, beyond those of a free row."""
    tokenizer = byte_level_tokenizer(LARGE_VOCAB_SIZE)
    end = tokenizer.get_vocab()[END]
    tree = make_ll_tokenizer(tokenizer.to_str(), num_ids=LARGE_VOCAB_SIZE, eos_token_ids=[end])
    start = start_matcher(schema(), tree)
    forcing = start_forcing(schema(), tree)
    sampler = Sampler([end], lambda _: Matcher(start, tree, Matcher(forcing, tree)))
    rng = torch.Generator().manual_seed(0)
    num_rows = 8
    logits = torch.randn(num_rows, LARGE_VOCAB_SIZE, generator=rng)

    def step_us(states: list[RequestState]) -> float:
        time.sleep(_PAUSE_S)
        given = logits.roll(len(states[0].output), dims=1)
        began_s = time.thread_time()  # of this thread alone, also on a busy machine
        rows = sampler.sample(given, states)
        sampler.take(list(zip(states, rows, strict=True)))
        return 1e6 * (time.thread_time() - began_s) / num_rows

    def states_of(structured: StructuredOutput | None, *, is_forced: bool = False) -> list[RequestState]:
        sampling = SamplingParams(
            temperature=0,
            max_tokens=20 * num_steps,
            structured_output=structured,
            structured_forced_tokens=is_forced,
            ignore_eos=True,
        )
        states = [
            RequestState(NewRequest(RequestId(one), (1, 2), sampling, BASE_ADAPTER), one, 4096)
            for one in range(num_rows)
        ]
        sampler.begin(states)
        return states

    bound, forced, free = states_of(schema()), states_of(schema(), is_forced=True), states_of(None)
    taken = np.array([[step_us(rows) for rows in (bound, forced, free)] for _ in range(num_steps)])
    drawn_us, forced_us, free_us = taken[4:].T
    sampler.close()
    return {
        "row_us": round(float(np.median(drawn_us - free_us)), 1),
        "row_us, 95 %": round(float(np.quantile(drawn_us - free_us, 0.95)), 1),
        "row_with_forced_us": round(float(np.median(forced_us - free_us)), 1),
        "tokens of a row with forced": round(len(forced[0].output) / num_steps, 2),
        "free_row_us": round(float(np.median(free_us)), 1),
    }


def save_bench_model(directory: Path, size: str = "150m") -> Path:
    """Save a Llama with a tokenizer of bytes and pieces; ``size``: one of ``SIZES``."""
    config = SIZES[size]
    save_model(config, directory)
    tokenizer = byte_level_tokenizer(config.vocab_size)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(directory)
    return directory


def measure_rows(engine: Engine, num_pairs: int) -> dict[str, Any]:
    """Return the speed of mixed batches relative to a free one, and of two free ones."""
    prompts = [[(7 * row + at) % 250 for at in range(24)] for row in range(16)]

    def batch_s(num_bound: int, *, is_forced: bool = False) -> float:
        sampling = [
            SamplingParams(
                temperature=1.0,
                seed=row,
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                structured_output=schema() if row % 2 and row // 2 < num_bound else None,
                structured_forced_tokens=is_forced,
            )
            for row in range(16)
        ]
        return seconds(lambda: engine.generate(prompts, sampling))

    free, drawn = functools.partial(batch_s, 0), functools.partial(batch_s, 8)
    forced = functools.partial(batch_s, 8, is_forced=True)
    for batch in (free, drawn, forced):
        batch()
    kinds = {"mixed_over_free": drawn, "forced_over_free": forced, "control": free}
    return {
        name: compare(free, other, num_pairs, progress=name)[0].to_json() for name, other in kinds.items()
    }


def measure_forced(engine: Engine, num_pairs: int) -> dict[str, Any]:
    """Return tokens/s with forced tokens over those with drawn ones, by clients, and a control."""
    figures: dict[str, Any] = {}
    structures = records()

    def token_s(num_clients: int, *, is_forced: bool) -> float:
        """Seconds for each token of answers with all schemas."""
        began_s, num_tokens = time.perf_counter(), 0
        for first in range(0, max(len(structures), num_clients), num_clients):
            rows = range(first, first + num_clients)
            outputs = engine.generate(
                [[(7 * row + at) % 250 for at in range(24)] for row in rows],
                [
                    SamplingParams(
                        temperature=1.0,
                        seed=row,
                        max_tokens=400,
                        structured_output=structures[row % len(structures)],
                        structured_forced_tokens=is_forced,
                    )
                    for row in rows
                ],
            )
            assert all(one.outputs[0].finish_reason == "stop" for one in outputs)
            num_tokens += sum(len(one.outputs[0].token_ids) for one in outputs)
        return (time.perf_counter() - began_s) / num_tokens

    for num_clients in (1, 8):
        forced, drawn = (functools.partial(token_s, num_clients, is_forced=one) for one in (True, False))
        forced(), drawn()
        name = f"{num_clients} clients"
        ratio, _, _ = compare(drawn, forced, num_pairs, progress=name)
        control, _, _ = compare(drawn, drawn, num_pairs, progress="control")
        figures[name] = {"forced_over_drawn": ratio.to_json(), "control": control.to_json()}
    return figures


def measure_first(engine: Engine, num_pairs: int) -> dict[str, Any]:
    """Return milliseconds that an unseen schema adds to a first token."""
    numbers = itertools.count(1)
    prompt = list(range(40, 64))

    def first_s(*, is_bound: bool) -> float:
        structured = schema(next(numbers)) if is_bound else None
        sampling = SamplingParams(temperature=0, max_tokens=1, structured_output=structured)
        return seconds(lambda: engine.generate([prompt], sampling))

    first_s(is_bound=True)
    _, bound, free = compare(lambda: first_s(is_bound=True), lambda: first_s(is_bound=False), num_pairs)
    added = sorted(1e3 * (a - b) for a, b in zip(bound, free, strict=True))
    return {"added_ms": round(statistics.median(added), 2), "added_ms, most": round(added[-1], 2)}


async def _answer(url: str, num_clients: int, *, is_bound: bool) -> int:
    """Send requests with all schemas, and return how many tokens come; check each answer's."""
    structures = records()

    async def one(client: httpx.AsyncClient, number: int) -> None:
        body = {
            "prompt": [random.randrange(250) for _ in range(24)],
            "temperature": 0,
            "max_tokens": _ANSWER_TOKENS,
            "ignore_eos": True,
        }
        if is_bound:  # more records than the answer has room for
            record = json.loads(structures[number % len(structures)].text)
            min_items = _ANSWER_TOKENS // 8
            body["json_schema"] = {"type": "array", "items": record, "minItems": min_items}
        answer = await client.post(f"{url}/v1/completions", json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"{url}: {answer.status_code} {answer.text[:300]}")
        num_tokens = answer.json()["usage"]["completion_tokens"]
        if num_tokens != _ANSWER_TOKENS:
            raise RuntimeError(f"{url}: {num_tokens} tokens, {_ANSWER_TOKENS} were asked for")

    num_requests = max(num_clients, len(structures))
    async with httpx.AsyncClient(timeout=_ANSWER_TIMEOUT_S) as client:
        for first in range(0, num_requests, num_clients):
            await asyncio.gather(*(one(client, first + row) for row in range(num_clients)))
    return num_requests * _ANSWER_TOKENS


def measure_peer(model: Path, command: str, num_pairs: int) -> dict[str, Any]:
    """Return tokens/s over HTTP, by clients and with or without schemas, and over the peer's."""
    port, lora_dir = free_port(), _FOLDER / "adapters"
    lora_dir.mkdir(exist_ok=True)
    options = ("--device", "cpu", "--dtype", "bfloat16", "--memory-gib", "1")
    figures: dict[str, Any] = {}
    with (
        running_server(shlex.split(command.replace("{port}", str(port))), port, ready_path="/health"),
        corun_server(model, lora_dir, *options, preloaded=()) as (host, own_port, _),
    ):

        def token_s(url: str, num_clients: int, *, is_bound: bool) -> float:
            began_s = time.perf_counter()
            num_tokens = asyncio.run(_answer(url, num_clients, is_bound=is_bound))
            return (time.perf_counter() - began_s) / num_tokens

        for is_bound, num_clients in itertools.product((False, True), _CLIENTS):
            own, peer = (
                functools.partial(token_s, url, num_clients, is_bound=is_bound)
                for url in (f"http://{host}:{own_port}", f"http://127.0.0.1:{port}")
            )
            own(), peer()  # the schemas are known to both
            name = f"{num_clients} clients, {'schemas' if is_bound else 'free'}"
            ratio, peer_s, own_s = compare(peer, own, num_pairs, progress=name)
            figures[name] = {
                "own_tokens_per_s": round(1 / statistics.median(own_s), 1),
                "peer_tokens_per_s": round(1 / statistics.median(peer_s), 1),
                "own_over_peer": ratio.to_json(),
            }
    return figures


def judge(figures: dict[str, Any]) -> dict[str, bool | None]:
    """Return which bounds are kept; None = the machine varies too much to tell."""
    bounds: dict[str, bool | None] = {}
    if "mask" in figures:
        bounds[f"a row <= {MAX_ROW_US:g} us"] = figures["mask"]["row_us"] <= MAX_ROW_US
    if "rows" in figures:
        control = figures["rows"]["control"]
        is_steady = control["high"] - control["low"] <= MAX_ROWS_CONTROL * control["median"]
        is_kept = figures["rows"]["mixed_over_free"]["median"] >= MIN_ROWS_RATIO
        bounds[f"8 rows of 16 >= {MIN_ROWS_RATIO}"] = is_kept if is_steady else None
    for name, row in figures.get("forced", {}).items():
        is_kept = row["forced_over_drawn"]["median"] >= MIN_FORCED_RATIO
        bounds[f"forced tokens, {name} >= {MIN_FORCED_RATIO}"] = is_kept
    if "first" in figures:
        bounds[f"first token <= {MAX_FIRST_MS:g} ms more"] = figures["first"]["added_ms"] <= MAX_FIRST_MS
    for name, row in figures.get("peer", {}).items():
        if name.endswith("schemas"):
            bounds[f"{name} >= the peer's tokens/s"] = row["own_over_peer"]["median"] >= 1
    return bounds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parts = ["mask", "rows", "forced", "first"]
    parser.add_argument("--parts", nargs="*", choices=parts, default=parts)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--size", choices=sorted(SIZES), default="150m", help="of the model")
    parser.add_argument(
        "--peer", metavar="COMMAND", help="another project's server, ready when /health answers"
    )
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    if "mask" in arguments.parts:
        figures["mask"] = measure_mask(60)
        print(figures["mask"], flush=True)
    model = _FOLDER / arguments.size
    if not model.exists() and (arguments.peer or {"rows", "forced", "first"} & set(arguments.parts)):
        save_bench_model(model, arguments.size)
    if {"rows", "forced", "first"} & set(arguments.parts):
        with Engine(model=str(model), device="cpu", dtype="bfloat16") as engine:
            if "rows" in arguments.parts:
                figures["rows"] = measure_rows(engine, arguments.pairs)
            if "forced" in arguments.parts:
                figures["forced"] = measure_forced(engine, arguments.pairs)
            if "first" in arguments.parts:
                figures["first"] = measure_first(engine, 3 * arguments.pairs)
    if arguments.peer:
        figures["peer"] = measure_peer(model, arguments.peer, arguments.pairs)
    workload = {
        "vocabulary": LARGE_VOCAB_SIZE,
        "tokens": NUM_TOKENS,
        "pairs": arguments.pairs,
        "size": arguments.size,
        "peer": arguments.peer,
    }
    report("structure", workload, figures, judge(figures))


if __name__ == "__main__":
    main()
