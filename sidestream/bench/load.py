"""What `sidestream bench serve` sends: its options, and the requests made from them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

from sidestream.bench.work import LAST_ID, prompts
from sidestream.errors import ConfigError
from sidestream.options import Option, checked, fields_of, shown

CONCURRENCY, NUM_PROMPTS = 32, 64
TOKEN_IDS = min(32_000, LAST_ID)  # ids below are ordinary tokens of nearly every model
SET_HERE = ("stream", "stream_options", "n", "prompt", "messages")  # in a body, and by no one else: the numbers rest on them
FILE_FIELDS = ("prompt", "messages", "max_tokens")

# Each is one token to the tokenizers of common models, with or without a space before it: so many words are so many tokens.
TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand part place case "
    "week company system program question work government number night point home water room mother area money story fact month lot "
    "right study book eye job word business issue side kind head house service friend father power hour game line end member law car "
    "city community name president team minute idea body information back parent face others level office door health person art war "
    "history party result change reason research girl moment air teacher force education foot boy age policy music market sense nation "
    "plan college interest death experience effect use class control field development role rate heart drug show leader light voice "
    "wife mind price report decision son view relationship town road arm difference value building action season tax director position "
    "player record paper space ground form event official matter center site project activity star table need court oil cost industry "
    "figure street image phone data picture practice piece land product doctor wall patient worker news test movie north love support "
    "technology step baby computer type attention film tree source organization hair look century evidence window culture brother "
    "energy period course summer plant river animal fish bird stone metal glass green blue black white small large early young local "
    "social public human common simple clear whole final main"
)
WORDS = TEXT.split()


@dataclass(frozen=True, kw_only=True)
class Load:
    """The options of one run. Raises ConfigError, naming the option, the value and the limit."""

    url: Annotated[str, Option("The server: any that has the OpenAI routes. /v1 may be left out.", metavar="URL")] = (
        "http://127.0.0.1:30000"
    )
    model: Annotated[str | None, Option("Its model. Default: the first of its /v1/models.", metavar="NAME")] = None
    endpoint: Annotated[str, Option("The route: /v1/chat/completions or /v1/completions.", choices=("chat", "completions"))] = "completions"
    num_prompts: Annotated[
        int | None, Option(f"Requests to send. Default: {NUM_PROMPTS}, or each line of the --prompts once.", low=1, high=1_000_000)
    ] = None
    concurrency: Annotated[
        int | None,
        Option(f"Requests under way at once: one is sent as another ends. Default: {CONCURRENCY}.", low=1, high=100_000),
    ] = None
    request_rate: Annotated[
        float | None,
        Option(
            "In place of --concurrency: requests per second, at random (Poisson) times, however many are under way.",
            low=0.0,
            above_low=True,
        ),
    ] = None
    input_len: Annotated[int, Option("Tokens of each prompt: random words of one token each.", low=1, high=10_000_000)] = 128
    output_len: Annotated[int, Option("Tokens to ask of each request (max_tokens).", low=1, high=10_000_000)] = 128
    shared_prefix: Annotated[int, Option("Of the tokens of the prompts, how many at the start are the same in all.", low=0)] = 0
    token_ids: Annotated[bool, Option("Send token ids in place of words: exact in number (completions only).")] = False
    prompts: Annotated[
        str | None,
        Option(
            "Prompts from a file: in each line a JSON text, or an object with prompt or messages, and max_tokens.", metavar="FILE.jsonl"
        ),
    ] = None
    ignore_eos: Annotated[bool, Option("Ask for answers that go on to --output-len (ignore_eos, a field of open servers).")] = False
    extra: Annotated[str | None, Option("More fields of each body, as a JSON object; null takes a field away.", metavar="JSON")] = None
    api_key: Annotated[str | None, Option("Sent as Authorization: Bearer.", metavar="KEY")] = None
    timeout: Annotated[float, Option("Seconds after which a request counts as failed.", low=0.0, above_low=True)] = 600.0
    seed: Annotated[int, Option("Of the prompts and of the times of --request-rate: the same seed sends the same.")] = 0

    def __post_init__(self) -> None:
        for declared in fields_of(Load):
            try:
                object.__setattr__(self, declared.name, checked(declared, getattr(self, declared.name)))
            except ValueError as error:
                raise ConfigError(f"{declared.flag}: {error}") from None
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname:
            raise ConfigError(f"--url: got {shown(self.url)}, must be a URL such as http://127.0.0.1:30000")
        if self.request_rate is not None and self.concurrency is not None:
            raise ConfigError(
                f"--request-rate: got {self.request_rate:g} and --concurrency {self.concurrency}, must be only one of them",
                hint="Either the end of a request starts the next, or the clock does.",
            )
        if self.token_ids and (self.endpoint == "chat" or self.prompts is not None):
            other = "--endpoint chat" if self.endpoint == "chat" else f"--prompts {self.prompts}"
            raise ConfigError(f"--token-ids: got {other} too, must be alone: random ids, for --endpoint completions")
        if self.shared_prefix > self.input_len:
            raise ConfigError(f"--shared-prefix: got {self.shared_prefix}, must be at most --input-len, {self.input_len}")
        self.extra_fields()

    @property
    def base(self) -> str:
        """The URL that ends in /v1."""
        url = self.url.rstrip("/")
        return url if url.endswith("/v1") else f"{url}/v1"

    @property
    def path(self) -> str:
        return "/chat/completions" if self.endpoint == "chat" else "/completions"

    def extra_fields(self) -> dict[str, Any]:
        """`extra`, read. Raises ConfigError."""
        import msgspec

        try:
            fields = msgspec.json.decode(self.extra or "{}")
        except msgspec.DecodeError as error:
            raise ConfigError(f"--extra: got {shown(self.extra)}, must be a JSON object ({error})") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"--extra: got {shown(self.extra)}, must be a JSON object")
        if refused := sorted(fields.keys() & set(SET_HERE)):
            raise ConfigError(f"--extra: got {refused[0]}, must be other fields: what is measured rests on this one")
        return fields

    def gaps(self) -> Iterator[float]:
        """Seconds between one request and the next, at a rate."""
        assert self.request_rate is not None
        clock = random.Random(f"gaps {self.seed}")
        while True:
            yield clock.expovariate(self.request_rate)


class Request(NamedTuple):
    """One body without what all have in common, and the tokens it asks for."""

    fields: dict[str, Any]
    max_tokens: int

    def body(self, load: Load, model: str, stream_options: dict[str, bool] | None) -> bytes:
        """JSON, made before the clock runs."""
        import msgspec

        body = {"model": model, **self.fields, "max_tokens": self.max_tokens, "temperature": 0, "stream": True}
        if load.ignore_eos:
            body["ignore_eos"] = True
        if stream_options is not None:
            body["stream_options"] = stream_options
        extra = load.extra_fields()
        return msgspec.json.encode({name: value for name, value in (body | extra).items() if value is not None})


def requests_of(load: Load) -> list[Request]:
    """What is sent, in order. Raises ConfigError where the file of prompts cannot be read."""
    if load.prompts is not None:
        lines = _read(load)
        return [lines[i % len(lines)] for i in range(load.num_prompts or len(lines))]
    return random_requests(load, load.seed, load.num_prompts or NUM_PROMPTS, load.output_len)


def random_requests(load: Load, seed: object, count: int, max_tokens: int) -> list[Request]:
    made = prompts(seed, count, load.input_len, shared=load.shared_prefix, vocab_size=TOKEN_IDS)
    return [Request(_asked(load, ids if load.token_ids else _text(ids)), max_tokens) for ids in made]


def _text(ids: Sequence[int]) -> str:
    return " ".join(WORDS[token % len(WORDS)] for token in ids)


def _asked(load: Load, prompt: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]} if load.endpoint == "chat" else {"prompt": prompt}


def _read(load: Load) -> list[Request]:
    assert load.prompts is not None
    try:
        lines = Path(load.prompts).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts: got {load.prompts}, which cannot be read: {error}") from None
    requests = [_line(load, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise ConfigError(f"--prompts: got {load.prompts}, must have a line for at least one prompt")
    return requests


def _line(load: Load, number: int, line: str) -> Request:
    import msgspec

    def refused(what: str) -> ConfigError:
        return ConfigError(f"--prompts: line {number} of {load.prompts}: got {shown(line)}, {what}")

    try:
        value = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise refused(f"must be JSON ({error})") from None
    fields = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(fields, dict) or ("prompt" in fields) == ("messages" in fields):
        raise refused("must be a text, or an object with either prompt or messages")
    if unknown := sorted(fields.keys() - set(FILE_FIELDS)):
        raise refused(f"must have no {unknown[0]}, only {', '.join(FILE_FIELDS)}; --extra adds fields to all")
    max_tokens = fields.pop("max_tokens", load.output_len)
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise refused("must have as max_tokens an integer of at least 1")
    if "messages" in fields and load.endpoint != "chat":
        raise refused("must have a prompt: messages need --endpoint chat")
    if load.endpoint == "chat" and "prompt" in fields:
        if not isinstance(fields["prompt"], str):
            raise refused("must have a text or messages: token ids need --endpoint completions")
        fields = _asked(load, fields["prompt"])
    return Request(fields, max_tokens)
