"""The table of routes."""

from __future__ import annotations

from sidestream.api.openapi import document_routes
from sidestream.api.operation import OPERATION
from sidestream.api.route import Route

API: tuple[Route, ...] = (*OPERATION,)
ROUTES: tuple[Route, ...] = (*API, *document_routes(API))
