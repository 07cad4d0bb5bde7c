"""uvicorn without its signal handling, and with limits on connections."""

import contextlib
from collections import Counter
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from ..limits import HttpLimits
from .connection import connection_class

_CLOSE_TIMEOUT_S = 2  # whole seconds; for connections with a client that does not read


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_http_server(app: ASGIApp, limits: HttpLimits, num_ended: Counter[str]) -> HttpServer:
    """Return the server of ``app``; ``num_ended``: counts connections that limits end."""
    return HttpServer(
        uvicorn.Config(
            app,
            http=connection_class(limits, num_ended),
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,  # addresses of clients are not used
            server_header=False,
            timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
        )
    )
