"""CORS: lets pages of other origins call the API from a browser (``--allowed-origins``)."""

from collections.abc import Collection

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

_METHODS = ("GET", "HEAD", "POST")  # of all routes
# Headers of answers that a page may read, beside those that browsers always show.
_EXPOSED = ("x-request-id", "retry-after")


def with_cors(app: ASGIApp, origins: Collection[str]) -> ASGIApp:
    """Return ``app`` with answers to preflight requests, and headers for pages of ``origins``.

    A browser sends no key in a preflight request, so this comes before the check of keys. Without
    origins, ``app`` itself is returned.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=_METHODS,
        allow_headers=("*",),
        allow_private_network=True,  # a named origin may be public, and this server is local
        expose_headers=_EXPOSED,
    )
