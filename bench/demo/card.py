"""The model card of the demo: description, training and accuracy.

Every figure comes from the run that made the files.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from demo import tool_calls
from demo.base_training import BaseTraining
from demo.tasks import TASKS


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a training run."""

    base: BaseTraining
    num_parameters: int
    base_s: float
    adapters_s: Mapping[str, float]
    ranks: Mapping[str, str]  # in words, e.g. "16; 24 on q_proj"
    num_threads: int
    num_examples: int
    scores: Mapping[str, Mapping[str, tuple[float, float]]]  # dtype -> task -> adapter, base


def model_card(figures: Figures) -> str:
    """The card as Markdown."""
    base = figures.base
    adapters_s = sum(figures.adapters_s.values())
    return f"""# corun-demo

A very small language model of the Llama architecture with LoRA adapters, made to show and to test
adapter serving. It has no general knowledge: its training text comes from a program with a few
rules and about a hundred words.

## What it is

- {figures.num_parameters:,} parameters: {_shape(figures.base)}.
- Stored as bfloat16; runs as float32 as well.
- One token per byte of UTF-8, and six special tokens. `<|end|>` ends an answer, `<|endoftext|>` a
  text; both end generation. Decoding is greedy unless a request says otherwise.
- The base model repeats the user's message ("You said: ..."). With the name of a task as system
  message, it does the task. An adapter does its task without a system message.
- Plain text without the chat template is continued as a story. For plain completions, write the
  template into the prompt: `<|user|>hello<|assistant|>`.

## Adapters and their accuracy

Share of {figures.num_examples} unseen inputs with an exactly correct answer, generated
greedily with transformers and PEFT.

{_score_table(figures)}

Inputs: `upper` and `vowels` take up to 32 characters, `reverse` up to 12, `add` two numbers of up
to two digits, as in `12+34`, `12 + 34` or `what is 12 + 34?`. Adapters are not trained for longer
or other inputs. All text is Latin letters, digits and a few marks. `tools` has a chat template of
its own: with tools it calls the one that fits (`what is 12 + 34?`, `weather in Rome`), and says
what the result is; without tools it writes `Anna is 31` as JSON.

A rule decides which inputs are unseen: one input in five (by a hash of the text, in lower case, the
numbers of a sum in order) is excluded from the training data of the base model and the adapters.
`unseen_examples` in `bench/demo/tasks.py` makes such inputs and their answers.

## How it was made

`python bench/train_demo.py --out DIR` trained it from scratch, on text that `bench/demo` generates.
Nothing was downloaded. Licence: Apache-2.0, like the code.

- Seed {base.seed}; {base.num_steps} steps of {base.samples_per_step} samples in float32 with Muon
  and AdamW, then LoRA with PEFT.
- {figures.base_s:.0f} s for the base model and {adapters_s:.0f} s for the adapters.
- Threads: {figures.num_threads}.
- Machine: 2 virtual CPUs with AVX512_BF16, shared with other jobs at the time.
"""


def _shape(base: BaseTraining) -> str:
    return (
        f"{base.num_layers} layers, hidden size {base.hidden_size}, {base.num_heads} heads over "
        f"{base.num_kv_heads} KV heads,\n  MLP {base.intermediate_size}, "
        f"context {base.max_position_embeddings}"
    )


def _score_table(figures: Figures) -> str:
    dtypes = list(figures.scores)
    lines = [
        f"| adapter | task | rank | {' | '.join(dtypes)} | base alone |",
        f"|---|---|---|{'---|' * len(dtypes)}---|",
    ]
    summaries = {name: task.summary for name, task in TASKS.items()}
    for name, summary in {**summaries, tool_calls.NAME: tool_calls.SUMMARY}.items():
        shares = [f"{figures.scores[dtype][name][0]:.1%}" for dtype in dtypes]
        base = max(figures.scores[dtype][name][1] for dtype in dtypes)
        lines.append(f"| `{name}` | {summary} | {figures.ranks[name]} | {' | '.join(shares)} | {base:.1%} |")
    return "\n".join(lines)
