"""`GET /v1/models`: the one model that there is."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.responses import Response

from sidestream.api.route import Call, Route
from sidestream.api.service import Service
from sidestream.api.sse import json_response


class Model(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int  # when the server started, in seconds since the epoch
    owned_by: str = "sidestream"
    root: str  # the model as the server was told to load it
    parent: None = None
    max_model_len: int  # tokens of prompt and output together


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


def _described(service: Service, name: str) -> Model:
    facts = service.any_engine.facts
    return Model(id=name, created=int(service.started), root=facts.model, max_model_len=facts.context)


async def models(call: Call[None]) -> Response:
    """Also when the server is shutting down: it still has the model."""
    return json_response(ModelList(data=[_described(call.service, call.service.model_names[0])]))


async def model(call: Call[None]) -> Response:
    """Under any of its names. Raises ModelError."""
    service, name = call.service, call.request.path_params["id"]
    if not name:
        return await models(call)
    if f"/{name}" in service.model_names:  # a path; of slashes in a row one is left
        name = f"/{name}"
    return json_response(_described(service, service.check_model(name)))


MODELS = (
    Route("GET", "/v1/models", models, "The model that is served", answer=ModelList),
    Route("GET", "/v1/models/{id:path}", model, "One model", answer=Model),
)
