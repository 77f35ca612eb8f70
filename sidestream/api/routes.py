"""The table of routes."""

from __future__ import annotations

from sidestream.api.chat import CHAT
from sidestream.api.completions import COMPLETIONS
from sidestream.api.control import CONTROL
from sidestream.api.embeddings import EMBEDDINGS
from sidestream.api.info import INFO
from sidestream.api.messages import MESSAGES
from sidestream.api.models import MODELS
from sidestream.api.native import NATIVE
from sidestream.api.openapi import document_routes
from sidestream.api.operation import OPERATION
from sidestream.api.responses import RESPONSES
from sidestream.api.route import Route
from sidestream.api.score import SCORE
from sidestream.api.tokenize import TOKENIZE

OPENAI: tuple[Route, ...] = (*CHAT, *COMPLETIONS, *RESPONSES, *EMBEDDINGS, *SCORE, *MODELS)
API: tuple[Route, ...] = (*OPENAI, *MESSAGES, *NATIVE, *TOKENIZE, *INFO, *CONTROL, *OPERATION)
ROUTES: tuple[Route, ...] = (*API, *document_routes(API))
