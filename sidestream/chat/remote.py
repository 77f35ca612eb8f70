"""A server that speaks OpenAI's chat completions: ours, or any other."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from sidestream.chat.conversation import Message
from sidestream.chat.talker import Part
from sidestream.errors import SidestreamError
from sidestream.options import did_you_mean

CONNECT_SECONDS, ANSWER_SECONDS = 20.0, 600.0  # until a list of models is there; between two pieces of an answer
MAX_ERROR_BYTES = 65536
LOOPBACK = ("localhost", "127.0.0.1", "::1")
# Sampling parameters that have another name there.
OPENAI_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


class RemoteError(SidestreamError):
    """A server cannot be reached, refuses a request, or breaks off an answer."""

    def __init__(self, message: str, *, hint: str | None = None, status: int = 502, code: str = "server_error") -> None:
        super().__init__(message, hint=hint)
        self.status, self.code = status, code


class ServerTalker:
    """Asks the server for its models when it is made. Raises RemoteError.

    `url` with or without /v1; `sampling` are fields of SamplingParams by name, those that were given.
    """

    more_context = "Only the server can be given a longer context."

    def __init__(self, url: str, *, key: str | None, model: str | None, sampling: Mapping[str, Any]) -> None:
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._opener = urllib.request.build_opener(_NoRedirects, *_no_proxy(url))
        self._fields = {OPENAI_NAMES.get(name, name): value for name, value in sampling.items()}
        self._base, names = self._models(url, model)
        self.model = _chosen(model, names)
        others = f", one of {len(names)} (--model takes another)" if model is None and len(names) > 1 else ""
        self.title = f"{self.model}{others} at {self._base}"

    def stream(self, messages: Sequence[Message]) -> Generator[Part, None, None]:
        body = {"model": self.model, "messages": list(messages), "stream": True, **self._fields}
        with self._open(f"{self._base}/chat/completions", ANSWER_SECONDS, body) as response:
            kind = response.headers.get_content_type()
            if kind != "text/event-stream":
                raise RemoteError(
                    f"{self._base} answers with {kind}, must be a stream of events", hint="Is it an OpenAI-compatible server?"
                )
            finished = False
            for event in _events(_lines(response, self._base)):
                for part in _parts(event):
                    finished = finished or part.finish_reason is not None
                    yield part
            if not finished:
                raise RemoteError(f"{self._base} ended the connection before the answer was complete")

    def _models(self, url: str, wanted: str | None) -> tuple[str, list[str]]:
        """Where the routes are, and the models there; some servers list none and have to be told."""
        failures: list[RemoteError] = []
        for base in _bases(url):
            try:
                with self._open(f"{base}/models", CONNECT_SECONDS) as response:
                    return base, [str(model["id"]) for model in json.loads(response.read())["data"]]
            except (ValueError, LookupError, TypeError):
                failures.append(RemoteError(f"{base}/models answers with no list of models", hint="Is it an OpenAI-compatible server?"))
            except RemoteError as error:
                failures.append(error)
            if failures[-1].status not in (404, 405, 502):
                raise failures[-1]
        if wanted is None or failures[0].status == 502:
            raise failures[0]
        return _bases(url)[0], []

    def _open(self, url: str, seconds: float, body: Mapping[str, Any] | None = None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(url, data, self._headers)
            response: http.client.HTTPResponse = self._opener.open(request, timeout=seconds)
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(url, error) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise RemoteError(
                f"{url} cannot be reached: {reason}", hint="Is the server running, and the address right?", status=503
            ) from None
        return response


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Another host is not sent the key, and a redirected POST would become a GET."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _no_proxy(url: str) -> list[urllib.request.BaseHandler]:
    """A server on this machine is not asked through a proxy."""
    return [urllib.request.ProxyHandler({})] if urlsplit(url).hostname in LOOPBACK else []


def _bases(url: str) -> list[str]:
    """Where the routes may be: below /v1, or below the path as it is."""
    plain = url.rstrip("/").removesuffix("/chat/completions").rstrip("/")
    if plain.endswith("/v1"):
        return [plain]
    return [f"{plain}/v1", *([plain] if urlsplit(plain).path else [])]


def _chosen(model: str | None, names: list[str]) -> str:
    if model is None and not names:
        raise RemoteError("the server has no model", hint="Name one with --model.")
    if model is not None and names and model not in names:
        hint = did_you_mean(model, names) or f"It has {', '.join(names[:8])}{' and others' if len(names) > 8 else ''}."
        raise RemoteError(f"the server has no model {model!r}", hint=hint, status=404, code="model_not_found")
    return model or names[0]


def _refusal(url: str, error: urllib.error.HTTPError) -> RemoteError:
    """What the body of an answer that is no success says."""
    body = error.read(MAX_ERROR_BYTES).decode("utf-8", "replace")
    message, code = _described(body)
    hint = None
    if error.code in (401, 403):
        hint = "Give the key with --api-key or SIDESTREAM_API_KEY."
    elif 300 <= error.code < 400:
        message, hint = f"it moved to {error.headers.get('Location')}", "Give that address."
    return RemoteError(f"{url} answers {error.code}: {message or error.reason}", hint=hint, status=error.code, code=code)


def _described(body: str) -> tuple[str, str]:
    """Message and code of an error: OpenAI nests them in `error`, others do not."""
    try:
        value = json.loads(body)
    except ValueError:
        return " ".join(body.split())[:200], "server_error"
    value = value.get("error", value) if isinstance(value, dict) else value
    if not isinstance(value, dict):
        return str(value)[:1000], "server_error"
    message = value.get("message") or value.get("detail") or json.dumps(value)[:1000]
    return str(message), str(value.get("code") or "server_error")


def _lines(response: http.client.HTTPResponse, base: str) -> Iterator[str]:
    try:
        for line in response:
            yield line.decode("utf-8", "replace").rstrip("\r\n")
    except (OSError, http.client.HTTPException) as error:
        raise RemoteError(f"{base} broke off the answer: {error or type(error).__name__}") from None


def _events(lines: Iterable[str]) -> Iterator[Any]:
    """The JSON values of server-sent events, up to [DONE]. Comments keep the connection alive and say nothing."""
    data: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            text, data = "\n".join(data), []
            if text == "[DONE]":
                return
            try:
                yield json.loads(text)
            except ValueError:
                raise RemoteError(f"the server sent an event that is not JSON: {text[:200]}") from None


def _parts(event: Any) -> Iterator[Part]:
    if not isinstance(event, dict):
        return
    if event.get("error"):
        message, code = _described(json.dumps(event))
        raise RemoteError(message, code=code)
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        yield Part(delta.get("content") or "", choice.get("finish_reason"), delta.get("reasoning_content") or delta.get("reasoning") or "")
