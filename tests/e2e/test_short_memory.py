"""An engine beside a process that takes memory, in a control group that is too small."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_core import save_tokenizer
from support.memory_group import memory_group
from transformers import LlamaConfig, LlamaForCausalLM

_MIB = 2**20
_LIMIT_BYTES = 2000 * _MIB
_ROOM_BYTES = 280 * _MIB  # beside the engine and its KV

# Joins the group before it imports anything. Fills 300 MiB with KV of ended requests, leaves little
# room in the group, starts a process, and answers requests until that process has its memory.
_ENGINE = """
import json, os, subprocess, sys, time
from pathlib import Path
group, model, beside = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
(group / "cgroup.procs").write_text(str(os.getpid()))
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.assembly.build import build_engine
from corun.runtime.engine.messages import AddRequest
from corun.runtime.machine.facts import read_memory_room
from corun.runtime.sampling import SamplingParams

config = EngineConfig(
    model=model, device="cpu", dtype="float32", memory_gib=0.4, linear_backend="plain",
    attention_backend="torch", lora_backend="torch", max_model_len=4096,
)
engine = build_engine(config, on_progress=lambda _: None, own_process=False)
core = engine.core
num_requests = 0

def answer(first_token):
    global num_requests
    num_requests += 1
    prompt = tuple((first_token + i * 7) % 90 + 3 for i in range(1000))
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    core.add_request(AddRequest(num_requests, prompt, params))
    tokens, reason = (), None
    while core.has_work:
        for update in core.step(1.0):
            tokens, reason = tokens + update.token_ids, update.finish_reason or reason
    return tokens, reason

first = answer(0)
while core.stats().memory_bytes["device"]["history_kv"] < 300 << 20:
    answer(num_requests)
available, total = read_memory_room()
limit = group / ("memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes")
limit.write_text(str(total - available + int(sys.argv[4])))
available, total = read_memory_room()
kept = core.stats().memory_bytes["device"]["history_kv"]
ballast = subprocess.Popen(
    [sys.executable, "-c", beside, str(available + (60 << 20)), model],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
)
os.set_blocking(ballast.stdout.fileno(), False)
was_short, reasons = False, []
while ballast.poll() is None and not ballast.stdout.read():
    reasons.append(answer(0)[1])  # requests go on meanwhile
    was_short |= core.stats().is_memory_short
    time.sleep(0.05)
deadline = time.monotonic() + 10
while read_memory_room()[0] < 0.1 * total and time.monotonic() < deadline:
    core.step(0.0)
    time.sleep(0.1)
stats = core.stats()
print(json.dumps({
    "kept": kept, "was_short": was_short, "ballast": ballast.poll(),
    "reasons": sorted(set(reasons)),
    "left": stats.memory_bytes["device"]["history_kv"], "given_way": stats.relieved_bytes,
    "share": read_memory_room()[0] / total, "same": answer(0) == first,
}))
ballast.kill()
ballast.wait()
engine.close()
"""


# Takes 60 MiB more than is available.
_TAKES_MEMORY = """
import sys, time
parts = []
for _ in range(int(sys.argv[1]) // (10 << 20)):
    parts.append(b"x" * (10 << 20))
    time.sleep(0.1)
print("taken", flush=True)
sys.stdin.read()
"""
_SECOND_ENGINE = """
import sys
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.assembly.build import build_engine
config = EngineConfig(
    model=sys.argv[2], device="cpu", dtype="float32", memory_gib=0.05, linear_backend="plain",
    attention_backend="torch", lora_backend="torch", max_model_len=512,
)
engine = build_engine(config, on_progress=lambda _: None, own_process=False)
print("started", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with large KV: 64 KiB a token."""
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        head_dim=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=4096,
    )
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    save_tokenizer(directory)
    return directory


@pytest.mark.parametrize(
    "beside",
    [
        pytest.param(_TAKES_MEMORY, id="a process that takes memory"),
        pytest.param(_SECOND_ENGINE, id="a second engine", marks=pytest.mark.full),
    ],
)
def test_kv_of_ended_requests_gives_way_to_a_process_beside(model: Path, beside: str) -> None:
    with memory_group(_LIMIT_BYTES) as group:
        done = subprocess.run(
            [sys.executable, "-c", _ENGINE, str(group), str(model), beside, str(_ROOM_BYTES)],
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["was_short"], result
    assert result["ballast"] is None, "the process beside was killed"
    assert result["reasons"] == ["length"], result
    assert result["same"], result
    assert result["given_way"] > 0, result
    assert result["left"] < result["kept"], result
    assert result["share"] >= 0.1, result
