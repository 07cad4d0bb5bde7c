"""Log-probabilities in the two forms of OpenAI's API. Pure."""

from collections.abc import Sequence

from ..frontend.outputs import Logprob, TokenCandidates
from .responses import ChatLogprobs, ChatTokenLogprob, ChatTopLogprob, CompletionLogprobs

_BYTES_PREFIX = "bytes:\\x"  # how a token is written that is a part of a character


def completion_logprobs(
    tokens: Sequence[TokenCandidates], *, text_offset: int
) -> CompletionLogprobs:
    """Return columns for ``tokens``; ``text_offset`` is where the first one begins.

    Each dictionary of ``top_logprobs`` holds the drawn token too, whatever its rank.
    """
    columns = CompletionLogprobs([], [], [], [])
    for candidates in tokens:
        drawn = next(iter(candidates.values()))
        columns.tokens.append(drawn.decoded_token)
        columns.token_logprobs.append(drawn.logprob)
        columns.top_logprobs.append(
            {candidate.decoded_token: candidate.logprob for candidate in candidates.values()}
        )
        columns.text_offset.append(text_offset)
        text_offset += len(drawn.decoded_token) if _is_text(drawn) else 0
    return columns


def num_text_chars(tokens: Sequence[TokenCandidates]) -> int:
    """Return how many characters the drawn tokens add to the offsets."""
    drawn = [next(iter(candidates.values())) for candidates in tokens]
    return sum(len(token.decoded_token) for token in drawn if _is_text(token))


def chat_logprobs(tokens: Sequence[TokenCandidates], *, num_top: int) -> ChatLogprobs:
    """Return an entry per token with its ``num_top`` best candidates, the best first."""
    content = []
    for candidates in tokens:
        drawn = next(iter(candidates.values()))
        best = sorted(
            (candidate for candidate in candidates.values() if candidate.rank <= num_top),
            key=lambda candidate: candidate.rank,
        )
        content.append(
            ChatTokenLogprob(
                token=drawn.decoded_token,
                logprob=drawn.logprob,
                bytes=_token_bytes(drawn),
                top_logprobs=[
                    ChatTopLogprob(one.decoded_token, one.logprob, _token_bytes(one))
                    for one in best
                ],
            )
        )
    return ChatLogprobs(content)


def _is_text(candidate: Logprob) -> bool:
    return not candidate.decoded_token.startswith(_BYTES_PREFIX)


def _token_bytes(candidate: Logprob) -> list[int]:
    if _is_text(candidate):
        return list(candidate.decoded_token.encode("utf-8", "replace"))
    try:
        digits = candidate.decoded_token.removeprefix("bytes:").replace("\\x", "")
        return list(bytes.fromhex(digits))
    except ValueError:  # text that happens to begin like this
        return list(candidate.decoded_token.encode())
