"""Access control: the keys of requests, compared in constant time."""

import hmac
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from ..config.serve import ServeConfig
from ..errors import AdminKeyNeededError, ConfigError, InvalidKeyError

_HEALTH_PATHS = frozenset({"/health", "/ready", "/version"})
_METRICS_PATHS = frozenset({"/metrics"})
PROBE_PATHS = _HEALTH_PATHS | _METRICS_PATHS
_READING = frozenset({"GET", "HEAD"})
_ADAPTER_PATHS = tuple(
    f"{prefix}/{name}"
    for prefix in ("/v1", "")
    for name in ("load_lora_adapter", "unload_lora_adapter", "lora_adapters")
)

_logger = logging.getLogger(__name__)


class Keys:
    """A set of secrets, stored as digests: a comparison reveals not even their length."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = tuple({sha256(key.encode()).digest(): None for key in keys})

    def __bool__(self) -> bool:
        return bool(self._digests)

    def have(self, key: bytes) -> bool:
        """Whether ``key`` is one of them. Always compares with all of them."""
        digest = sha256(key).digest()
        return any([hmac.compare_digest(digest, one) for one in self._digests])


@dataclass(frozen=True, slots=True)
class Access:
    """Which key a request needs. Without keys all requests pass; an admin key fits everywhere.

    If there are ``admin`` keys, changes of adapters need one of them; ``api`` keys do not suffice.
    """

    api: Keys = field(default_factory=Keys)
    admin: Keys = field(default_factory=Keys)
    open_paths: frozenset[str] = frozenset()  # these need no key

    @classmethod
    def of(cls, config: ServeConfig) -> "Access":
        """Return the access that the options set. Raises ``ConfigError`` for a bad key file."""
        open_paths: frozenset[str] = frozenset()
        if not config.metrics_need_key:
            open_paths |= _METRICS_PATHS
        if not config.health_needs_key:
            open_paths |= _HEALTH_PATHS
        return cls(
            Keys((*config.api_key, *_read_keys(config.api_key_file, "--api-key-file"))),
            Keys((*config.admin_key, *_read_keys(config.admin_key_file, "--admin-key-file"))),
            open_paths,
        )

    def check_model(self, model: str | None) -> None:
        """Raise ``ConfigError`` if MODEL is a key, which must not be logged or sent to the hub."""
        key = (model or "").encode("utf-8", "surrogateescape")
        if self.api.have(key) or self.admin.have(key):
            raise ConfigError(
                "MODEL equals one of the keys; it must come before their flags: corun serve MODEL "
                "--api-key KEY ..."
            )

    def warn_if_open(self, origins: Iterable[str]) -> None:
        """Log a warning if ``origins`` let every page that a user opens use the server."""
        if "*" in origins and not self.api:
            _logger.warning(
                "--allowed-origins * without --api-key: every web page that is open in a browser "
                "which reaches this server can use it; name the origins, or set a key"
            )

    def check(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether the request has an administrator's key.

        Raises ``InvalidKeyError`` or ``AdminKeyNeededError`` unless its key suffices.
        """
        if path in self.open_paths or not (self.api or self.admin):
            return False
        key = _key_of(headers)
        is_admin = key is not None and self.admin.have(key)
        is_user = key is not None and self.api.have(key)
        is_change = bool(self.admin) and method not in _READING and path.startswith(_ADAPTER_PATHS)
        if not is_admin and not is_user and (self.api or is_change):
            raise InvalidKeyError(
                "the header Authorization: Bearer KEY is missing or wrong (--api-key, --admin-key)"
            )
        if is_change and not is_admin:
            raise AdminKeyNeededError("changing adapters needs an administrator's key (--admin-key)")
        return is_admin


def _key_of(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return a request's key, which Anthropic's clients send in a header of its own."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key")


def _read_keys(path: str | None, flag: str) -> list[str]:
    """Return the keys of a file, one for each line, at least one."""
    if path is None:
        return []
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error}") from None
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys:
        raise ConfigError(f"{flag} {path} holds no key; it must have one on each line")
    return keys
