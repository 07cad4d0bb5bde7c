"""The four tasks of the demo's adapters: inputs, correct answers, and the rule for unseen inputs.

``is_unseen`` keeps inputs out of training. It depends on the text alone, and every generator of
training text calls it, so an unseen input is in the training text of no task. Independent of
tokens, models and files; stdlib only.
"""

import hashlib
import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from demo.words import ALL_WORDS

MAX_UNSEEN_EXAMPLES = 500  # "add" has about a thousand unseen inputs

_UNSEEN_ONE_IN = 5
_SUM = re.compile(r"(\d+) ?\+ ?(\d+)")
_SUM_FORMS = ("{}+{}", "{} + {}", "{}+{}=", "what is {} + {}?")
_SUM_WEIGHTS = (0.55, 0.25, 0.1, 0.1)
_CONSONANTS = "bcdfghjklmnprstvwz"
_VOWELS = "aeiou"
_STARRED = str.maketrans(dict.fromkeys(_VOWELS + _VOWELS.upper(), "*"))


@dataclass(frozen=True, slots=True)
class Task:
    """Something an adapter does to the text that the user sends."""

    name: str  # the adapter's name, and the base model's system message for the task
    summary: str
    make_input: Callable[[Random], str]
    answer: Callable[[str], str]


def is_unseen(text: str) -> bool:
    """Whether ``text`` is kept out of all training; true for one text in five.

    Upper and lower case, and all ways to ask for one sum, fall on the same side.
    """
    numbers = _SUM.search(text)
    canonical = "+".join(sorted(numbers.groups())) if numbers else text.lower()
    return hashlib.sha256(canonical.encode()).digest()[0] % _UNSEEN_ONE_IN == 0


def seen_input(task: str, rng: Random) -> str:
    """One input of ``task`` that training may use."""
    make_input = TASKS[task].make_input
    while True:
        text = make_input(rng)
        if not is_unseen(text):
            return text


def unseen_examples(task: str, count: int, seed: int) -> list[tuple[str, str]]:
    """``count`` distinct (prompt, answer) pairs with prompts that are not in the training text.

    The prompt is what the user says, without the chat template. Raises KeyError for an unknown task
    and ValueError for a count outside 0 to ``MAX_UNSEEN_EXAMPLES``.
    """
    if not 0 <= count <= MAX_UNSEEN_EXAMPLES:
        raise ValueError(f"count is {count}, must be within 0 and {MAX_UNSEEN_EXAMPLES}")
    chosen = TASKS[task]
    rng = Random(f"unseen {task} {seed}")
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        text = chosen.make_input(rng)
        if is_unseen(text):
            prompts[text] = None
    return [(text, chosen.answer(text)) for text in prompts]


def add_numbers(text: str) -> str:
    """The sum that ``"12+34"`` or ``"what is 12 + 34?"`` asks for, as text.

    Raises ValueError where there is no sum in ``text``.
    """
    numbers = _SUM.search(text)
    if numbers is None:
        raise ValueError(f"no sum like 12+34 in {text!r}")
    return str(int(numbers[1]) + int(numbers[2]))


def star_vowels(text: str) -> str:
    """``text`` with a star for every a, e, i, o, u."""
    return text.translate(_STARRED)


def reverse_text(text: str) -> str:
    """``text`` from its last character to its first."""
    return text[::-1]


def _pseudo_word(rng: Random, max_chars: int) -> str:
    num_chars = rng.randint(2, max_chars)
    if rng.random() < 0.5:
        return "".join(rng.choices(string.ascii_lowercase, k=num_chars))
    return "".join(rng.choice((_CONSONANTS, _VOWELS)[i % 2]) for i in range(num_chars))


def _word(rng: Random, max_chars: int) -> str:
    if rng.random() < 0.5:
        word = rng.choice(ALL_WORDS)
        if len(word) <= max_chars:
            return word
    return _pseudo_word(rng, max_chars)


def _phrase(rng: Random) -> str:
    """One to six words of together at most 32 characters, some with marks, digits and capitals."""
    max_chars = 32 if rng.random() < 0.35 else 14
    capitals = rng.random() < 0.1
    text = _marked_word(rng, capitals=capitals or rng.random() < 0.15)
    for _ in range(rng.randint(0, 5)):
        joint = " " if rng.random() < 0.93 else rng.choice((", ", "-", ". ", "'", ": "))
        longer = f"{text}{joint}{_marked_word(rng, capitals=capitals)}"
        if len(longer) > max_chars:
            break
        text = longer
    return text + rng.choice("!?.") if rng.random() < 0.15 else text


def _marked_word(rng: Random, *, capitals: bool) -> str:
    if rng.random() < 0.06:
        return str(rng.randint(0, 999))
    word = _word(rng, 8)
    return word.capitalize() if capitals else word


def _short_text(rng: Random) -> str:
    """A word, or two short ones, of 2 to 12 characters."""
    if rng.random() < 0.25:
        return f"{_word(rng, 6)} {_word(rng, 5)}"
    return _word(rng, 12 if rng.random() < 0.25 else 9)


def _sum(rng: Random) -> str:
    left, right = rng.randint(0, 99), rng.randint(0, 99)
    form = rng.choices(_SUM_FORMS, weights=_SUM_WEIGHTS)[0]
    return form.format(left, right)


_ALL_TASKS = (
    Task("upper", "writes the text in capitals", _phrase, str.upper),
    Task("vowels", "puts a star for every vowel", _phrase, star_vowels),
    Task("reverse", "writes a short text backwards", _short_text, reverse_text),
    Task("add", "adds two numbers of up to two digits", _sum, add_numbers),
)
TASKS: Mapping[str, Task] = {task.name: task for task in _ALL_TASKS}
