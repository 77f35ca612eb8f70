"""The table of routes."""

from __future__ import annotations

from sidestream.api.messages import MESSAGES
from sidestream.api.native import NATIVE
from sidestream.api.openapi import document_routes
from sidestream.api.operation import OPERATION
from sidestream.api.responses import RESPONSES
from sidestream.api.route import Route

API: tuple[Route, ...] = (*OPERATION, *NATIVE, *RESPONSES, *MESSAGES)
ROUTES: tuple[Route, ...] = (*API, *document_routes(API))
