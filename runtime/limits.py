"""What a request may be and how many may wait: one rule and one wording for each.

A front end asks before it troubles the engine; the scheduler asks whoever comes. Pure.
"""

from .errors import OverloadedError, RequestError, TooManySequencesError

MAX_LANES = 4  # queues of a scheduling policy (--queues); K_max of Chameleon, section 4.2


def check_prompt_length(num_tokens: int, max_model_len: int) -> None:
    """Raise ``RequestError`` if the prompt is empty or leaves no room for output."""
    if num_tokens == 0:
        raise RequestError("the prompt is empty: it has no tokens", param="prompt")
    if num_tokens >= max_model_len:
        raise RequestError(
            f"the prompt has {num_tokens} tokens; with room for one more the limit is "
            f"{max_model_len - 1}, as prompt and output together have at most {max_model_len} "
            "(--max-model-len)",
            param="prompt",
        )


def check_predicted_output(num_tokens: int | None) -> None:
    """Raise ``RequestError`` if a request's own prediction is none; None = the engine predicts."""
    if num_tokens is not None and not 1 <= num_tokens < 2**31:
        raise RequestError(
            f"predicted_output_tokens is {num_tokens}, must be in [1, {2**31 - 1}]",
            param="predicted_output_tokens",
        )


def check_num_sequences(
    num_prompts: int, num_choices: int, *, max_num_seqs: int, max_num_waiting: int
) -> None:
    """Raise ``TooManySequencesError`` if one caller asks for more than can ever run and wait."""
    num_sequences = num_prompts * num_choices
    if num_sequences > max_num_seqs + max_num_waiting:
        raise TooManySequencesError(
            f"{num_prompts} prompts with {num_choices} choices each are {num_sequences} "
            f"sequences, the engine holds at most {max_num_seqs + max_num_waiting} "
            "(--max-num-seqs and --max-num-waiting together)",
            param="prompt" if num_prompts > num_choices else "n",
        )


def check_num_open(num_open: int, num_new: int, *, max_num_seqs: int, max_num_waiting: int) -> None:
    """Raise ``OverloadedError`` for what cannot even wait beside the sequences that are open."""
    limit = max_num_seqs + max_num_waiting
    if num_open + num_new > limit:
        raise OverloadedError(
            f"{num_open} requests are open and {num_new} more would exceed {limit}: "
            f"{max_num_seqs} running (--max-num-seqs) "
            f"and {max_num_waiting} waiting (--max-num-waiting)"
        )


def check_queue(num_waiting: int, max_num_waiting: int | None) -> None:
    """Raise ``OverloadedError`` if no further request may wait; None means that any number may."""
    if max_num_waiting is not None and num_waiting >= max_num_waiting:
        raise OverloadedError(
            f"{num_waiting} requests are waiting, the limit is {max_num_waiting} "
            "(--max-num-waiting)"
        )
