"""Tasks, their right answers, and the rule that keeps inputs unseen."""

from random import Random

import pytest
from demo.chat import ASSISTANT, SPECIAL_IDS, USER
from demo.corpus import IGNORED, base_sample, skill_sample
from demo.tasks import MAX_UNSEEN_EXAMPLES, TASKS, is_unseen, unseen_examples

USER_ID, ASSISTANT_ID = SPECIAL_IDS[USER], SPECIAL_IDS[ASSISTANT]


def user_messages(tokens: tuple[int, ...]) -> list[str]:
    """What the user says in a training sequence."""
    messages = []
    for place, token in enumerate(tokens):
        if token == USER_ID:
            end = tokens.index(ASSISTANT_ID, place)
            messages.append(bytes(tokens[place + 1 : end]).decode())
    return messages


@pytest.mark.parametrize(
    ("task", "text", "answer"),
    [
        ("upper", "the old fox!", "THE OLD FOX!"),
        ("vowels", "Apple tree", "*ppl* tr**"),
        ("reverse", "garden", "nedrag"),
        ("add", "99+7", "106"),
        ("add", "what is 12 + 34?", "46"),
    ],
)
def test_answers(task: str, text: str, answer: str) -> None:
    assert TASKS[task].answer(text) == answer


@pytest.mark.parametrize("task", TASKS)
def test_unseen_examples_are_distinct_unseen_right_and_repeatable(task: str) -> None:
    examples = unseen_examples(task, 200, seed=3)
    assert len({prompt for prompt, _ in examples}) == 200
    assert all(is_unseen(prompt) for prompt, _ in examples)
    assert all(answer == TASKS[task].answer(prompt) for prompt, answer in examples)
    assert examples == unseen_examples(task, 200, seed=3)
    assert examples != unseen_examples(task, 200, seed=4)


@pytest.mark.parametrize("task", TASKS)
def test_base_text_and_adapter_text_never_hold_an_unseen_input(task: str) -> None:
    rng = Random(5)
    samples = [base_sample(rng) for _ in range(1500)]
    samples += [skill_sample(task, rng, by_name=False) for _ in range(300)]
    messages = {text for sample in samples for text in user_messages(sample.tokens)}
    assert len(messages) > 1000
    assert not [text for text in messages if is_unseen(text)]
    unseen = {prompt for prompt, _ in unseen_examples(task, MAX_UNSEEN_EXAMPLES, seed=1)}
    assert not unseen & messages


def test_the_rule_ignores_case_and_the_way_to_ask_for_a_sum() -> None:
    rng = Random(0)
    for _ in range(200):
        left, right = rng.randint(0, 99), rng.randint(0, 99)
        ways = (f"{left}+{right}", f"{right} + {left}", f"what is {left} + {right}?")
        assert len({is_unseen(way) for way in ways}) == 1
    for prompt, _ in unseen_examples("upper", 50, seed=0):
        assert is_unseen(prompt.upper())


def test_the_rule_takes_about_a_fifth() -> None:
    rng = Random(0)
    texts = {TASKS["upper"].make_input(rng) for _ in range(4000)}
    assert 0.15 < sum(map(is_unseen, texts)) / len(texts) < 0.25


def test_only_answers_are_learned_in_conversations() -> None:
    sample = skill_sample("upper", Random(0), by_name=True)
    learned = [token for token in sample.targets if token != IGNORED]
    assert bytes(learned[:-1]).decode().isupper()
    assert len(learned) < len(sample.tokens) == len(sample.targets)


@pytest.mark.parametrize("count", [-1, MAX_UNSEEN_EXAMPLES + 1])
def test_absurd_counts_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"count is {count}, must be within 0 and 500"):
        unseen_examples("add", count, seed=0)


def test_a_text_without_a_sum_has_no_answer() -> None:
    with pytest.raises(ValueError, match="no sum like 12\\+34 in 'hello'"):
        TASKS["add"].answer("hello")


def test_unknown_task() -> None:
    with pytest.raises(KeyError):
        unseen_examples("translate", 1, seed=0)
