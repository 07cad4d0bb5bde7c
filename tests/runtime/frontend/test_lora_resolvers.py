"""Adapters that requests name are looked for in directories, also in ones that do not answer."""

import asyncio
import os
import threading
from pathlib import Path

import pytest
from corun.runtime import file_calls
from corun.runtime.errors import UnknownModelError
from corun.runtime.frontend.lora_resolvers import DirectoryResolver
from support.adapter_files import write_adapter

_SOON_S = 20.0


def test_a_directory_that_does_not_answer_holds_few_threads_for_any_number_of_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_calls, "_SLICE_S", 0.01)
    monkeypatch.setattr(file_calls.FILES, "timeout_s", 0.1)
    dead, alive = tmp_path / "dead", tmp_path / "alive"
    write_adapter(alive / "sql")
    answers, stuck, stat = threading.Event(), list[str](), os.stat

    def dead_stat(path: str | Path, **options: bool) -> os.stat_result:
        if str(path).startswith(str(dead)):
            stuck.append(str(path))
            assert answers.wait(_SOON_S)
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", dead_stat)

    async def run() -> None:
        resolver = DirectoryResolver(dead)
        asked = [asyncio.ensure_future(resolver.resolve_lora("base", str(number))) for number in range(200)]
        for one in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(one, UnknownModelError) and "does not answer" in str(one)
        monkeypatch.setattr(file_calls.FILES, "timeout_s", _SOON_S)
        found = await DirectoryResolver(alive).resolve_lora("base", "sql")
        assert found is not None and found.lora_path == str(alive / "sql")

    asyncio.run(asyncio.wait_for(run(), _SOON_S))
    assert 0 < len(stuck) <= 8
    answers.set()
