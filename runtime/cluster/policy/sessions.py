"""Records to which servers beginnings of prompts were sent, to predict cache hits. Pure."""

from collections import OrderedDict
from collections.abc import Mapping

from .reports import RouteRequest, ServerId

_MAX_SESSIONS = 10_000  # the least recently used one is dropped
_MAX_BEGINNINGS = 100_000

# Prefixes are kept per adapter: KV depends on the adapter.
_Name = str | None


class Sessions:
    """The record of one router: by text of prompts, or by session if texts are unknown."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[tuple[_Name, str], tuple[ServerId, int]] = OrderedDict()
        self._beginnings: OrderedDict[tuple[_Name, int], set[ServerId]] = OrderedDict()

    def record(self, request: RouteRequest, server_id: ServerId) -> None:
        """Record that ``request`` was sent to a server. O(beginnings)."""
        name, kept = request.adapter_name, self._beginnings
        if request.beginnings is not None:
            for one, _ in request.beginnings:
                kept.setdefault((name, one), set()).add(server_id)
                kept.move_to_end((name, one))
            while len(kept) > _MAX_BEGINNINGS:
                kept.popitem(last=False)
            return
        if request.session is None:
            return
        num_tokens = request.num_prompt_tokens + int(request.predicted_output_tokens)
        self._sessions[name, request.session] = (server_id, num_tokens)
        self._sessions.move_to_end((name, request.session))
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def find(self, request: RouteRequest) -> Mapping[ServerId, int]:
        """Return servers with a cached prefix and its tokens, at most all but one of the prompt.

        Servers may have left, or lost the prefix.
        """
        name, most = request.adapter_name, request.num_prompt_tokens - 1
        if request.beginnings is None:
            if request.session is None or (name, request.session) not in self._sessions:
                return {}
            server_id, num_tokens = self._sessions[name, request.session]
            return {server_id: min(num_tokens, most)}
        found: dict[ServerId, int] = {}
        for one, num_tokens in request.beginnings:  # longer beginnings come later and overwrite
            servers = self._beginnings.get((name, one), ())
            found.update(dict.fromkeys(servers, min(num_tokens, most)))
        return found
