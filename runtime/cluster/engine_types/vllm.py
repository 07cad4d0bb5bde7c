"""An unmodified vLLM server as an engine: its state comes from its metrics.

Adapters have names of their own there, ``NAME@DIGEST``: versions of vLLM find the KV that they keep
by an adapter's name, so a name with new content would be answered from KV of the former content.
"""

import asyncio
import re
import time
from collections.abc import AsyncGenerator
from http import HTTPStatus

import aiohttp
import msgspec

from ....profiles.curve import Curve
from ....profiles.models import LinkModel, LoraModel, MachineModel
from ...server.answers import ModelCard
from ...server.errors import HttpError
from ..http.calls import fetch
from ..wire import (
    Accepted,
    AdapterEntry,
    EngineCard,
    EngineLoadState,
    EngineProfile,
    EngineState,
    PlacedAdapter,
)
from .corun import MODELS_PATH
from .engine_type import SentRecord, Translation
from .vllm_metrics import VllmMetrics, read_metrics
from .vllm_translation import VllmTranslation, vllm_refusal

_LOAD_PATH = "/v1/load_lora_adapter"
_UNLOAD_PATH = "/v1/unload_lora_adapter"
_LOAD_TIMEOUT_S = 120.0  # reads all of an adapter's files
_CALL_TIMEOUT_S = 5.0
_DIGEST_CHARS = 16
_NAME = re.compile(rf"(.+)@[0-9a-f]{{{_DIGEST_CHARS}}}")
_LOADED_ALREADY = "already been loaded"


def model_of(entry: AdapterEntry) -> str:
    """Return the unique name of this content at vLLM: ``NAME@DIGEST``."""
    return f"{entry.name}@{entry.digest[:_DIGEST_CHARS]}"


def name_of(model: str) -> str:
    """Return the name of a ``NAME@DIGEST``; any other name is returned as it is."""
    found = _NAME.fullmatch(model)
    return model if found is None else found[1]


class _Load(msgspec.Struct, frozen=True):
    lora_name: str
    lora_path: str


class _Unload(msgspec.Struct, frozen=True):
    lora_name: str


class VllmApi:
    """The ``AdapterApi`` of one engine."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def incarnation(self) -> str:
        body = await self._ask(METRICS_PATH)
        try:
            return read_metrics(body).incarnation
        except ValueError as error:
            text = f"{self._url} does not answer like vLLM: {error}"
            raise HttpError(502, text, code="engine_refused") from None

    async def load(self, entry: AdapterEntry, path: str) -> str:
        """Load an adapter as ``NAME@DIGEST``, then unload other contents of the name.

        Running requests of those go on: vLLM only refuses new ones.
        """
        model = model_of(entry)
        try:
            await self._ask(_LOAD_PATH, _Load(model, path), _LOAD_TIMEOUT_S)
        except HttpError as error:
            if error.status != HTTPStatus.BAD_REQUEST or _LOADED_ALREADY not in str(error):
                raise
        await self._drop(entry.name, but=model)
        return model

    async def drop(self, model: str) -> None:
        """Unload exactly this name; ignore an unknown one."""
        try:
            await self._ask(_UNLOAD_PATH, _Unload(model))
        except HttpError as error:
            if error.status != HTTPStatus.NOT_FOUND:  # already dropped
                raise

    async def pin(self, name: str, *, pinned: bool) -> None:
        raise AssertionError("``VllmEngineType.can_pin`` says so")

    async def unload(self, name: str) -> None:
        await self._drop(name)

    async def check_updates(self) -> None:
        """Raise ``HttpError`` if adapters cannot be loaded at run time."""
        try:
            # If the route exists, an empty name is refused without effect.
            await self._ask(_UNLOAD_PATH, _Unload(""))
        except HttpError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                raise HttpError(
                    400,
                    "the server cannot load adapters at run time: start it with "
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
                    code="engine_refused",
                    param="url",
                ) from None
            if error.status != HTTPStatus.BAD_REQUEST:
                raise

    async def _drop(self, name: str, but: str | None = None) -> None:
        models = msgspec.json.decode(await self._ask(MODELS_PATH), type=_Models)
        for model in models.data:
            if model.id not in (but, name) and name_of(model.id) == name:
                await self.drop(model.id)

    async def _ask(
        self, path: str, body: msgspec.Struct | None = None, timeout_s: float = _CALL_TIMEOUT_S
    ) -> bytes:
        return await _ask(self._session, self._url + path, body, timeout_s)


METRICS_PATH = "/metrics"
_HEALTH_PATH = "/health"
_EVERY_S = 0.1
_HEALTH_EVERY = 10  # of the states
_IN_LINK_BYTES_PER_S = 1e12  # of files: the assumed link includes their time
# Costs before any are learned: a step takes 10 ms and 0.1 ms per token, and adapters are loaded at
# 1 GB/s, after 50 ms.
_ASSUMED_MACHINE = MachineModel(
    num_layers=1,
    step_s=Curve((0.0, 1.0), (0.01, 0.0101)),
    groups=(),
    invocation_s=0.0,
    lora=LoraModel(
        decode_s_per_byte=0.0, decode_fixed_s=0.0, prefill_s_per_token_byte=0.0, prefill_fixed_s=0.0
    ),
    link=LinkModel(bytes_per_s=1e9, latency_s=0.05),
    num_workers=0,
)
_POLL_TIMEOUT_S = 3.0  # gateways eject a silent engine sooner


class VllmModel(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of its ``/v1/models``."""

    id: str
    created: int = 0
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: tuple[VllmModel, ...]


