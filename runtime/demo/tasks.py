"""The four tasks of the demo's adapters: their inputs, right answers, and which inputs are unseen.

Owns the rule that keeps inputs out of training: ``is_unseen`` depends on the text alone, every
generator of training text asks it, so an input it names was never trained on, neither for its task
nor for any other. Knows nothing of tokens, models or files; stdlib only.
"""

import hashlib
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from .words import ALL_WORDS

MAX_UNSEEN_EXAMPLES = 500  # "add" has about a thousand unseen inputs

_UNSEEN_ONE_IN = 5
_CONSONANTS = "bcdfghjklmnprstvwz"
_VOWELS = "aeiou"
_STARRED = str.maketrans(dict.fromkeys(_VOWELS + _VOWELS.upper(), "*"))


@dataclass(frozen=True, slots=True)
class Task:
    """Something an adapter does to the text that the user sends."""

    name: str  # the adapter's name, and the system message that asks the base for the same
    summary: str
    make_input: Callable[[Random], str]
    answer: Callable[[str], str]


def is_unseen(text: str) -> bool:
    """Whether ``text`` is kept out of all training; true for one text in five.

    Upper and lower case, and both orders of a sum, fall on the same side.
    """
    canonical = "+".join(sorted(text.lower().split("+")))
    return hashlib.sha256(canonical.encode()).digest()[0] % _UNSEEN_ONE_IN == 0


def seen_input(task: str, rng: Random) -> str:
    """One input of ``task`` that training may use."""
    make_input = TASKS[task].make_input
    while True:
        text = make_input(rng)
        if not is_unseen(text):
            return text


def unseen_examples(task: str, count: int, seed: int) -> list[tuple[str, str]]:
    """``count`` distinct (prompt, answer) pairs whose prompts took no part in training.

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
    """The sum that ``"12+34"`` asks for, as text."""
    left, right = text.split("+")
    return str(int(left) + int(right))


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
    """One to three words of together at most 16 characters, sometimes with marks and capitals."""
    text = _word(rng, 7)
    for _ in range(rng.randint(0, 2)):
        longer = f"{text} {_word(rng, 6)}"
        if len(longer) <= 15:
            text = longer
    if rng.random() < 0.1:
        text = text.capitalize()
    if rng.random() < 0.15:
        text += rng.choice("!?.,0123456789")
    return text


def _short_text(rng: Random) -> str:
    """A word, or two short ones, of 2 to 8 characters."""
    if rng.random() < 0.2:
        return f"{_word(rng, 4)} {_word(rng, 3)}"
    return _word(rng, 8)


def _sum(rng: Random) -> str:
    return f"{rng.randint(0, 99)}+{rng.randint(0, 99)}"


_ALL_TASKS = (
    Task("upper", "writes the text in capitals", _phrase, str.upper),
    Task("vowels", "puts a star for every vowel", _phrase, star_vowels),
    Task("reverse", "writes a short text backwards", _short_text, reverse_text),
    Task("add", "adds two numbers of up to two digits", _sum, add_numbers),
)
TASKS: Mapping[str, Task] = {task.name: task for task in _ALL_TASKS}
