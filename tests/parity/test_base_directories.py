"""Directories of base models as people have them: the base and its adapters answer as with PEFT."""

import shutil
from pathlib import Path

import pytest
from corun import Engine, LoRARequest, SamplingParams
from support.parity import MAX_LOGPROBS, AdapterSpec, ParityCase, largest_error

pytestmark = pytest.mark.usefixtures("one_torch_thread")

MAX_RELATIVE_ERROR = 1e-4
PROMPTS = ([5, 9, 31], [int(7 + i * 13 % 80) for i in range(40)])
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=MAX_LOGPROBS, ignore_eos=True)


def check(case: ParityCase, model: Path, adapters: dict[str, Path]) -> None:
    """Ask ``model`` and its adapters together; hold the answers to the truth of ``case``."""
    asked = [(prompt, name) for prompt in PROMPTS for name in (None, *adapters)]
    with Engine(model=str(model), dtype="float32", device="cpu", memory_gib=0.1) as engine:
        loras = [None if name is None else LoRARequest(name, 1, str(adapters[name]))
                 for _, name in asked]  # fmt: skip
        outputs = engine.generate([prompt for prompt, _ in asked], GREEDY, loras)
    for (_, name), output in zip(asked, outputs, strict=True):
        assert largest_error(case, output, name) < MAX_RELATIVE_ERROR


def test_an_adapter_beside_the_base(tmp_path: Path) -> None:
    """The base is the base, and adapters are added to it alone; so is the one that lies beside."""
    specs = (AdapterSpec("beside"), AdapterSpec("other", {"r": 3}))
    case = ParityCase("qwen3", tmp_path, specs=specs)
    both = shutil.copytree(case.directory, tmp_path / "both")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(case.adapters["beside"] / name, both)
    check(case, both, {"beside": both, "other": case.adapters["other"]})
