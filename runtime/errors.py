"""Exceptions for errors of input, files and machines.

A failed assertion is a bug of corun. For one of these exceptions the user can do something: the
message names the value, the limit that it met, and the flag of that limit.

CorunError
├── ConfigError            an option or configuration file is wrong           (exit code 2)
├── ModelError             the base model cannot be loaded or is refused
├── ResourceError          the machine lacks memory, disk or another resource
├── RequestError           one request is wrong                               (HTTP 400)
│   ├── NotServedError     it uses a feature that corun does not serve        (HTTP 400)
│   ├── ContextLengthError its prompt leaves no room for output               (HTTP 400)
│   ├── UnknownModelError  it names no model or adapter that is served        (HTTP 404)
│   ├── AdapterUnavailableError  its adapter is registered but not ready      (HTTP 503)
│   │   ├── AdapterChangedError  its adapter has changed meanwhile            (HTTP 503)
│   │   └── AdapterFailedError   its adapter's files are refused              (HTTP 400)
│   ├── AdapterExistsError the name of the adapter to load is taken           (HTTP 400)
│   ├── InvalidKeyError    its key is missing or wrong                        (HTTP 401)
│   ├── AdminKeyNeededError  its key does not permit this                     (HTTP 403)
│   ├── TooManySequencesError  it has more sequences than can run and wait    (HTTP 400)
│   ├── OverloadedError    too many requests are waiting                      (HTTP 429)
│   └── StepFailedError    the step that computed it failed                   (HTTP 500)
├── AdapterError           an adapter's files or configuration are refused    (HTTP 400)
└── EngineDeadError        the engine process is gone                         (HTTP 503)
    └── EngineHungError    the engine makes no progress                       (HTTP 503)
"""

from .timing import EngineTiming


def encodable(text: str) -> str:
    """Return ``text`` with lone surrogates escaped, which names in JSON files may hold."""
    return text.encode(errors="backslashreplace").decode()


class CorunError(Exception):
    """Base of all errors of corun.

    ``status`` is the HTTP status, ``code`` the error code in HTTP answers.
    """

    status = 500
    code = "internal_error"
    timing: EngineTiming | None = None  # of the failed request, if the engine had begun it

    def __str__(self) -> str:
        return encodable(super().__str__())

    @property
    def kind(self) -> str:
        """Name of its class, or of the nearest base class in this module."""
        return next(one.__name__ for one in type(self).__mro__ if one.__module__ == __name__)


class ConfigError(CorunError):
    """An option, or a key of a configuration file, is unknown or out of range."""


class ModelError(CorunError):
    """The base model cannot be loaded, or corun refuses to serve it."""


class ResourceError(CorunError):
    """The machine has too little memory, disk or another resource."""


class RequestError(CorunError):
    """One request is invalid. Other requests are not affected.

    ``param`` names the invalid field of the request, if there is one.
    """

    status = 400
    code = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NotServedError(RequestError):
    """The request uses a feature that corun does not serve."""

    code = "not_served"


class ContextLengthError(RequestError):
    """The prompt leaves no room for one token in the model's context.

    Some clients look for the code, or for "maximum context length" in the message, to retry with a
    model with a longer context.
    """

    code = "context_length_exceeded"


class UnknownModelError(RequestError):
    """The request names a model or adapter that is not registered."""

    status = 404
    code = "model_not_found"


class AdapterUnavailableError(RequestError):
    """The request's adapter cannot be used now: it is loading or draining, or a copy failed."""

    status = 503
    code = "adapter_unavailable"


class AdapterChangedError(AdapterUnavailableError):
    """The request was made for an older version of its adapter."""


class AdapterFailedError(AdapterUnavailableError):
    """The request's adapter cannot be served. A retry fails again."""

    status = 400
    code = "adapter_failed"


class AdapterExistsError(RequestError):
    """An adapter of this name is loaded already, with other content."""

    code = "adapter_exists"


class InvalidKeyError(RequestError):
    """The request has no key, or an unknown one."""

    status = 401
    code = "invalid_api_key"


class AdminKeyNeededError(RequestError):
    """The request's key does not permit what it does."""

    status = 403
    code = "admin_key_needed"


class TooManySequencesError(RequestError):
    """The request has more prompts and choices than the server can run and queue at once."""

    code = "too_many_sequences"


class OverloadedError(RequestError):
    """A queue is full, or the request has waited longer than --max-queue-s.

    ``retry_after_s``: seconds after which a retry can succeed, if they are known.
    """

    status = 429
    code = "overloaded"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class StepFailedError(RequestError):
    """The step that computed this request failed."""

    status = 500
    code = "step_failed"


class AdapterError(CorunError):
    """An adapter directory is missing, damaged, or uses what corun does not serve."""

    status = 400
    code = "adapter_refused"


class EngineDeadError(CorunError):
    """The engine process died or was shut down."""

    status = 503
    code = "engine_dead"


class EngineHungError(EngineDeadError):
    """The engine has work and makes no progress."""

    code = "engine_hung"


def rebuild_error(kind: str | None, message: str, *, default: type[CorunError]) -> CorunError:
    """Return an error that another process reported by class name and message.

    An unknown ``kind`` becomes ``default``, with the kind in the message.
    """
    found = globals().get(kind) if kind is not None else None
    if isinstance(found, type) and issubclass(found, CorunError):
        return found(message)
    return default(message if kind is None else f"{kind}: {message}")
