"""The engine's threads: adapters do not change them, and answers do not depend on their number.

With more helper threads of torch than cores, every OpenMP thread of the process sleeps between
loops, permanently.
"""

import json
import shutil
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import ClassVar

import numba
import pytest
import torch
from corun import Engine, LoRARequest, SamplingParams
from corun.gpu.execution import adaptive_threads
from corun.gpu.forward.kernel_threads import num_kernel_threads
from corun.runtime.demo import demo_model_path
from corun.runtime.machine.core_contention import CoreContention
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
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def save_wide_adapter(folder: Path, num_layers: int, rank: int = RANK) -> None:
    folder.mkdir(parents=True)
    names = [f"base_model.model.model.layers.{i}.self_attn.o_proj" for i in range(num_layers)]
    shapes = {"lora_A": (rank, WIDTH), "lora_B": (WIDTH, rank)}
    save_file(
        {
            f"{name}.{part}.weight": torch.randn(shape) * 0.01
            for name in names
            for part, shape in shapes.items()
        },
        folder / "adapter_model.safetensors",
    )
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(fields))


def test_reading_a_large_adapter_starts_no_threads(model: Path, tmp_path: Path) -> None:
    num_layers = AutoConfig.from_pretrained(model).num_hidden_layers
    save_wide_adapter(tmp_path / "loras" / "wide", num_layers)
    save_wide_adapter(tmp_path / "loras" / "small", num_layers, rank=8)
    with (
        Served(
            str(model),
            "--lora-dir",
            str(tmp_path / "loras"),
            "--cpu-threads",
            "2",
            environment={"OMP_NUM_THREADS": "2"},
        ) as served,
        served.client() as http,
    ):
        body = {"model": "base", "prompt": "abc", "max_tokens": 4, "temperature": 0}
        for name in ("base", "small"):  # a thread reads files, and ends later
            assert http.post("/v1/completions", json=body | {"model": name}).status_code == 200
        before = served.engine.num_threads()
        for _ in range(2):  # the second time it is loaded
            answer = http.post("/v1/completions", json=body | {"model": "wide"})
            assert answer.status_code == 200, answer.text
        assert served.engine.num_threads() <= before


class Script(CoreContention):
    """Sets the number of threads of each step, independently of contention."""

    numbers: ClassVar[Iterator[int]] = cycle((2,))
    used: ClassVar[set[int]] = set()

    def is_due(self, now_s: float) -> bool:
        return True

    def observe(self, now_s: float, total: object) -> int:
        self.used.add(num_kernel_threads())
        self.num_threads = next(self.numbers)
        return self.num_threads

    @classmethod
    def follow(cls, *numbers: int) -> None:
        cls.used, cls.numbers = set(), cycle(numbers)


def answers(engine: Engine, wide: LoRARequest) -> list[list[float]]:
    """Tokens and their log-probabilities, of a long prompt alone and of three short ones."""
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    outputs = [
        *engine.generate([[5] * 300], sampling, wide),
        *engine.generate([[7] * 40, [9] * 70, [11] * 5], sampling, [wide, None, wide]),
    ]
    told = []
    for output in outputs:
        (choice,) = output.outputs
        assert choice.logprobs is not None
        pairs = zip(choice.token_ids, choice.logprobs, strict=True)
        told.append([number for token, of in pairs for number in (token, of[token].logprob)])
    return told


@pytest.mark.parametrize(
    ("dtype", "linear_backend", "tolerance"),
    [
        ("bfloat16", "numba", 0.0),
        # Libraries divide a sum by the number of threads, as they do by the number of rows.
        ("float32", "onednn", 1e-4),
        pytest.param("float32", "plain", 1e-4, marks=pytest.mark.full),
    ],
)
def test_answers_do_not_depend_on_the_number_of_threads(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    linear_backend: str,
    tolerance: float,
) -> None:
    """It changes in the middle of answers, while steps are captured, and once they are replayed."""
    if numba.config.NUMBA_NUM_THREADS < 2:
        pytest.skip("the machine has fewer processors")
    monkeypatch.setattr(adaptive_threads, "CoreContention", Script)
    save_wide_adapter(tmp_path / "wide", AutoConfig.from_pretrained(model).num_hidden_layers)
    wide = LoRARequest("wide", 1, str(tmp_path / "wide"))
    with Engine(
        model=str(model),
        device="cpu",
        dtype=dtype,
        linear_backend=linear_backend,
        cpu_threads=2,
        prefix_cache="off",
    ) as engine:
        expected = answers(engine, wide)
        for numbers in ((2, 2, 1, 1, 1, 2), (1,), (1, 2), (2,)):
            Script.follow(*numbers)
            for one, other in zip(answers(engine, wide), expected, strict=True):
                assert one == pytest.approx(other, rel=0, abs=tolerance), numbers
            assert Script.used >= set(numbers)
