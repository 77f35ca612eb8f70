"""The table of routes."""

from __future__ import annotations

from sidestream.api.control import CONTROL
from sidestream.api.embeddings import EMBEDDINGS
from sidestream.api.info import INFO
from sidestream.api.messages import MESSAGES
from sidestream.api.native import NATIVE
from sidestream.api.openapi import document_routes
from sidestream.api.operation import OPERATION
from sidestream.api.responses import RESPONSES
from sidestream.api.route import Route
from sidestream.api.score import SCORE
from sidestream.api.tokenize import TOKENIZE

API: tuple[Route, ...] = (*OPERATION, *NATIVE, *RESPONSES, *MESSAGES, *EMBEDDINGS, *SCORE, *TOKENIZE, *INFO, *CONTROL)
ROUTES: tuple[Route, ...] = (*API, *document_routes(API))
