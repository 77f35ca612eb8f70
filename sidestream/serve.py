"""`sidestream serve`: bind the port, start the engine, answer until told to stop.

The port is bound before the model loads, so that a probe hears 503 and a reason. The first signal drains: no new requests, those that
are open are answered, at most `shutdown_timeout` long; the second aborts them.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import uvicorn

from sidestream.api.app import create_app
from sidestream.api.connection import LAST_WORDS_SECONDS, Connection
from sidestream.api.service import Service, report_of
from sidestream.async_client import AsyncEngine
from sidestream.config import EngineConfig, ServeConfig
from sidestream.errors import ConfigError, ModelError, SidestreamError
from sidestream.observe.logs import LogFormat, Ticker, log_to_stderr
from sidestream.observe.metrics import Metrics
from sidestream.observe.notify import Notifier
from sidestream.observe.series import Compat
from sidestream.observe.tracing import open_tracing

log = logging.getLogger("sidestream")

EXIT_FAILURE, EXIT_CONFIG = 1, 78
SIGNALS = (signal.SIGINT, signal.SIGTERM)
BACKLOG = 2048
VANISHED_SECONDS = 120  # without a sign of life of a client: its connection ends


def serve(engine_config: EngineConfig, config: ServeConfig) -> int:
    """Run a server until a signal or the engine's end. Returns the exit status; raises ConfigError before anything is started."""
    with log_to_stderr(engine_config.log_level, cast(LogFormat, config.log_format)):
        listener = bind(config)
        try:
            server = _Server(engine_config, config, listener)
            for number in SIGNALS:
                signal.signal(number, lambda *_: server.signalled())
            return asyncio.run(server.run())
        finally:
            for number in SIGNALS:  # the process ends
                signal.signal(number, signal.SIG_IGN)
            listener.close()
            if config.uds is not None:
                with suppress(FileNotFoundError):
                    os.unlink(config.uds)


def bind(config: ServeConfig) -> socket.socket:
    """The listening socket. Raises ConfigError if the address cannot be had."""
    try:
        if config.uds is not None:
            return _bind_path(config.uds)
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        return _noticing_who_vanishes(socket.create_server((config.host, config.port), family=family, backlog=BACKLOG))
    except OSError as error:
        where, field = (config.uds, "uds") if config.uds is not None else (f"{config.host}:{config.port}", "port")
        hint = "Another process may use it; --port 0 takes any free port." if field == "port" else None
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(f"{field}: {where} cannot be listened on: {reason}", hint=hint) from None


def _noticing_who_vanishes(listener: socket.socket) -> socket.socket:
    """Connections inherit what is set here: one ends whose client is gone, or takes nothing of what waits for it."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 30), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 1000 * VANISHED_SECONDS)):
        if hasattr(socket, name):  # not on every system
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return listener


def _bind_path(path: str) -> socket.socket:
    with suppress(FileNotFoundError):
        if _answers(path):
            raise OSError(errno.EADDRINUSE, "another process listens on it")
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(BACKLOG)
    return listener


def _answers(path: str) -> bool:
    """Whether somebody listens on the path; a socket that was left behind refuses."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
    return True


