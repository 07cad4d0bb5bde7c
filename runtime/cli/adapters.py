"""``corun adapters``: where the adapters of a server or of a cluster are, as a table."""

import argparse
import http.client
import json
import os
import shlex
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

from ..config.variables import PREFIX
from ..errors import ConfigError, CorunError

_TIMEOUT_S = 10.0
_MIB = 2**20
_HEADINGS = ("name", "level", "rank", "device", "host", "KV", "running", "waiting", "uses", "last use", "")
_CLUSTER_HEADINGS = ("name", "level", "rank", "size", "engines", "files at", "")
_NUMBERS = frozenset(_HEADINGS[2:-1]) | {"size"}  # of both, to the right
_SECONDS = {"d": 86400, "h": 3600, "min": 60, "s": 1}


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each adapter, and a summary."""
    url = _checked_url(arguments.url)
    keys = [arguments.api_key, *shlex.split(os.environ.get(f"{PREFIX}API_KEY", ""))]
    api_key = next(filter(None, keys), None)  # any of them is enough
    adapters: list[dict[str, Any]] = []
    while True:
        after = f"&after={quote(adapters[-1]['name'], safe='')}" if adapters else ""
        level = f"&level={quote(arguments.level, safe='')}" if arguments.level else ""
        page = _get(f"{url}/v1/lora_adapters?limit=1000{after}{level}", api_key)
        adapters += page["data"]
        if not page["has_more"]:
            break
    lines = cluster_table(adapters) if _is_of_cluster(page) else table(adapters, time.time())
    for line in lines:
        print(line)
    print(summary(page, len(adapters)))
    return 0


def table(adapters: Sequence[Mapping[str, Any]], now_s: float) -> Iterator[str]:
    """Yield aligned lines for the answer of a server: the heading, and each version."""
    rows: list[tuple[str, ...]] = [_HEADINGS]
    for adapter in adapters:
        rows.append(_row(adapter["name"], adapter, now_s, _remark(adapter)))
        for version in adapter["draining"]:
            rows.append(_row("", version, now_s, "drains"))
    return _aligned(rows)


def cluster_table(adapters: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield aligned lines for the answer of a gateway: the heading, and each adapter.

    They show at which level each engine has it, and on which machines its files are.
    """
    rows: list[tuple[str, ...]] = [_CLUSTER_HEADINGS]
    for adapter in adapters:
        engines = (f"{engine} {level}" for engine, level in sorted(adapter["engines"].items()))
        rows.append(
            (
                adapter["name"],
                adapter["level"],
                str(adapter["rank"]),
                _mib(adapter["num_bytes"]),
                ", ".join(engines) or "-",
                ", ".join(sorted(adapter["copies"])) or "-",
                _remark(adapter),
            )
        )
    return _aligned(rows)


def summary(page: Mapping[str, Any], num_shown: int) -> str:
    """Return the number of adapters, how many fit on a server's device, and the age of that."""
    shown = "" if num_shown == page["num_adapters"] else f"{num_shown} of "
    fit = ""
    if not _is_of_cluster(page):
        fit = f"{page['num_fitting']} fit on the device with the running requests; "
    return f"{shown}{page['num_adapters']} adapters; {fit}as of {page['age_s']:.1f} s ago"


def _is_of_cluster(page: Mapping[str, Any]) -> bool:
    """Whether a gateway has answered, which does not know what fits on a device."""
    return "num_fitting" not in page


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Align words left and numbers right; the first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [">" if heading in _NUMBERS else "<" for heading in rows[0]]
    for row in rows:
        cells = zip(row, sides, widths, strict=True)
        yield "  ".join(f"{cell:{side}{width}}" for cell, side, width in cells).rstrip()


def _row(name: str, version: Mapping[str, Any], now_s: float, remark: str) -> tuple[str, ...]:
    level = version["level"]
    if version["num_groups"]:
        level += f" {version['num_groups_loaded']}/{version['num_groups']}"
    last_s = version["last_use_unix_s"]
    return (
        name,
        level,
        str(version["rank"]),
        _mib(version["device_bytes"]),
        _mib(version["host_bytes"]),
        _mib(version["kv_device_bytes"] + version["kv_host_bytes"]),
        str(version["num_references"]),
        str(version["num_waiting"]),
        str(version["num_uses"]),
        "-" if last_s is None else _ago(now_s - last_s),
        remark,
    )


def _remark(adapter: Mapping[str, Any]) -> str:
    remarks = ["pinned"] if adapter["pinned"] else []
    if adapter["state"] != "ready":
        remarks.append(adapter["state"])
    if adapter["reason"]:
        remarks.append(adapter["reason"])
    return ", ".join(remarks)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.1f} MiB" if num_bytes else "-"


def _ago(seconds: float) -> str:
    unit = next((unit for unit, size in _SECONDS.items() if seconds >= size), "s")
    return f"{max(0.0, seconds) / _SECONDS[unit]:.0f} {unit} ago"


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of the port, or of the address
        is_url = False
    if not is_url or any(character.isspace() for character in url):
        raise ConfigError(f"--url is {url!r}, expected something like http://localhost:8000")
    return url.rstrip("/").removesuffix("/v1")


def _get(url: str, api_key: str | None) -> dict[str, Any]:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 - the scheme is checked
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        raise CorunError(f"{url} answers {error.code}: {_message(error)}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        words = " ".join(str(error).split()) or type(error).__name__
        raise CorunError(f"{url} cannot be read: {words}") from error
    if not isinstance(answer, dict) or "has_more" not in answer:
        raise CorunError(f"{url} is not a corun server of this version")
    return answer


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return error.reason