class VllmEngineType:
    """The ``EngineType`` of vLLM from 0.9 on, with ``--enable-lora`` and runtime updating."""

    can_pin = False  # vLLM has no route for pins
    can_mix = False
    ready_path = _HEALTH_PATH

    async def profile(self, session: aiohttp.ClientSession, card: EngineCard) -> EngineProfile:
        """Return its profile with assumed costs; routers learn them from its answers.

        Raises ``HttpError`` if it is unreachable, or cannot load adapters at run time.
        """
        foreign = card.foreign
        assert foreign is not None
        base, *_ = await base_models(session, card.url)
        metrics = await metrics_of(session, card.url)
        if not metrics.has_lora:
            raise _refused("it serves no LoRA adapters: start it with --enable-lora")
        await VllmApi(session, card.url).check_updates()
        return EngineProfile(
            model=base.id,
            base_fingerprint=foreign.base_fingerprint,
            dtype=foreign.dtype,
            max_model_len=base.max_model_len or 0,
            max_num_batched_tokens=foreign.max_num_batched_tokens,
            max_num_seqs=foreign.max_num_seqs,
            block_size=metrics.block_size,
            adapter_bytes_per_rank=foreign.adapter_bytes_per_rank,
            file_bytes_per_s=_IN_LINK_BYTES_PER_S,
            kv_bytes_per_token=foreign.kv_bytes_per_token,
            machine=_ASSUMED_MACHINE,
            is_measured=False,
        )

    async def base_cards(self, session: aiohttp.ClientSession, card: EngineCard) -> tuple[ModelCard, ...]:
        return tuple(
            ModelCard(
                id=one.id,
                created=one.created,
                root=one.root or one.id,
                parent=None,
                max_model_len=one.max_model_len or 0,
            )
            for one in await base_models(session, card.url)
        )

    async def states(
        self, session: aiohttp.ClientSession, card: EngineCard, sent: SentRecord
    ) -> AsyncGenerator[EngineState, None]:
        """Yield states from its metrics, ten times a second.

        Metrics are as old as its last step. They do not include requests sent since the last poll.
        """
        published: dict[str, PlacedAdapter] = {}
        before, beat = 0, 0
        while True:
            started_s = time.monotonic()
            if beat % _HEALTH_EVERY == 0:
                await _ask(session, card.url + _HEALTH_PATH)
            number = sent.last_number
            metrics = await metrics_of(session, card.url)
            beat += 1
            placed = _placed(sent, metrics)
            yield EngineState(
                incarnation=metrics.incarnation,
                beat=beat,
                is_ready=metrics.is_awake,
                load=load_of(metrics, sent),
                adapters=tuple(one for name, one in placed.items() if published.get(name) != one),
                removed=tuple(name for name in published if name not in placed),
                accepted={sent.gateway_id: Accepted(last=min(before, sent.last_number))},
            )
            published, before = placed, number
            await asyncio.sleep(max(0.0, _EVERY_S - (time.monotonic() - started_s)))

    def adapters(self, session: aiohttp.ClientSession, url: str) -> VllmApi:
        return VllmApi(session, url)

    def translation(self, model: str | None, asked: str | None) -> Translation:
        return VllmTranslation(model, asked)


