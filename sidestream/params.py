"""What a request may ask for: how to sample, and which outputs it wants back. Every limit is declared here, once.

What can be checked without a model is checked when an object is made; `check` does the rest, before anything is queued.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from sidestream.errors import InvalidRequest
from sidestream.options import Option, checked, fields_of, shown

MAX_TEMPERATURE = 100.0
GREEDY_BELOW = 1e-5  # a lower temperature is 0: in float32 the division would overflow, and the best token wins anyway
MAX_PENALTY = 2.0  # presence and frequency, either sign
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 10.0
MAX_LOGIT_BIAS = 100.0  # either sign
MAX_TOP_K = 2**31 - 1
MAX_N = 128
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 1024
MAX_STOP_TOKEN_IDS = 128
MAX_STOP_REGEXES = 4
MAX_GRAMMAR_BYTES = 256 * 1024
MAX_CHOICES = 10_000
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
MAX_TOP_LOGPROBS = 100
MAX_TOKEN_IDS_LOGPROB = 1024
MAX_HIDDEN_LAYERS = 1024

GRAMMARS = ("json_schema", "regex", "ebnf", "choice", "structural_tag")  # fields of SamplingParams that say what the text may be

HiddenStatesMode = bool | Literal["last"]


def _normalise(params: object) -> None:
    """Check every field of a frozen dataclass against its declaration and store the normal form."""
    for declared in fields_of(type(params)):
        try:
            value = checked(declared, getattr(params, declared.name))
        except ValueError as error:
            raise InvalidRequest(declared.name, str(error)) from None
        object.__setattr__(params, declared.name, value)


class _Declared:
    """Refuses a field that does not exist by its name, where the generated `__init__` would raise a TypeError."""

    def __new__(cls, *_: Any, **values: Any) -> Any:
        known = [declared.name for declared in fields_of(cls)]
        for name in values:
            if name not in known:
                raise InvalidRequest(name, f"got {shown(values[name])}, but {cls.__name__} has no such field", hint=_hint(name, cls))
        return super().__new__(cls)


def _hint(name: str, asked: type) -> str | None:
    """The nearest field there is, and where it goes if not where it was `asked` for."""
    homes = {declared.name: home for home in (SamplingParams, OutputParams) for declared in fields_of(home)}
    near = next(iter(get_close_matches(name, homes, n=1)), None)
    if near is None:
        return None
    if homes[near] is asked:
        return f"Did you mean {near}?"
    return f"It goes into SamplingParams({near}=...)." if homes[near] is SamplingParams else f"It is a keyword of generate({near}=...)."


def _check_ids(param: str, ids: Collection[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(param, f"got token id {token}, must be between 0 and {vocab_size - 1} (the vocabulary)")


@dataclass(frozen=True, kw_only=True)
class SamplingParams(_Declared):
    """How the tokens of one request are chosen, and when it ends.

    Lists are stored as tuples, `logit_bias` as a dict. Raises InvalidRequest, naming the field, the value and the limit.
    """

    max_new_tokens: Annotated[
        int,
        Option("Most tokens to produce; the context length bounds it too. 0 samples nothing.", low=0, aliases=("--max-tokens",)),
    ] = 128
    min_new_tokens: Annotated[
        int,
        Option("Tokens to produce before EOS, stop ids and stop strings may end the request.", low=0, aliases=("--min-tokens",)),
    ] = 0
    temperature: Annotated[
        float, Option("Randomness; 0 (or less than 1e-05) always takes the best token.", low=0.0, high=MAX_TEMPERATURE)
    ] = 1.0
    top_k: Annotated[int, Option("Sample among the best K tokens only; -1 or 0 for all.", low=-1, high=MAX_TOP_K)] = -1
    top_p: Annotated[
        float,
        Option("Sample among the best tokens whose probabilities reach P together.", low=0.0, above_low=True, high=1.0),
    ] = 1.0
    min_p: Annotated[float, Option("Leave out tokens less probable than this share of the best one's probability.", low=0.0, high=1.0)] = (
        0.0
    )
    frequency_penalty: Annotated[
        float,
        Option("Lower a token's logit by this for each time it was produced.", low=-MAX_PENALTY, high=MAX_PENALTY),
    ] = 0.0
    presence_penalty: Annotated[
        float, Option("Lower a token's logit by this once it was produced.", low=-MAX_PENALTY, high=MAX_PENALTY)
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Option(
            "Divide (or multiply, if negative) the logit of tokens in prompt or output by this; 1 for off.",
            low=MIN_REPETITION_PENALTY,
            high=MAX_REPETITION_PENALTY,
        ),
    ] = 1.0
    stop: Annotated[
        Sequence[str], Option("End when this text appears; the text is cut before it. May be repeated.", max_items=MAX_STOPS)
    ] = ()
    stop_regex: Annotated[
        Sequence[str],
        Option("End when a text that this regular expression matches appears; the text is cut before it.", max_items=MAX_STOP_REGEXES),
    ] = ()
    stop_token_ids: Annotated[Sequence[int], Option("End when one of these tokens is produced.", low=0, max_items=MAX_STOP_TOKEN_IDS)] = ()
    ignore_eos: Annotated[bool, Option("Let the model's end-of-sequence tokens pass as ordinary tokens.")] = False
    logit_bias: Annotated[
        Mapping[int, float],
        Option("Added to the logits of these token ids.", low=-MAX_LOGIT_BIAS, high=MAX_LOGIT_BIAS),
    ] = field(default_factory=dict)
    allowed_token_ids: Annotated[Sequence[int] | None, Option("Only these tokens may be produced.", low=0)] = None
    bad_token_ids: Annotated[Sequence[int], Option("These tokens are never produced.", low=0)] = ()
    json_schema: Annotated[
        str | Mapping[str, Any] | None,
        Option("The text is JSON that this JSON Schema admits (draft 2020-12); {} admits all JSON."),
    ] = None
    regex: Annotated[str | None, Option("The whole text matches this regular expression (Rust's syntax).")] = None
    ebnf: Annotated[str | None, Option("The text is what this grammar produces: GBNF (root ::= ...) or Lark (start: ...).")] = None
    choice: Annotated[Sequence[str] | None, Option("The text is one of these.", max_items=MAX_CHOICES)] = None
    structural_tag: Annotated[
        str | Mapping[str, Any] | None,
        Option("Free text in which what stands between a tag's begin and its end is JSON that the tag's schema admits."),
    ] = None
    require_reasoning: Annotated[bool, Option("The grammar begins after the model's reasoning has ended.")] = False
    max_thinking_tokens: Annotated[int | None, Option("End the model's reasoning after that many tokens of it.", low=0)] = None
    n: Annotated[int, Option("Outputs for the prompt, each with randomness of its own.", low=1, high=MAX_N)] = 1
    seed: Annotated[int | None, Option("The same seed gives the same tokens; without one they differ.", low=MIN_SEED, high=MAX_SEED)] = None
    skip_special_tokens: Annotated[
        bool, Option("Leave special tokens such as EOS out of the text.", off_help="Keep special tokens such as EOS in the text.")
    ] = True

    def __post_init__(self) -> None:
        _normalise(self)
        for name in (
            "stop",
            "stop_regex",
            "stop_token_ids",
            "allowed_token_ids",
            "bad_token_ids",
            "choice",
        ):  # sets: a repetition says nothing new
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        if self.temperature < GREEDY_BELOW:
            object.__setattr__(self, "temperature", 0.0)
        if self.top_k == 0:
            object.__setattr__(self, "top_k", -1)
        if self.min_new_tokens > self.max_new_tokens:
            limit = f"at most max_new_tokens, {self.max_new_tokens}"
            raise InvalidRequest("min_new_tokens", f"got {self.min_new_tokens}, must be {limit}")
        for text in self.stop:
            if len(text) > MAX_STOP_CHARACTERS:
                limit = f"at most {MAX_STOP_CHARACTERS} characters"
                raise InvalidRequest("stop", f"got a text of {len(text)} characters, must be {limit}")
        self._check_grammar()
        for token in self.logit_bias:
            if token < 0:
                raise InvalidRequest("logit_bias", f"got token id {token}, must be 0 or more")
        if self.allowed_token_ids is not None:
            self._check_some_token_is_left(set(self.allowed_token_ids), ())

    @property
    def grammar(self) -> str | None:
        """The field that says what the text may be, if one does."""
        return next((name for name in GRAMMARS if getattr(self, name)), None)

    @property
    def constrains(self) -> bool:
        """Whether anything but masks of single tokens says what the text may be."""
        return self.grammar is not None or self.max_thinking_tokens is not None

    def _check_grammar(self) -> None:
        """At most one, of a size that is compiled soon. What it says is checked by `text.grammar`. Raises InvalidRequest."""
        if self.choice == ():
            raise InvalidRequest("choice", "got an empty list, must have at least one text")
        given = [name for name in GRAMMARS if getattr(self, name)]
        if len(given) > 1:
            raise InvalidRequest(given[1], f"got one beside {given[0]}, must be at most one of {', '.join(GRAMMARS)}")
        for name in given:
            value = getattr(self, name)
            size = sum(len(text.encode(errors="surrogatepass")) for text in ((value,) if isinstance(value, str) else value))
            if size > MAX_GRAMMAR_BYTES:
                raise InvalidRequest(name, f"got {size} bytes, must be at most {MAX_GRAMMAR_BYTES}")
        for pattern in self.stop_regex:
            if len(pattern) > MAX_STOP_CHARACTERS:
                raise InvalidRequest(
                    "stop_regex", f"got one of {len(pattern)} characters, must be at most {MAX_STOP_CHARACTERS} characters"
                )
        if self.require_reasoning and not given:
            raise InvalidRequest("require_reasoning", f"got true, must be left out without a grammar ({', '.join(GRAMMARS)})")

    def check(self, *, vocab_size: int, eos_token_ids: Collection[int] = ()) -> None:
        """Check what needs the model. Raises InvalidRequest."""
        for name in ("stop_token_ids", "logit_bias", "bad_token_ids"):
            _check_ids(name, getattr(self, name), vocab_size)
        _check_ids("allowed_token_ids", self.allowed_token_ids or (), vocab_size)
        ends = () if self.ignore_eos else eos_token_ids
        if self.allowed_token_ids is not None:
            self._check_some_token_is_left(set(self.allowed_token_ids), ends)
        elif len(self.bad_token_ids) + len(self.stop_token_ids) + len(ends) >= vocab_size:
            self._check_some_token_is_left(set(range(vocab_size)), ends)

    def _check_some_token_is_left(self, allowed: set[int], eos_token_ids: Collection[int]) -> None:
        """Masking every token would leave nothing to sample; min_new_tokens masks those that end the request."""
        param = "bad_token_ids" if self.allowed_token_ids is None else "allowed_token_ids"
        left = allowed.difference(self.bad_token_ids)
        if not left:
            got = f"got {len(allowed)} tokens of which bad_token_ids leaves none" if allowed else "got an empty list"
            raise InvalidRequest(param, f"{got}, must leave at least one token that may be produced")
        if self.min_new_tokens and not left.difference(self.stop_token_ids, eos_token_ids):
            raise InvalidRequest(param, "got only tokens that end the request, must leave another one while min_new_tokens is above 0")


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """What one request wants back besides its tokens, with every number absolute."""

    return_logprob: bool
    logprob_start: int | None  # first prompt position with an entry; None when there is none
    top_logprobs_num: int
    token_ids_logprob: tuple[int, ...]
    logprobs_mode: str  # "raw" or "processed"
    return_hidden_states: HiddenStatesMode
    hidden_start: int  # first absolute position wanted; may lie past the last row
    layers: tuple[int, ...]  # 0 (embeddings) to N (after the final norm), in the order asked; empty when none is wanted
    requested_layers: tuple[int, ...]  # the same as the caller numbered them
    hidden_states_dtype: str


@dataclass(frozen=True, kw_only=True)
class OutputParams(_Declared):
    """Which outputs one request wants back besides its text and tokens. Raises InvalidRequest."""

    return_logprob: Annotated[bool, Option("Return the logprob of each output token; implied by the logprob options below.")] = False
    logprob_start_len: Annotated[int, Option("First prompt position whose logprob is returned; -1 for none.", low=-1)] = -1
    top_logprobs_num: Annotated[int, Option("Alternatives returned for each position, best first.", low=0, high=MAX_TOP_LOGPROBS)] = 0
    token_ids_logprob: Annotated[
        Sequence[int] | None,
        Option("Return the logprobs of these ids at every position.", low=0, max_items=MAX_TOKEN_IDS_LOGPROB),
    ] = None
    logprobs_mode: Annotated[
        str,
        Option(
            "Logprobs of the model's own distribution, or of the one sampled from, after penalties, masks and filters.",
            choices=("raw", "processed"),
        ),
    ] = "raw"
    return_hidden_states: Annotated[HiddenStatesMode, Option('Return the hidden states of every position, or of the "last" only.')] = False
    hidden_states_start: Annotated[
        int, Option("First position whose hidden states are returned; negative counts from the prompt's end.")
    ] = 0
    hidden_states_layers: Annotated[
        Sequence[int],
        Option(
            "Layers returned: 0 is the embeddings, i follows block i, -1 is the last block and the final norm.",
            max_items=MAX_HIDDEN_LAYERS,
        ),
    ] = (-1,)
    hidden_states_dtype: Annotated[
        str,
        Option("Type of the returned hidden states.", choices=("model", "float32", "float16", "bfloat16")),
    ] = "model"

    def __post_init__(self) -> None:
        _normalise(self)
        ids = self.token_ids_logprob
        if ids is not None and len(set(ids)) < len(ids):
            twice = next(token for token in ids if ids.count(token) > 1)
            raise InvalidRequest("token_ids_logprob", f"got {twice} more than once, must be different ids")
        if not self.hidden_states_layers:
            raise InvalidRequest("hidden_states_layers", "got an empty list, must name at least one layer")
        if not self.return_hidden_states:
            self._check_nothing_about_hidden_states()
        if self.return_hidden_states == "last" and self.hidden_states_start != 0:
            got = f"got {self.hidden_states_start}"
            raise InvalidRequest("hidden_states_start", f'{got}, must be left out with return_hidden_states="last"')
        implied = self.logprob_start_len >= 0 or self.top_logprobs_num > 0 or bool(ids) or self.logprobs_mode != "raw"
        object.__setattr__(self, "return_logprob", self.return_logprob or implied)

    def _check_nothing_about_hidden_states(self) -> None:
        """Details of rows that are not returned would be ignored. Raises InvalidRequest."""
        for declared in fields_of(OutputParams):
            value = getattr(self, declared.name)
            if declared.name in HIDDEN_STATES_DETAILS and value != declared.default:
                got = shown(list(value) if isinstance(value, tuple) else value)
                message = f"got {got}, must be left out without return_hidden_states"
                raise InvalidRequest(declared.name, message, hint='Set return_hidden_states to True or "last".')

    def check(self, *, vocab_size: int, num_layers: int, prompt_len: int) -> OutputPlan:
        """Check what needs the model and the prompt, and make every number absolute. Raises InvalidRequest.

        `num_layers` is the number of blocks N; there are N+1 layers to ask for, as in Hugging Face's `output_hidden_states`.
        """
        _check_ids("token_ids_logprob", self.token_ids_logprob or (), vocab_size)
        if self.top_logprobs_num > vocab_size:
            limit = f"at most {vocab_size} (the vocabulary)"
            raise InvalidRequest("top_logprobs_num", f"got {self.top_logprobs_num}, must be {limit}")
        for layer in self.hidden_states_layers:
            if not -num_layers - 1 <= layer <= num_layers:
                limit = f"between {-num_layers - 1} and {num_layers} (the model has {num_layers} blocks)"
                raise InvalidRequest("hidden_states_layers", f"got {layer}, must be {limit}")
        if self.hidden_states_start < -prompt_len:
            limit = f"at least {-prompt_len} (the prompt has {prompt_len} tokens)"
            raise InvalidRequest("hidden_states_start", f"got {self.hidden_states_start}, must be {limit}")
        start = self.hidden_states_start
        wanted = tuple(self.hidden_states_layers) if self.return_hidden_states else ()
        return OutputPlan(
            return_logprob=self.return_logprob,
            logprob_start=self.logprob_start_len if 0 <= self.logprob_start_len < prompt_len else None,
            top_logprobs_num=self.top_logprobs_num,
            token_ids_logprob=tuple(self.token_ids_logprob or ()),
            logprobs_mode=self.logprobs_mode,
            return_hidden_states=self.return_hidden_states,
            hidden_start=start if start >= 0 else prompt_len + start,
            layers=tuple(layer if layer >= 0 else num_layers + 1 + layer for layer in wanted),
            requested_layers=wanted,
            hidden_states_dtype=self.hidden_states_dtype,
        )


LIST_VALUED = ("token_ids_logprob", "hidden_states_layers")  # one value of these is itself a list
HIDDEN_STATES_DETAILS = ("hidden_states_start", "hidden_states_layers", "hidden_states_dtype")


def per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """Spread a keyword over `count` prompts: one value goes to each, a list gives one to each.

    For a list-valued keyword, a list of lists (or None) is per prompt. Raises InvalidRequest when the list is of another length.
    """
    spread = isinstance(value, (list, tuple))
    if spread and name in LIST_VALUED:
        spread = any(item is None or isinstance(item, (list, tuple)) for item in value)
    if not spread:
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(name, f"got {len(value)} values for {count} prompts, must be one value or one per prompt")
    return list(value)


def outputs_per_prompt(keywords: Mapping[str, Any], count: int) -> list[OutputParams]:
    """The output parameters of each of `count` prompts, from the keywords of a call. Raises InvalidRequest.

    Details of hidden states are for the prompts that return them; in a call where none does they are refused.
    """
    known = [declared.name for declared in fields_of(OutputParams)]
    for name in keywords:
        if name not in known:
            raise InvalidRequest(name, f"got {shown(keywords[name])}, but no such keyword exists", hint=_hint(name, OutputParams))
    spread = {name: per_prompt(name, value, count) for name, value in keywords.items()}
    asking = [bool(mode) for mode in spread.get("return_hidden_states", ())]

    def values_of(index: int) -> dict[str, Any]:
        unwanted = HIDDEN_STATES_DETAILS if any(asking) and not asking[index] else ()
        return {name: values[index] for name, values in spread.items() if name not in unwanted}

    return [OutputParams(**values_of(index)) for index in range(count)]
