"""Trains the demo's base model from scratch, with checkpoints against interruptions.

The samples of a step depend on the seed and the step's number alone, so a run that continues from
its checkpoint sees the same text as an uninterrupted one.
"""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from demo.batches import length_groups, padded_batch
from demo.chat import END, END_OF_TEXT, PAD, SPECIAL_IDS, VOCAB_SIZE
from demo.corpus import IGNORED, Sample, base_sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BaseTraining:
    """Everything that the base's weights depend on, beside the corpus."""

    hidden_size: int = 192
    num_layers: int = 5
    num_heads: int = 6
    num_kv_heads: int = 2
    intermediate_size: int = 384
    max_position_embeddings: int = 512
    num_steps: int = 1000
    samples_per_step: int = 104
    num_length_groups: int = 6
    peak_learning_rate: float = 5e-3
    weight_decay: float = 0.01
    num_warmup_steps: int = 60
    checkpoint_every_steps: int = 100
    seed: int = 0


def make_model(training: BaseTraining) -> LlamaForCausalLM:
    """The untrained model, float32."""
    torch.manual_seed(training.seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=training.hidden_size,
        intermediate_size=training.intermediate_size,
        num_hidden_layers=training.num_layers,
        num_attention_heads=training.num_heads,
        num_key_value_heads=training.num_kv_heads,
        head_dim=training.hidden_size // training.num_heads,
        max_position_embeddings=training.max_position_embeddings,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=SPECIAL_IDS[END_OF_TEXT],
        eos_token_id=[SPECIAL_IDS[END], SPECIAL_IDS[END_OF_TEXT]],
        pad_token_id=SPECIAL_IDS[PAD],
    )
    return LlamaForCausalLM(config)


class BaseTrainer:
    """A model on its way, with its optimisers and what of it is on disk."""

    def __init__(self, training: BaseTraining, checkpoint: Path) -> None:
        self.training = training
        self.model = make_model(training)
        self.num_steps_done = 0
        self.elapsed_s = 0.0
        self._checkpoint = checkpoint
        self._optimizers = _optimizers(self.model, training)
        if checkpoint.exists():
            self._restore()

    def run(self, max_steps: int | None = None) -> LlamaForCausalLM:
        """Does the steps that are left, or ``max_steps`` of them if those are fewer.

        ``elapsed_s`` is then the time of all steps, including those before an interruption.
        """
        num_left = self.training.num_steps - self.num_steps_done
        for _ in range(num_left if max_steps is None else min(num_left, max_steps)):
            started_s = time.monotonic()
            loss = self._step(self.num_steps_done)
            self.num_steps_done += 1
            self.elapsed_s += time.monotonic() - started_s
            if self.num_steps_done % 20 == 0:
                logger.info(
                    "base step %d of %d, loss %.4f, %.0f s",
                    *(self.num_steps_done, self.training.num_steps, loss, self.elapsed_s),
                )
            if self.num_steps_done % self.training.checkpoint_every_steps == 0:
                self._save()
        self.model.eval()
        return self.model

    def _step(self, step: int) -> float:
        rng = Random(f"base {self.training.seed} {step}")
        samples = [base_sample(rng) for _ in range(self.training.samples_per_step)]
        rate = self.training.peak_learning_rate * learning_rate_share(
            step, self.training.num_steps, self.training.num_warmup_steps
        )
        loss = accumulate_gradients(self.model, samples, self.training.num_length_groups)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def _save(self) -> None:
        unfinished = self._checkpoint.with_suffix(".unfinished")
        state = {
            "training": repr(self.training),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "num_steps_done": self.num_steps_done,
            "elapsed_s": self.elapsed_s,
        }
        torch.save(state, unfinished)
        unfinished.replace(self._checkpoint)

    def _restore(self) -> None:
        state = torch.load(self._checkpoint, weights_only=True)
        if state["training"] != repr(self.training):
            raise ValueError(
                f"{self._checkpoint} was made with other settings ({state['training']}): "
                "delete it or choose another --out"
            )
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.num_steps_done = state["num_steps_done"]
        self.elapsed_s = state["elapsed_s"]


def accumulate_gradients(model: torch.nn.Module, samples: list[Sample], num_length_groups: int) -> float:
    """Adds the gradient of the mean loss per learned token of ``samples``; returns that loss."""
    num_learned = sum(target != IGNORED for sample in samples for target in sample.targets[1:])
    total = 0.0
    for group in length_groups(samples, num_length_groups):
        tokens, targets = padded_batch(group)
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        loss = loss / num_learned
        loss.backward()
        total += loss.item()
    return total


def learning_rate_share(step: int, num_steps: int, num_warmup_steps: int) -> float:
    """Share of the peak rate at ``step``: a linear rise, a plateau, a linear fall to nearly 0."""
    rise = (step + 1) / num_warmup_steps
    fall = (num_steps - step) / (0.6 * num_steps)
    return min(1.0, rise, fall)


def _optimizers(model: LlamaForCausalLM, training: BaseTraining) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in n]
    inside = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in inside]
    rate, decay = training.peak_learning_rate, training.weight_decay
    return [
        torch.optim.Muon(
            matrices, lr=rate, weight_decay=decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=rate, weight_decay=0.0, betas=(0.9, 0.95)),
    ]
