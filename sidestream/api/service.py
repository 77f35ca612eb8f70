"""One server: its engine, its configuration, and what state it is in."""

from __future__ import annotations

import logging
import time
from functools import cached_property
from typing import Literal, NamedTuple, cast

from sidestream.api.auth import Keys
from sidestream.api.refusals import Unavailable, UnknownModel
from sidestream.async_client import AsyncEngine
from sidestream.config import ServeConfig
from sidestream.observe.metrics import Metrics
from sidestream.observe.tracing import Tracing
from sidestream.text.tools.format import ToolFormat, format_of

log = logging.getLogger("sidestream")

State = Literal["loading", "ok", "draining", "stalled", "failed"]
STALL_SECONDS = 30.0  # without a word of an engine that has work: the longest step is a chunk of prefill


class Weights(NamedTuple):
    """What the model's numbers are: they may be replaced while the server runs."""

    path: str
    version: str


class Service:
    """What the routes share. The engine comes when it has loaded."""

    def __init__(self, config: ServeConfig, engine: AsyncEngine, metrics: Metrics, tracing: Tracing) -> None:
        self.config = config
        self.metrics = metrics
        self.tracing = tracing
        self.keys = Keys(config.api_key, config.admin_api_key)
        self.started = time.time()
        self.loaded = False
        self.draining = False
        self.failure: str | None = None
        self.answering = 0  # requests that were read and whose answer was not sent to its end
        self.weights = Weights(engine.config.model, "default")
        self._engine = engine
        self._hints: set[str] = set()

    @property
    def engine(self) -> AsyncEngine:
        """The engine, for a request that is to be answered now. Raises Unavailable."""
        state, reason = self.state()
        if state in ("loading", "draining", "failed"):
            raise Unavailable(reason, code=state)
        return self._engine

    @property
    def any_engine(self) -> AsyncEngine:
        """The engine also while the server drains, for those who look. Raises Unavailable before it has loaded."""
        if not self.loaded:
            raise Unavailable("the model is loading", code="loading")
        return self._engine

    def state(self) -> tuple[State, str]:
        """The state and its reason, in words."""
        if self.failure is not None:
            return "failed", self.failure
        if self.draining:
            return "draining", "the server is shutting down"
        if not self.loaded:
            return "loading", "the model is loading"
        if self._engine.router.failure is not None:
            return "failed", str(self._engine.router.failure)
        silent = self.silent_seconds
        if self.open_requests and silent > STALL_SECONDS:
            return "stalled", f"{self.open_requests} requests are open and the engine has said nothing for {silent:.0f} s"
        return "ok", "ready"

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes calls of tools: as its chat template teaches, or as the operator says. None where that is not known."""
        return format_of(self.any_engine.frontend.chat_template.source, self.config.tool_call_parser)

    @property
    def open_requests(self) -> int:
        return len(self._engine.router.prompts) if self.loaded else 0

    @property
    def unanswered(self) -> int:
        """Requests that the server owes an answer, or the rest of one."""
        return max(self.open_requests, self.answering)

    @property
    def silent_seconds(self) -> float:
        """Since the engine said something last, or was asked something while it had no work."""
        return time.monotonic() - max(self._engine.heard, self._engine.router.busy_since) if self.loaded else 0.0

    @property
    def model_names(self) -> tuple[str, ...]:
        """What a request may call the model; the first is what answers say."""
        facts = self.any_engine.facts
        served = self.config.served_model_name
        return tuple(dict.fromkeys((served, facts.model, facts.name) if served else (facts.model, facts.name)))

    def check_model(self, name: str | None) -> str:
        """The name that the answer carries. Raises UnknownModel for one that is not here; none given is this one."""
        names = self.model_names
        if name is None or name in names or name in ("", "default"):
            return name if name in names else names[0]
        raise UnknownModel(f"the model {name!r} does not exist", hint=f"This server has {names[0]!r}.")

    def hint(self, text: str) -> None:
        """Log what may surprise a client's author, once."""
        if text not in self._hints:
            self._hints.add(text)
            log.info("%s", text)


def report_of(engine: AsyncEngine) -> dict[str, object]:
    """The engine's latest counters."""
    report = engine.router.report
    return {} if report is None else cast("dict[str, object]", report.stats)
