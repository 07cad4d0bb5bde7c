"""Reading adapters of normal size leaves the engine's threads as they are.

A helper thread of torch more than there are cores makes every OpenMP thread of the process sleep
between loops, for the rest of its life.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from corun.runtime.demo import demo_model_path
from safetensors.torch import save_file
from support.serving import Served
from transformers import AutoConfig, AutoModelForCausalLM

WIDTH = 512
RANK = 128  # matrices of 65,536 elements; torch divides copies above 32,768 among threads


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as wide as matrices must be, with the demo's tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "base"
    shutil.copytree(demo_model_path(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = AutoConfig.from_pretrained(folder)
    config.update({"hidden_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 4})
    config.head_dim = WIDTH // 4
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def save_wide_adapter(folder: Path, num_layers: int) -> None:
    folder.mkdir(parents=True)
    names = [f"base_model.model.model.layers.{i}.self_attn.o_proj" for i in range(num_layers)]
    shapes = {"lora_A": (RANK, WIDTH), "lora_B": (WIDTH, RANK)}
    save_file(
        {f"{name}.{part}.weight": torch.randn(shape) * 0.01
         for name in names for part, shape in shapes.items()},
        folder / "adapter_model.safetensors",
    )  # fmt: skip
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(fields))


def test_reading_a_large_adapter_starts_no_threads(model: Path, tmp_path: Path) -> None:
    num_layers = AutoConfig.from_pretrained(model).num_hidden_layers
    save_wide_adapter(tmp_path / "loras" / "wide", num_layers)
    with (
        Served(str(model), "--lora-dir", str(tmp_path / "loras"), "--cpu-threads", "2",
               environment={"OMP_NUM_THREADS": "2"}) as served,
        served.client() as http,
    ):  # fmt: skip
        body = {"model": "base", "prompt": "abc", "max_tokens": 4, "temperature": 0}
        assert http.post("/v1/completions", json=body).status_code == 200
        before = served.engine.num_threads()
        for _ in range(2):  # the second time it is there
            answer = http.post("/v1/completions", json=body | {"model": "wide"})
            assert answer.status_code == 200, answer.text
        assert served.engine.num_threads() == before
