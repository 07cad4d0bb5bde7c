"""``vllm bench serve``: its random prompts, over both routes, each under one of two adapters."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from corun.runtime.demo import demo_model_path

from clients.environments import Install
from clients.recorder import Recorder

NUM_REQUESTS, OUTPUT_TOKENS = 6, 8
# What the benchmark imports, of what vllm needs: the rest is for devices.
MODULES = """
    torch==2.13.0 transformers==5.23.0 numpy numba regex psutil requests tqdm msgspec pydantic
    pyyaml prometheus_client huggingface_hub safetensors tokenizers openai fastapi[standard]<0.137
    httpx cachetools sentencepiece blake3 py-cpuinfo aiohttp orjson pillow
    prometheus-fastapi-instrumentator tiktoken partial-json-parser jsonschema pyzmq mistral_common
    einops cloudpickle watchfiles python-json-logger pybase64 cbor2 ijson setproctitle oss-harmony
    anthropic model-hosting-container-standards depyf opencv-python-headless lark pandas datasets
    llguidance outlines_core lm-format-enforcer xgrammar apache-tvm-ffi
""".split()


@pytest.mark.clients
def test_vllm_bench(recorder: Recorder, install: Install, tmp_path: Path) -> None:
    commands = install("vllm", *MODULES, without_dependencies="vllm==0.33.0")
    for backend, route in (("vllm", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
        run_benchmark(commands / "vllm", recorder.url, backend, route, tmp_path)


def run_benchmark(vllm: Path, url: str, backend: str, route: str, directory: Path) -> None:
    subprocess.run(
        [
            str(vllm),
            "bench",
            "serve",
            "--backend",
            backend,
            "--endpoint",
            route,
            "--base-url",
            url,
            "--model",
            demo_model_path().name,
            "--tokenizer",
            str(demo_model_path()),
            "--dataset-name",
            "random",
            "--random-input-len",
            "40",
            "--random-output-len",
            str(OUTPUT_TOKENS),
            "--num-prompts",
            str(NUM_REQUESTS),
            "--ignore-eos",
            "--lora-modules",
            "upper",
            "vowels",
            # The demo says little else to random words, and an empty text is counted as a failure.
            "--extra-body",
            '{"skip_special_tokens": false}',
            "--save-result",
            "--result-dir",
            str(directory),
            "--result-filename",
            "result.json",
        ],
        check=True,
        timeout=300,
        env=os.environ | {"VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"},
    )
    result = json.loads((directory / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (NUM_REQUESTS, 0), result
    assert result["total_output_tokens"] == NUM_REQUESTS * OUTPUT_TOKENS
