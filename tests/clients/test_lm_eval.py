"""lm-eval: a task of choices scores under an adapter as transformers and PEFT score it."""

import json
import os
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from corun.runtime.demo import chat_prompt, demo_adapters_path, demo_model_path
from demo.tasks import unseen_examples
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from clients.environments import Install
from clients.recorder import Recorder

NUM_QUESTIONS = 8
TOLERANCE = 1e-4  # of a token's log-probability
TASK = {
    "task": "choices",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{text}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{label}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}


def write_task(directory: Path) -> None:
    """Which of three is the text in capitals?"""
    questions = directory / "questions.jsonl"
    with questions.open("w") as file:
        for index, (text, answer) in enumerate(unseen_examples("upper", NUM_QUESTIONS, seed=3)):
            choices = [answer, text[::-1], text]
            label = index % 3
            choices[0], choices[label] = choices[label], choices[0]
            question = {"text": chat_prompt(text), "choices": choices, "label": label}
            file.write(json.dumps(question) + "\n")
    task = TASK | {"dataset_kwargs": {"data_files": {"test": str(questions)}}}
    (directory / "choices.yaml").write_text(json.dumps(task))  # JSON is YAML


class Reference:
    """The scores of transformers and PEFT in float32."""

    def __init__(self, adapter: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PEFT about itself
            path = str(demo_adapters_path() / adapter)
            self._model = PeftModel.from_pretrained(model, path).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(demo_model_path())

    @torch.inference_mode()
    def score(self, context: str, continuation: str) -> tuple[float, int]:
        """The continuation's log-probability, and its number of tokens."""
        whole = self._tokenizer(context + continuation, add_special_tokens=False)["input_ids"]
        num_before = len(self._tokenizer(context, add_special_tokens=False)["input_ids"])
        logits = self._model(torch.tensor([whole])).logits[0].log_softmax(-1)
        tokens = whole[num_before:]
        scores = [logits[num_before - 1 + at, token].item() for at, token in enumerate(tokens)]
        return sum(scores), len(tokens)


@pytest.mark.clients
def test_lm_eval(recorder: Recorder, install: Install, tmp_path: Path) -> None:
    commands = install("lm_eval", "lm-eval[api]==0.4.13", "transformers==5.23.0", "torch==2.13.0")
    write_task(tmp_path)
    subprocess.run(
        [
            str(commands / "lm_eval"),
            *"run --model local-completions".split(),
            "--model_args",
            f"model=upper,base_url={recorder.url}/v1/completions,tokenizer={demo_model_path()},"
            "num_concurrent=2,max_retries=1",
            *("--tasks", "choices"),
            *("--include_path", str(tmp_path)),
            *"--batch_size 1 --log_samples".split(),
            *("--output_path", str(tmp_path / "out")),
        ],
        check=True,
        timeout=300,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    (path,) = (tmp_path / "out").rglob("samples_choices_*.jsonl")
    samples: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(samples) == NUM_QUESTIONS
    reference = Reference("upper")
    for sample in samples:
        arguments = [tuple(one.values()) for one in sample["arguments"].values()]
        answers = [float(answer[0][0]) for answer in sample["resps"]]
        for (context, continuation), answer in zip(arguments, answers, strict=True):
            expected, num_tokens = reference.score(context, continuation)
            assert abs(answer - expected) <= TOLERANCE * num_tokens
    assert sum(sample["acc"] for sample in samples) >= 0.8 * NUM_QUESTIONS
