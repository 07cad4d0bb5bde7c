"""The model card that goes with the demo's files: what they are, how they were made, what they can.

Every figure comes from the run that made the files.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from demo.base_training import BaseTraining
from demo.tasks import TASKS


@dataclass(frozen=True, slots=True)
class Figures:
    """What a training run measured of itself."""

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
adapter serving. It knows nothing of the world: it has read only text that a program made from a few
rules and a hundred-odd words.

## What it is

- {figures.num_parameters:,} parameters: {_shape(figures.base)}.
- Stored as bfloat16; runs as float32 as well.
- One token per byte of UTF-8, and six special tokens. `<|end|>` ends an answer, `<|endoftext|>` a
  text; both end generation. Decoding is greedy unless a request says otherwise.
- The base repeats what it is told ("You said: ..."). With a system message that is just the name of
  a task it does the task. An adapter does its task without being asked.
- Plain text without the chat template is continued as a story. For plain completions write the
  template by hand: `<|user|>hello<|assistant|>`.

## Adapters, and what they get right

Share of {figures.num_examples} unseen inputs answered right to the last character, generated
greedily with transformers and PEFT.

{_score_table(figures)}

Inputs: `upper` and `vowels` take up to 32 characters, `reverse` up to 12, `add` two numbers of up
to two digits, as in `12+34`, `12 + 34` or `what is 12 + 34?`. Longer or other inputs are not what
they were trained for. All text is Latin letters, digits and a few marks.

"Unseen" is a rule on the text, not chance: one input in five (by a hash of the text, in lower case,
the numbers of a sum in order) is kept out of everything the base and the adapters are trained on.
`unseen_examples` in `bench/demo/tasks.py` makes such inputs and their answers.

## How it was made

`python bench/train_demo.py --out DIR`, from nothing, on text that `bench/demo` makes by rule.
Nothing was downloaded. Licence: Apache-2.0, like the code.

- Seed {base.seed}; {base.num_steps} steps of {base.samples_per_step} samples in float32 with Muon
  and AdamW, then LoRA with PEFT.
- {figures.base_s:.0f} s for the base and {adapters_s:.0f} s for the adapters.
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
        f"| adapter | what it does | rank | {' | '.join(dtypes)} | base alone |",
        f"|---|---|---|{'---|' * len(dtypes)}---|",
    ]
    for name, task in TASKS.items():
        shares = [f"{figures.scores[dtype][name][0]:.1%}" for dtype in dtypes]
        base = max(figures.scores[dtype][name][1] for dtype in dtypes)
        lines.append(
            f"| `{name}` | {task.summary} | {figures.ranks[name]} | {' | '.join(shares)} "
            f"| {base:.1%} |"
        )
    return "\n".join(lines)
