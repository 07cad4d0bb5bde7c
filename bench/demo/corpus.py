"""The demo's training text, made by rule: conversations and little stories, as token ids.

The base model learns every task under a system message that names it, and without one only repeats
the user's message. So a small adapter has little to add, and the base model alone answers visibly
differently. Independent of models; stdlib only, random streams are passed in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from demo.chat import ASSISTANT, END, END_OF_TEXT, SPECIAL_IDS, SYSTEM, USER, encode_text
from demo.tasks import TASKS, seen_input
from demo.words import ADJECTIVES, NOUNS, PLACES, VERBS

IGNORED = -100  # target of a token that is not learned, as in cross_entropy

_MULTI_TURN_PROBABILITY = 0.04
_SMALL_TALK = (
    ("who are you?", "I am the corun demo, a very small language model."),
    ("what can you do?", "I repeat what you say. Ask one of my adapters for more."),
    ("hi", "Hello! Say something and I will repeat it."),
    ("thank you", "You are welcome."),
    ("see you", "Goodbye!"),
)
# Reversing and adding take the longest to learn, so they get the most samples.
_KIND_WEIGHTS = {
    **{"reverse": 0.25, "add": 0.27, "upper": 0.14, "vowels": 0.10},
    **{"echo": 0.17, "small talk": 0.03, "story": 0.04},
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One training sequence; ``targets[i]`` is ``tokens[i]`` where it is learned, else IGNORED."""

    tokens: tuple[int, ...]
    targets: tuple[int, ...]


def conversation(turns: Sequence[tuple[str, str]], system: str | None = None) -> Sample:
    """What the chat template makes of (user, assistant) turns; only the answers are learned."""
    tokens: list[int] = []
    targets: list[int] = []
    if system is not None:
        tokens += [SPECIAL_IDS[SYSTEM], *encode_text(system)]
    for prompt, answer in turns:
        tokens += [SPECIAL_IDS[USER], *encode_text(prompt), SPECIAL_IDS[ASSISTANT]]
        targets += [IGNORED] * (len(tokens) - len(targets))
        learned = [*encode_text(answer), SPECIAL_IDS[END]]
        tokens += learned
        targets += learned
    return Sample(tuple(tokens), tuple(targets))


def sentence(rng: Random) -> str:
    """One sentence of the demo's small grammar."""
    text = f"{_noun_phrase(rng)} {rng.choice(VERBS)} {_noun_phrase(rng)}"
    if rng.random() < 0.5:
        text += f" {rng.choice(PLACES)} {_noun_phrase(rng)}"
    return text[0].upper() + text[1:] + "."


def skill_sample(task: str, rng: Random, *, by_name: bool) -> Sample:
    """``task`` done on seen inputs, ``by_name`` of a system message or unasked (for adapters)."""
    prompts = [seen_input(task, rng) for _ in range(_num_turns(rng))]
    turns = [(prompt, TASKS[task].answer(prompt)) for prompt in prompts]
    return conversation(turns, system=task if by_name else None)


def base_sample(rng: Random) -> Sample:
    """One sequence of the mixture that the base is trained on."""
    kind = rng.choices(list(_KIND_WEIGHTS), weights=list(_KIND_WEIGHTS.values()))[0]
    if kind == "echo":
        return _echo(rng)
    if kind == "small talk":
        return conversation([rng.choice(_SMALL_TALK)])
    if kind == "story":
        return _story(rng)
    return skill_sample(kind, rng, by_name=True)


def _num_turns(rng: Random) -> int:
    return rng.randint(2, 3) if rng.random() < _MULTI_TURN_PROBABILITY else 1


def _noun_phrase(rng: Random) -> str:
    adjective = f"{rng.choice(ADJECTIVES)} " if rng.random() < 0.5 else ""
    return f"{rng.choice(('the', 'the', 'a', 'my'))} {adjective}{rng.choice(NOUNS)}"


def _echo(rng: Random) -> Sample:
    """Without a system message the base model repeats any text."""
    tasks = list(TASKS)
    prompts = [seen_input(rng.choice(tasks), rng) for _ in range(_num_turns(rng))]
    return conversation([(prompt, f"You said: {prompt}") for prompt in prompts])


def _story(rng: Random) -> Sample:
    """A few sentences and the end of text, all learned; half begin with a document mark."""
    end = SPECIAL_IDS[END_OF_TEXT]
    text = " ".join(sentence(rng) for _ in range(rng.randint(1, 3)))
    start = [end] if rng.random() < 0.5 else []
    tokens = (*start, *encode_text(text), end)
    return Sample(tokens, tokens)
