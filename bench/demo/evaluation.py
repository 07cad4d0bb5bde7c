"""The accuracy of the base model and each adapter on inputs outside the training text.

Answers are generated greedily by transformers and PEFT and must match exactly.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from corun.runtime.demo import chat_prompt
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from demo import tool_calls
from demo.tasks import TASKS, unseen_examples

MAX_ANSWER_TOKENS = 96


def evaluate(
    model_path: Path, adapters_path: Path, dtype: torch.dtype, num_examples: int, seed: int
) -> dict[str, tuple[float, float]]:
    """Per task the share of right answers of (its adapter, the base) on unseen inputs."""
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_path)
    tokenizer.padding_side = "left"
    names = [*TASKS, tool_calls.NAME]
    model = PeftModel.from_pretrained(base, adapters_path / names[0], adapter_name=names[0])
    for name in names[1:]:
        model.load_adapter(adapters_path / name, adapter_name=name)
    model.eval()
    scores: dict[str, tuple[float, float]] = {}
    for name in names:
        examples = unseen_prompts(name, num_examples, seed)
        model.set_adapter(name)
        with_adapter = share_right(model, tokenizer, examples)
        with model.disable_adapter():
            scores[name] = (with_adapter, share_right(model, tokenizer, examples))
    return scores


def unseen_prompts(name: str, count: int, seed: int) -> list[tuple[str, str]]:
    """Prompts of an adapter as its chat template writes them, and their answers."""
    if name == tool_calls.NAME:
        cases = tool_calls.unseen_cases(count, seed)
        return [(tool_calls.prompt_text(case), case.answer) for case in cases]
    return [(chat_prompt(text), answer) for text, answer in unseen_examples(name, count, seed)]


def share_right(
    model: PeftModel, tokenizer: PreTrainedTokenizerFast, examples: Sequence[tuple[str, str]]
) -> float:
    """Share of ``examples`` that ``model`` answers exactly."""
    answers = answer_all(model, tokenizer, [prompt for prompt, _ in examples])
    right = sum(a == wanted for a, (_, wanted) in zip(answers, examples, strict=True))
    return right / len(examples)


def answer_all(model: PeftModel, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str]) -> list[str]:
    """The answers to ``prompts``, in one batch. ``tokenizer`` must pad on the left."""
    inputs = tokenizer(list(prompts), padding=True, return_tensors="pt")
    with torch.no_grad():
        tokens = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_ANSWER_TOKENS)
    num_prompt_tokens = inputs["input_ids"].shape[1]
    answers: list[str] = tokenizer.batch_decode(tokens[:, num_prompt_tokens:], skip_special_tokens=True)
    return answers
