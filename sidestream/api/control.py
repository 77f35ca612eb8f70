"""What an operator may do to the server while it runs: drop the cache, end requests, replace the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.responses import Response

from sidestream.api.foreign import IGNORED, refuse_foreign
from sidestream.api.route import Call, Route
from sidestream.api.service import Service, Weights
from sidestream.api.sse import json_response
from sidestream.errors import EngineDead, InvalidRequest, SidestreamError
from sidestream.options import shown

KEPT = "of the old weights nothing may be used again"
REFUSED: Mapping[str, str] = {
    "is_async": "the answer comes when the new weights are there",
    "keep_pause": "requests go on with the new weights",
    "manifest": "the files say what is in them",
}


class Flushed(msgspec.Struct, kw_only=True):
    success: bool = True
    message: str
    num_tokens: Annotated[int, Meta(description="Of the cache that were dropped; what running requests use stays.")]


class Abort(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    rid: Annotated[str | list[str], Meta(description="Exactly the id of a request, or a list of them.")] | None = None
    abort_all: Annotated[bool, Meta(description="Abort all that are open.")] | None = None
    abort_message: IGNORED = None


class Aborted(msgspec.Struct, kw_only=True):
    success: bool = True
    num_requests: Annotated[int, Meta(description="That were open under these ids; an id that is not known is no error.")]


class Update(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model_path: Annotated[str, Meta(min_length=1, description="A .gguf file, or a directory, of the same model.")]
    abort_all_requests: Annotated[bool, Meta(description="Abort what is open; else it is answered with the old weights first.")] | None = (
        None
    )
    weight_version: Annotated[str, Meta(max_length=256, description="What answers call the new weights.")] | None = None
    load_format: Annotated[str, Meta(description='Only "auto": the files say what they are.')] | None = None
    flush_cache: Annotated[bool, Meta(description=f"Only true: {KEPT}.")] | None = None
    is_async: Any = None
    keep_pause: Any = None
    manifest: Any = None
    torch_empty_cache: IGNORED = None
    recapture_cuda_graph: IGNORED = None
    token_step: IGNORED = None


class Updated(msgspec.Struct, kw_only=True):
    success: bool
    message: str
    num_paused_requests: Annotated[int, Meta(description="That came meanwhile and waited for the new weights.")]


async def flush_cache(call: Call[None]) -> Response:
    count = await call.service.engine.flush_cache()
    return json_response(Flushed(message=f"Cache flushed: {count} tokens.", num_tokens=count))


async def abort_request(call: Call[Abort]) -> Response:
    body, engine = call.body, call.service.any_engine
    if not body.rid and not body.abort_all:
        raise InvalidRequest("rid", "is missing", hint='Send the id of a request, or {"abort_all": true}.')
    named = [body.rid] if isinstance(body.rid, str) else body.rid or []
    rids = [rid for rid in list(engine.router.prompts) if body.abort_all or rid in named]
    for rid in rids:
        await engine.abort(rid)
    return json_response(Aborted(num_requests=len(rids)))


async def update_weights(call: Call[Update]) -> Response:
    body, service = call.body, call.service
    refuse_foreign(body, REFUSED)
    if body.load_format not in (None, "auto"):
        raise InvalidRequest("load_format", f"got {shown(body.load_format)}, must be 'auto': the files say what they are")
    if body.flush_cache is False:
        raise InvalidRequest("flush_cache", f"got false, must be true: {KEPT}")
    if body.abort_all_requests:
        for rid in list(service.engine.router.prompts):
            await service.engine.abort(rid)
    # A client that leaves changes nothing: what the server answers with is known in any case.
    updating = asyncio.ensure_future(_update(service, body.model_path, body.weight_version))
    updating.add_done_callback(lambda task: task.cancelled() or task.exception())  # heard, whoever waits
    try:
        await asyncio.shield(updating)
    except EngineDead:
        raise
    except SidestreamError as error:
        message = f"{' '.join(str(error).split()).rstrip('.')}. The old weights stay."
        return json_response(Updated(success=False, message=message, num_paused_requests=0), 400)
    waited = len(service.any_engine.router.prompts)
    return json_response(Updated(success=True, message=f"Weights of {body.model_path} loaded.", num_paused_requests=waited))


async def _update(service: Service, path: str, version: str | None) -> None:
    count = await service.engine.update_weights(path)
    service.weights = Weights(path, version or str(count))


CONTROL = (
    Route("GET", "/flush_cache", flush_cache, "Drop cached prefixes", answer=Flushed, admin=True),
    Route("POST", "/flush_cache", flush_cache, "Drop cached prefixes", answer=Flushed, admin=True),
    Route("POST", "/abort_request", abort_request, "End requests by their ids", body=Abort, answer=Aborted, admin=True),
    Route(
        "POST",
        "/update_weights_from_disk",
        update_weights,
        "Replace the weights",
        body=Update,
        answer=Updated,
        admin=True,
        states={400: Updated},
    ),
)