class _Uvicorn(uvicorn.Server):
    """Signals are ours: uvicorn would stop at once, and leave with the signal's status."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    def __init__(self, engine_config: EngineConfig, config: ServeConfig, listener: socket.socket) -> None:
        self._started = time.monotonic()
        self._config = config
        self._listener = listener
        self._engine = AsyncEngine(**_options(engine_config))
        self._engine.log_format = cast(LogFormat, config.log_format)
        metrics = Metrics(config.served_model_name or engine_config.model, compat=cast(Compat | None, config.metrics_compat))
        self._service = Service(config, self._engine, metrics, open_tracing(config.otlp_endpoint))
        self._notifier = Notifier()
        self._loop: asyncio.AbstractEventLoop | None = None  # once it runs
        self._told = 0  # signals
        self._stop = asyncio.Event()
        self._abort = asyncio.Event()

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._heed_signals()
        settings = uvicorn.Config(
            create_app(self._service),
            http=Connection,
            ws="none",
            log_config=None,
            log_level="error",  # its warnings are about clients
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=int(2 * LAST_WORDS_SECONDS),  # connections end by themselves before
        )
        server = _Uvicorn(settings)
        listening = asyncio.ensure_future(server.serve(sockets=[self._listener]))
        stopping = asyncio.ensure_future(self._stop.wait())
        status = 0
        try:
            loading = asyncio.ensure_future(self._load())
            await asyncio.wait((loading, stopping, listening), return_when=asyncio.FIRST_COMPLETED)
            if loading.done() and not stopping.done():
                status = loading.result()
            else:
                loading.cancel()
                await asyncio.wait((loading,))
            if status == 0 and not stopping.done():
                status = await self._answer(stopping)
        finally:
            self._service.draining = True
            self._notifier.stopping()
            await self._engine.close()
            server.should_exit = True
            await listening
            stopping.cancel()
            await asyncio.to_thread(self._service.tracing.close)
        return status

    def signalled(self) -> None:
        """A signal came, in the middle of whatever the main thread does."""
        self._told += 1
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._heed_signals)

    def _heed_signals(self) -> None:
        for event in (self._stop, self._abort)[: self._told]:
            event.set()

    async def _load(self) -> int:
        """Start the engine. The exit status if it cannot: the cause is the log's last line."""
        try:
            await self._engine.start()
            if self._config.chat_template is not None:
                self._engine.use_chat_template(Path(self._config.chat_template).read_text(encoding="utf-8"))
            self._engine.use_reasoning_parser(self._config.reasoning_parser)
        except asyncio.CancelledError:
            return 0
        except (ConfigError, ModelError) as error:
            log.error("cannot start: %s", _line(error))
            return EXIT_CONFIG
        except Exception as error:
            log.error("cannot start: %s", _line(error))
            return EXIT_FAILURE
        seconds = time.monotonic() - self._started
        self._service.loaded = True
        self._service.metrics.started({"total": seconds})
        log.info("ready   %s   OpenAI /v1 · docs /docs · metrics /metrics   (%.1f s)", self._address(), seconds)
        self._notifier.ready(self._address())
        return 0

    async def _answer(self, stopping: asyncio.Future[Any]) -> int:
        """Until a signal, and then until what is open is answered; or until the engine fails."""
        ended = asyncio.ensure_future(self._engine.wait())
        ticking = asyncio.ensure_future(self._tick())
        try:
            await asyncio.wait((ended, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                self._service.draining = True
                self._notifier.stopping()
                await self._drain(ended)
            if ended.done():
                failure = ended.result()
                self._service.failure = str(failure)
                log.error("the engine failed: %s", failure)
                return EXIT_FAILURE
        finally:
            ended.cancel()
            ticking.cancel()
        return 0

    async def _drain(self, ended: asyncio.Future[Any]) -> None:
        if left := self._service.unanswered:
            seconds = self._config.shutdown_timeout
            log.info("draining %d open requests, at most %g s; a second signal aborts them", left, seconds)
            answered = asyncio.ensure_future(self._until_answered())
            aborted = asyncio.ensure_future(self._abort.wait())
            await asyncio.wait((answered, aborted, ended), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            answered.cancel()
            aborted.cancel()
            if left := self._service.unanswered:
                log.warning("aborting %d open requests", left)

    async def _until_answered(self) -> None:
        while self._service.unanswered:
            await asyncio.sleep(0.02)

    async def _tick(self) -> None:
        """One line now and then while there is work."""
        ticker = Ticker()
        while True:
            await asyncio.sleep(1.0)
            report = report_of(self._engine)
            if report:
                ticker.observe(report)

    def _address(self) -> str:
        if self._config.uds is not None:
            return f"unix:{self._config.uds}"
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _options(config: EngineConfig) -> dict[str, Any]:
    return dict(vars(config))


def _line(error: BaseException) -> str:
    """A message in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, SidestreamError) else f"{type(error).__name__}: {text}"