async def base_models(session: aiohttp.ClientSession, url: str) -> list[VllmModel]:
    """Return the base model's names. Raises ``HttpError`` if there are none."""
    try:
        models = msgspec.json.decode(await _ask(session, url + MODELS_PATH), type=_Models)
    except msgspec.DecodeError as error:
        raise _refused(f"the server is not vLLM: unexpected answer of {MODELS_PATH}: {error}") from None
    found = [one for one in models.data if one.parent is None]
    if not found:
        raise _refused(f"the server is not vLLM: {MODELS_PATH} lists no base model")
    return found


async def metrics_of(session: aiohttp.ClientSession, url: str) -> VllmMetrics:
    """Return its metrics. Raises ``HttpError`` if they are not vLLM's."""
    try:
        return read_metrics(await _ask(session, url + METRICS_PATH))
    except ValueError as error:
        raise _refused(f"this vLLM server cannot be an engine: {error}") from None


def load_of(metrics: VllmMetrics, sent: SentRecord) -> EngineLoadState:
    """Return the load of an engine, as far as its metrics show it.

    They list the running adapters, but not the requests of each. vLLM's kernels pad every row to
    the largest adapter of the batch, so all rows count with its rank. Waiting prompts are known by
    number only; each counts as the mean of earlier prompts.
    """
    entries = sent.entries()

    def largest(names: frozenset[str]) -> int:
        known = [entries.get(name_of(one)) for one in names]
        return max((one.rank for one in known if one is not None), default=0)

    rank = largest(metrics.running_adapters)
    waiting_rank = largest(metrics.waiting_adapters) or rank
    used_tokens = round(metrics.kv_usage * metrics.kv_tokens)
    return EngineLoadState(
        num_running_by_rank={rank: metrics.num_running} if metrics.num_running else {},
        num_waiting_by_rank={waiting_rank: metrics.num_waiting} if metrics.num_waiting else {},
        queued_prefill_tokens=round(metrics.num_waiting * metrics.mean_prompt_tokens),
        running_context_tokens=used_tokens,
        free_kv_tokens=metrics.kv_tokens - used_tokens,
        total_kv_tokens=metrics.kv_tokens,
    )


def _placed(sent: SentRecord, metrics: VllmMetrics) -> dict[str, PlacedAdapter]:
    """Return adapters and levels: the last used ones, up to max_loras, are on the device."""
    entries = sent.entries()
    names = [name for name in sent.used if name in entries]
    on_device = set(names[-metrics.max_loras :])
    on_device |= {name_of(one) for one in metrics.running_adapters}
    return {
        name: PlacedAdapter(
            name=name,
            digest=entries[name].digest,
            level="device" if name in on_device else "disk",
            rank=entries[name].rank,
            num_bytes=entries[name].num_bytes,
        )
        for name in names
    }


async def _ask(
    session: aiohttp.ClientSession,
    url: str,
    body: msgspec.Struct | None = None,
    timeout_s: float = _POLL_TIMEOUT_S,
) -> bytes:
    """POST ``body``, or GET without one; return the answer. Raises ``HttpError``."""
    status, answer = await fetch(session, url, body, timeout_s=timeout_s)
    if status >= 400:
        raise vllm_refusal(url, status, answer)
    return answer


def _refused(text: str) -> HttpError:
    return HttpError(400, text, code="engine_refused", param="url")
