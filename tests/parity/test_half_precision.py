"""In 16 bits the engine is about as close to float32 truth as PEFT in the same type."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from corun import Engine, SamplingParams
from support.architectures import ARCHITECTURES, mostly
from support.devices import DEVICES
from support.parity import MAX_LOGPROBS, VOCAB_SIZE, ParityCase, check_half

pytestmark = pytest.mark.usefixtures("one_torch_thread")

NUM_REQUESTS = 10
BLOCK_SIZE = 4
NUM_BLOCKS = 40  # too few for all requests together
PLAIN = {
    "linear_backend": "plain",
    "attention_backend": "torch",
    "lora_backend": "torch",
    "fused_kernels": "off",
}
# What the sizes here leave to KV blocks is meant for the CPU, which shares it with adapters.
ON_DEVICE: dict[str, dict[str, Any]] = {"cpu": {}, "cuda": {"device": "cuda", "memory_gib": 0.05}}
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=MAX_LOGPROBS, ignore_eos=True)
SAMPLED = SamplingParams(n=2, temperature=1.0, seed=5, max_tokens=12, logprobs=MAX_LOGPROBS, ignore_eos=True)


def check(architecture: str, dtype: torch.dtype, seed: int, path: Path, **options: Any) -> None:
    """Ten requests for the base and all adapters, some with two choices.

    Some are preempted, unless ``memory_gib`` is said.
    """
    has_room = "memory_gib" in options
    case = ParityCase(architecture, path, seed=seed, quantization=options.get("quantization"))
    rng = random.Random(seed)
    names = [[None, *case.adapters][i % 5] for i in range(NUM_REQUESTS)]
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(4, 24))] for _ in names]
    params = [SAMPLED if i % 3 == 2 else GREEDY for i in range(NUM_REQUESTS)]
    room_bytes = NUM_BLOCKS * case.kv_block_bytes(BLOCK_SIZE, dtype) + case.adapter_bytes(dtype)
    with Engine(
        model=str(case.directory),
        dtype=str(dtype).removeprefix("torch."),
        max_num_batched_tokens=32,
        block_size=BLOCK_SIZE,
        max_model_len=40,
        **{"device": "cpu", "memory_gib": room_bytes / 2**30, **options},
    ) as engine:
        # A prediction that all outgrow.
        outputs = engine.generate(prompts, params, case.loras(names), predicted_output_tokens=1)
        assert (engine.get_stats().num_preemptions > 0) != has_room
    assert [len(output.outputs) for output in outputs] == [asked.n for asked in params]
    check_half(case, list(zip(names, outputs, strict=True)), dtype)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("architecture", [*mostly("llama3-rope", "gemma3", "gpt-neox", "mixtral"), "gpt2"])
def test_error_is_that_of_bfloat16(architecture: str, where: str, tmp_path: Path) -> None:
    check(architecture, torch.bfloat16, 3, tmp_path, **ON_DEVICE[where])


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("architecture", ["gemma2", pytest.param("llama3-rope", marks=pytest.mark.full)])
def test_error_is_that_of_float16(architecture: str, where: str, tmp_path: Path) -> None:
    check(architecture, torch.float16, 3, tmp_path, **ON_DEVICE[where])


@pytest.mark.parametrize(
    "architecture",
    ["gemma2", *(pytest.param(o, marks=pytest.mark.full) for o in ("llama3-rope", "phi3", "mixtral"))],
)
def test_error_is_that_of_the_type_with_torch_alone(architecture: str, tmp_path: Path) -> None:
    check(architecture, torch.bfloat16, 3, tmp_path, **PLAIN)


@pytest.mark.parametrize("architecture", [*mostly("llama3-rope", "mixtral"), "gpt2"])
def test_error_over_weights_of_8_bits(architecture: str, tmp_path: Path) -> None:
    """Compared with PEFT over the dequantised weights, with deltas of unrounded activations."""
    check(architecture, torch.bfloat16, 3, tmp_path, quantization="int8")


@pytest.mark.full
@pytest.mark.parametrize("seed", [4, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_error_with_other_weights(architecture: str, dtype: torch.dtype, seed: int, tmp_path: Path) -> None:
    check(architecture, dtype, seed, tmp_path)
