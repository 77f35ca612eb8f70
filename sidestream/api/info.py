"""What the server is and how busy, and what an operator may do to it while it runs. SGLang's names beside our own."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.responses import RedirectResponse, Response

from sidestream import __version__
from sidestream.api.refusals import Unavailable
from sidestream.api.route import Call, Route
from sidestream.api.service import Service
from sidestream.api.sse import json_response
from sidestream.config import declared_options

STATS_SECONDS = 10.0  # that the engine may take between two steps before it counts as stuck


class ModelInfo(msgspec.Struct, kw_only=True):
    model_path: Annotated[str, Meta(description="Where the weights are from.")]
    tokenizer_path: str
    served_model_name: str
    weight_version: str
    is_generation: bool = True
    has_image_understanding: bool = False
    has_audio_understanding: bool = False
    preferred_sampling_params: None = None
    context_length: int
    vocab_size: int
    num_layers: int
    hidden_size: int
    num_parameters: int
    dtype: str
    device: str
    backend: str


class Load(msgspec.Struct, kw_only=True):
    dp_rank: int = 0
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: Annotated[int, Meta(description="Of the KV cache, by requests; what is only cached counts as free.")]
    num_total_tokens: Annotated[int, Meta(description="Used, and of the cache.")]
    max_total_num_tokens: int
    max_running_requests: int
    token_usage: Annotated[float, Meta(description="Share of the KV cache that requests use.")]


class Loads(msgspec.Struct, kw_only=True):
    timestamp: str
    version: str
    loads: list[Load]


class OldLoad(msgspec.Struct, kw_only=True):
    """SGLang's older shape."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


class ServerInfo(ModelInfo, kw_only=True):
    version: str
    status: str
    uptime_seconds: float
    max_total_num_tokens: int
    max_running_requests: int
    load: Load
    internal_states: list[Load]
    stats: Annotated[dict[str, Any], Meta(description="The engine's counters, taken now (docs/outputs.md).")]
    facts: Annotated[dict[str, Any], Meta(description="What was found and picked at the start.")]
    config: Annotated[dict[str, Any], Meta(description="Options as they were set; of secrets only whether there is one.")]


def _model_info(service: Service) -> dict[str, Any]:
    engine = service.any_engine
    facts = engine.facts
    names = ("vocab_size", "num_layers", "hidden_size", "num_parameters", "dtype", "device", "backend")
    return {
        "model_path": service.weights.path,
        "tokenizer_path": engine.config.tokenizer or engine.config.model,
        "served_model_name": service.model_names[0],
        "weight_version": service.weights.version,
        "context_length": facts.context,
        **{name: getattr(facts, name) for name in names},
    }


async def _stats(service: Service) -> dict[str, Any]:
    """The engine's counters of this moment. Raises Unavailable where it is stuck."""
    try:
        return await asyncio.wait_for(service.any_engine.stats(), STATS_SECONDS)
    except asyncio.TimeoutError:
        raise Unavailable(f"the engine has not answered for {STATS_SECONDS:g} s", code="stalled") from None


def _load(service: Service, stats: dict[str, Any]) -> Load:
    total, free, cached = (stats[f"kv_tokens_{name}"] for name in ("total", "free", "cached"))
    return Load(
        num_running_reqs=stats["running"],
        num_waiting_reqs=stats["waiting"],
        num_total_reqs=stats["running"] + stats["waiting"],
        num_used_tokens=total - free - cached,
        num_total_tokens=total - free,
        max_total_num_tokens=total,
        max_running_requests=service.any_engine.facts.max_running,
        token_usage=round((total - free - cached) / total, 6),
    )


async def model_info(call: Call[None]) -> Response:
    return json_response(ModelInfo(**_model_info(call.service)))


async def server_info(call: Call[None]) -> Response:
    service = call.service
    stats = await _stats(service)
    load = _load(service, stats)
    answer = ServerInfo(
        **_model_info(service),
        version=__version__,
        status=service.state()[0],
        uptime_seconds=round(time.time() - service.started, 3),
        max_total_num_tokens=load.max_total_num_tokens,
        max_running_requests=load.max_running_requests,
        load=load,
        internal_states=[load],
        stats=stats,
        facts=asdict(service.any_engine.facts),
        config=_config(service),
    )
    return json_response(answer)


def _config(service: Service) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for option in declared_options():
        holder = service.any_engine.config if hasattr(service.any_engine.config, option.name) else service.config
        value = getattr(holder, option.name)
        options[option.name] = bool(value) if option.option.secret else value
    return options


async def loads(call: Call[None]) -> Response:
    load = _load(call.service, await _stats(call.service))
    return json_response(Loads(timestamp=datetime.now(timezone.utc).isoformat(), version=__version__, loads=[load]))


async def old_load(call: Call[None]) -> Response:
    load = _load(call.service, await _stats(call.service))
    old = OldLoad(dp_rank=0, num_reqs=load.num_total_reqs, num_waiting_reqs=load.num_waiting_reqs, num_tokens=load.num_used_tokens)
    return json_response([old])


async def root(call: Call[None]) -> Response:
    """A browser is shown the routes."""
    if "text/html" in call.request.headers.get("accept", ""):
        return RedirectResponse("docs", headers={"Vary": "Accept"})
    return json_response(
        {"name": "sidestream", "version": __version__, "docs": "/docs", "openapi": "/openapi.json"}, headers={"Vary": "Accept"}
    )


INFO = (
    Route("GET", "/", root, "What answers here", answer=dict[str, str], open=True, loaded=False, states={307: None}),
    Route("GET", "/model_info", model_info, "What the model is", answer=ModelInfo, aliases=("/get_model_info",)),
    Route("GET", "/server_info", server_info, "Options, facts, counters and load", answer=ServerInfo, aliases=("/get_server_info",)),
    Route("GET", "/v1/loads", loads, "How busy it is", answer=Loads),
    Route("GET", "/get_load", old_load, "How busy it is, in SGLang's older shape", answer=list[OldLoad]),
)
