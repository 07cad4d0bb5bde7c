"""The training script, end to end with a toy size: repeatable, and it survives interruption."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from demo import tool_calls
from demo.adapter_training import AdapterTraining
from demo.base_training import BaseTrainer, BaseTraining
from demo.tasks import TASKS
from train_demo import Training, train_demo

# PEFT reads a property of transformers that is on its way out.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

TOY = BaseTraining(
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=16,
    num_steps=4,
    samples_per_step=8,
    checkpoint_every_steps=2,
)


def weights(trainer: BaseTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def test_everything_is_written_and_the_checkpoint_removed(tmp_path: Path) -> None:
    adapters = dict.fromkeys((*TASKS, tool_calls.NAME), AdapterTraining(num_steps=2, samples_per_step=2))
    train_demo(tmp_path, Training(TOY, adapters, num_evaluation_examples=2))
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "adapters", "corun-demo"}
    assert (tmp_path / "corun-demo" / "model.safetensors").stat().st_size > 0
    card = (tmp_path / "README.md").read_text()
    assert "| `reverse` | writes a short text backwards | 16; 24 on q_proj; 12 on down_proj |" in card


def test_an_interrupted_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = BaseTrainer(TOY, tmp_path / "whole.pt")
    whole.run()
    interrupted = BaseTrainer(TOY, tmp_path / "interrupted.pt")
    interrupted.run(max_steps=3)
    resumed = BaseTrainer(TOY, tmp_path / "interrupted.pt")
    assert resumed.num_steps_done == 2
    resumed.run()
    assert torch.equal(weights(whole), weights(resumed))


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    BaseTrainer(TOY, tmp_path / "checkpoint.pt").run()
    with pytest.raises(ValueError, match="made with other settings"):
        BaseTrainer(replace(TOY, seed=1), tmp_path / "checkpoint.pt")
