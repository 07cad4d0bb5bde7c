"""Trains the demo's adapters with PEFT on top of the finished base.

Each adapter learns to do its task without a system message; ``tools`` also learns a chat template.
Ranks and targets are chosen for variety rather than economy: together the adapters use plain and
rank-stabilised scaling, a rank that differs between modules, attention and MLP targets, and a named
and an unnamed base model.
"""

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from models import ALL_TARGETS, ATTENTION_TARGETS
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM

from demo import tool_calls
from demo.base_training import accumulate_gradients, learning_rate_share
from demo.corpus import Sample, skill_sample

logger = logging.getLogger(__name__)

# Public adapters may or may not name their base model; a serving engine must accept both.
_BASE_NAMES = {"vowels": "corun-demo", "add": "corun-demo"}


@dataclass(frozen=True, slots=True)
class AdapterTraining:
    """How long an adapter is trained, and on how many samples at a time."""

    num_steps: int = 160
    samples_per_step: int = 32
    peak_learning_rate: float = 4e-3
    num_warmup_steps: int = 10
    num_length_groups: int = 2
    seed: int = 0


def adapter_trainings() -> Mapping[str, AdapterTraining]:
    """How each adapter is trained; of the base's tasks, only adding gains by more of it."""
    usual = AdapterTraining()
    longer = AdapterTraining(num_steps=480, samples_per_step=64)
    longest = AdapterTraining(num_steps=600, samples_per_step=48)
    return {**{"upper": usual, "vowels": usual, "reverse": usual, "add": longer}, tool_calls.NAME: longest}


def adapter_configs() -> Mapping[str, LoraConfig]:
    """The PEFT configuration of each adapter, by its name, which is also its task's."""
    attention = list(ATTENTION_TARGETS)
    kind = "CAUSAL_LM"
    return {
        "upper": LoraConfig(task_type=kind, r=4, lora_alpha=8, target_modules=attention),
        "vowels": LoraConfig(task_type=kind, r=8, lora_alpha=8, use_rslora=True, target_modules=attention),
        "reverse": LoraConfig(
            task_type=kind,
            r=16,
            lora_alpha=32,
            target_modules=list(ALL_TARGETS),
            rank_pattern={"q_proj": 24, "down_proj": 12},
            alpha_pattern={"down_proj": 24},
        ),
        "add": LoraConfig(task_type=kind, r=64, lora_alpha=64, target_modules=attention),
        tool_calls.NAME: LoraConfig(task_type=kind, r=32, lora_alpha=32, target_modules=list(ALL_TARGETS)),
    }


def describe_ranks() -> Mapping[str, str]:
    """The ranks of each adapter in words, for the model card."""
    words: dict[str, str] = {}
    for name, config in adapter_configs().items():
        others = [f"{rank} on {module}" for module, rank in (config.rank_pattern or {}).items()]
        words[name] = "; ".join([str(config.r), *others])
    return words


def train_adapter(base: LlamaForCausalLM, name: str, training: AdapterTraining, directory: Path) -> float:
    """Trains one adapter, writes it to ``directory`` and returns the seconds it took.

    The weights of ``base`` are left as they were.
    """
    started_s = time.monotonic()
    torch.manual_seed(training.seed)
    model = get_peft_model(base, adapter_configs()[name])
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0, betas=(0.9, 0.95))
    for step in range(training.num_steps):
        rng = Random(f"{name} {training.seed} {step}")
        samples = [_sample(name, rng) for _ in range(training.samples_per_step)]
        loss = accumulate_gradients(model, samples, training.num_length_groups)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        share = learning_rate_share(step, training.num_steps, training.num_warmup_steps)
        optimizer.param_groups[0]["lr"] = training.peak_learning_rate * share
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 20 == 0:
            logger.info("adapter %s step %d of %d, loss %.4f", name, step + 1, training.num_steps, loss)
    for parameter in parameters:
        parameter.data = parameter.data.bfloat16()
    _save(model, name, directory)
    model.unload()
    return time.monotonic() - started_s


def _sample(name: str, rng: Random) -> Sample:
    if name == tool_calls.NAME:
        return tool_calls.tools_sample(rng)
    return skill_sample(name, rng, by_name=False)


def _save(model: PeftModel, name: str, directory: Path) -> None:
    """Writes the two files of a PEFT adapter; the same weights always give the same bytes."""
    model.save_pretrained(str(directory))
    (directory / "README.md").unlink(missing_ok=True)
    path = directory / "adapter_config.json"
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = _BASE_NAMES.get(name)
    config["target_modules"] = sorted(config["target_modules"])
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if name == tool_calls.NAME:
        (directory / "chat_template.jinja").write_text(tool_calls.CHAT_TEMPLATE)
