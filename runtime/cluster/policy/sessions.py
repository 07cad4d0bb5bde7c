"""Where a router sent each session's last request: there its prefix is probably kept. Pure."""

from collections import OrderedDict

from .reports import RouteRequest, ServerId

_MAX_SESSIONS = 10_000  # the least recent is forgotten; its next request is like a first one


class Sessions:
    """What one router remembers. A prefix belongs to an adapter: other adapters' KV differs."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str | None, str], tuple[ServerId, int]] = OrderedDict()

    def note(self, request: RouteRequest, server_id: ServerId) -> None:
        """``request`` goes to this server, where its tokens are kept."""
        if request.session is None:
            return
        key = (request.adapter_name, request.session)
        num_tokens = request.num_prompt_tokens + int(request.predicted_output_tokens)
        self._kept[key] = (server_id, num_tokens)
        self._kept.move_to_end(key)
        if len(self._kept) > _MAX_SESSIONS:
            self._kept.popitem(last=False)

    def find(self, request: RouteRequest) -> tuple[ServerId | None, int]:
        """The server with the request's prefix, and how many tokens; at least one is computed."""
        if request.session is None:
            return None, 0
        server_id, num_tokens = self._kept.get((request.adapter_name, request.session), (None, 0))
        return server_id, min(num_tokens, request.num_prompt_tokens - 1)
