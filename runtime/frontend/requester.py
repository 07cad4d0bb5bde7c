"""What the request that runs may do, for code that it calls through several layers."""

from contextvars import ContextVar

# Whether it may do what only administrators may. The HTTP server sets it for each request.
IS_ADMIN: ContextVar[bool] = ContextVar("IS_ADMIN", default=True)
