"""A read-only installation and a home that cannot be written: it serves, with one warning."""

import os
from pathlib import Path

import corun
import pytest
from support.serving import Served, corun_command

_INSTALLED = Path(corun.__file__).resolve().parent
_MOUNTED = f"mount --bind {_INSTALLED} {_INSTALLED} && mount -o remount,ro,bind {_INSTALLED} && exec "
_MAY_MOUNT = os.geteuid() == 0 and not os.system(f"unshare --mount sh -c '{_MOUNTED} true' 2>/dev/null")
_HOME = {
    "HOME": "/proc/nowhere",
    "XDG_CACHE_HOME": "/proc/nowhere",
    "XDG_STATE_HOME": "",
    "NUMBA_CACHE_DIR": "",
    "PYTHONDONTWRITEBYTECODE": "1",
}


@pytest.mark.skipif(not _MAY_MOUNT, reason="needs root and mounts of its own")
@pytest.mark.timeout(300)
def test_it_starts_and_names_the_variables() -> None:
    command = ["unshare", "--mount", "sh", "-c", f'{_MOUNTED} "$0" "$@"', *corun_command()]
    # Compiled code is not stored, so less of it makes a shorter start.
    few = ["--linear-backend", "plain", "--attention-backend", "torch", "--fused-kernels", "off"]
    few += ["--lora-backend", "torch", "--decode-graphs", "off", "--cpu-threads", "1"]
    with Served(*few, command=command, environment=_HOME) as served:
        with served.client() as http:
            body = {"model": "upper", "messages": [{"role": "user", "content": "hello"}]}
            answer = http.post("/v1/chat/completions", json=body | {"temperature": 0})
        warnings = [line for line in served.log_lines if " WARNING" in line]
    assert answer.json()["choices"][0]["message"]["content"] == "HELLO"
    (warning,) = warnings
    assert "cannot be written" in warning and "cannot be made" in warning
    assert "set NUMBA_CACHE_DIR and XDG_STATE_HOME to a directory that only this user" in warning
    assert not [line for line in served.log_lines if "kept for the next start" in line]
