"""Makes the demo model and its adapters: ``python bench/train_demo.py --out DIR``.

Writes ``DIR/model``, ``DIR/adapters/<name>`` and ``DIR/README.md``. After an interruption, run it
again with the same DIR: it continues from ``DIR/checkpoint.pt``, which a finished run removes.
"""

import argparse
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from demo.adapter_training import AdapterTraining, adapter_trainings, describe_ranks, train_adapter
from demo.base_training import BaseTrainer, BaseTraining
from demo.card import Figures, model_card
from demo.chat import END, END_OF_TEXT, PAD, SPECIAL_IDS
from demo.evaluation import evaluate
from demo.tokenizer import save_tokenizer
from transformers import GenerationConfig, LlamaForCausalLM

logger = logging.getLogger(__name__)

_EVALUATION_SEED = 1
_NUM_EVALUATION_EXAMPLES = 200
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Training:
    """Everything that the demo's weights depend on, beside the corpus."""

    base: BaseTraining = field(default_factory=BaseTraining)
    adapters: Mapping[str, AdapterTraining] = field(default_factory=adapter_trainings)
    num_evaluation_examples: int = _NUM_EVALUATION_EXAMPLES


def train_demo(out: Path, training: Training) -> Figures:
    """Makes everything under ``out`` and returns the figures that the model card reports."""
    out.mkdir(parents=True, exist_ok=True)
    model_path, adapters_path = out / "corun-demo", out / "adapters"
    checkpoint = out / "checkpoint.pt"
    trainer = BaseTrainer(training.base, checkpoint)
    model = trainer.run()
    save_model(model, model_path)
    adapters_s = train_adapters(model_path, adapters_path, training.adapters)
    scores = {
        name: evaluate(
            *(model_path, adapters_path, dtype, training.num_evaluation_examples, _EVALUATION_SEED)
        )
        for name, dtype in _DTYPES.items()
    }
    figures = Figures(
        base=training.base,
        num_parameters=model.num_parameters(),
        base_s=trainer.elapsed_s,
        adapters_s=adapters_s,
        ranks=describe_ranks(),
        num_threads=torch.get_num_threads(),
        num_examples=training.num_evaluation_examples,
        scores=scores,
    )
    (out / "README.md").write_text(model_card(figures))
    checkpoint.unlink(missing_ok=True)
    return figures


def save_model(model: LlamaForCausalLM, directory: Path) -> None:
    """Writes the model as bfloat16, its tokenizer, and greedy generation with both end tokens."""
    model.generation_config = GenerationConfig(
        do_sample=False,
        bos_token_id=SPECIAL_IDS[END_OF_TEXT],
        eos_token_id=[SPECIAL_IDS[END], SPECIAL_IDS[END_OF_TEXT]],
        pad_token_id=SPECIAL_IDS[PAD],
    )
    model.bfloat16().save_pretrained(directory)
    save_tokenizer(directory, model.config.max_position_embeddings)


def train_adapters(
    model_path: Path, adapters_path: Path, trainings: Mapping[str, AdapterTraining]
) -> dict[str, float]:
    """Trains every adapter on the model as it was saved; returns the seconds of each."""
    seconds: dict[str, float] = {}
    for name, training in trainings.items():
        base = LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        seconds[name] = train_adapter(base, name, training, adapters_path / name)
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads to train with")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(options.threads)
    train_demo(options.out, Training())


if __name__ == "__main__":
    main()
