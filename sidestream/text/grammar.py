"""Grammars: what the text of a request may be. llguidance compiles them, beside the engine, and its matchers are the `Constraint`s."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotDone
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from sidestream.errors import InvalidRequest
from sidestream.messages import Grammar
from sidestream.text.grammar_source import source_of
from sidestream.text.thinking import ThinkingBudget

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

    from sidestream.text.tokenizer import Tokenizer

Mask = npt.NDArray[np.uint32]
T = TypeVar("T")

MAX_SECONDS = 30.0  # for a grammar to be compiled, behind those that came before it
MAX_COMPILED = 256  # grammars kept
# llguidance's own limits are for grammars one trusts: its default fuel lets a hostile one take seconds to compile, and a step 20 ms.
LIMITS: dict[str, Any] = {"initial_lexer_fuel": 500_000, "step_lexer_fuel": 100_000, "step_max_items": 50_000, "max_lexer_states": 100_000}
MAX_EXPLANATION = 400  # characters of the compiler's, which quotes all of a pattern
EXPLANATIONS = (
    (r"^at \d+\(\d+\): invalid regex \".*?\" \(in regex\): (regex parse error: )?", "it is no regular expression: "),
    (r"lookarounds not supported yet; \w+ in regex", "look-around and word boundaries cannot be enforced"),
    (r"Current row has (\d+) items; max is (\d+).*", r"\1 ways to go on at one place, must be at most \2"),
    (r"Too many items \(limit (\d+).*", r"it has no end, or more than \1 ways to go on"),
    (r"too many states: (\d+).*", r"more than \1 states"),
    (r"Unimplemented keys: \[(.*)\]", r"\1 cannot be enforced"),
    (r"Unknown format: (.*)", r"format \1 cannot be enforced"),
    (r"oneOf constraints are not supported.*", "oneOf cannot be enforced where a value may obey two of its schemas"),
    (r"patternProperty regexes (.*) are not disjoint", r"patternProperties \1 cannot be enforced: a name may match both"),
    (r"Resource '(.*)' is not present.*", r"$ref or $schema '\1' leads out of the schema, and nothing is fetched"),
    (r"Pointer '(.*)' does not exist", r"$ref '#\1' leads nowhere"),
)


class Matcher(Protocol):
    """What the engine calls `Constraint`."""

    def fill_mask(self, mask: Mask) -> None: ...

    def advance(self, token_id: int) -> bool: ...


class LLConstraint:
    """llguidance's matcher of one request."""

    def __init__(self, matcher: LLMatcher, field: str) -> None:
        self.matcher = matcher
        self._field = field

    def fill_mask(self, mask: Mask) -> None:
        """mask: [ceil(vocabulary/32)]."""
        mask[:] = np.frombuffer(self.matcher.compute_bitmask(), np.uint32)[: len(mask)]
        self.check()

    def advance(self, token_id: int) -> bool:
        self.matcher.consume_token(token_id)
        self.check()
        return bool(self.matcher.is_stopped())

    def check(self) -> None:
        """Raises InvalidRequest where a step went beyond the limits on what one may cost."""
        if self.matcher.is_error():
            raise too_complex(self._field, self.matcher.get_error())


class Compiled:
    """A grammar that is ready. Each request gets a constraint of its own."""

    def __init__(self, grammar: Grammar, matcher: LLMatcher | None, tokenizer: Tokenizer) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._tokenizer = tokenizer

    def constraint(self) -> Matcher:
        inner = None if self._matcher is None else LLConstraint(self._matcher.deep_copy(), self._grammar.field)
        if self._grammar.budget is not None:
            return ThinkingBudget(self._grammar.budget, inner, self._tokenizer)
        assert inner is not None
        return inner


class GrammarCache(Generic[T]):
    """What was made of grammars, in a thread of its own, kept by content. Safe to use from several threads.

    `make` raises InvalidRequest for a grammar that is wrong, too large, or admits nothing. That is not kept: it may have been too slow
    because the machine was busy.
    """

    def __init__(self, make: Callable[[Grammar], T], close: Callable[[], None] = lambda: None) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: OrderedDict[Grammar, Future[T]] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None
        self.close = close

    def compile(self, grammar: Grammar) -> Future[T]:
        with self._lock:
            found = self._made.get(grammar)
            if found is None:
                self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="sidestream-grammar")
                found = self._made[grammar] = self._pool.submit(self._kept, grammar)
                while len(self._made) > MAX_COMPILED:
                    self._made.popitem(last=False)
            self._made.move_to_end(grammar)
            return found

    def _kept(self, grammar: Grammar) -> T:
        try:
            return self._make(grammar)
        except BaseException:
            with self._lock:
                self._made.pop(grammar, None)
            raise

    def check(self, grammar: Grammar) -> None:
        """Wait until it is made. Raises InvalidRequest."""
        try:
            self.compile(grammar).result(MAX_SECONDS)
        except NotDone:
            raise too_slow(grammar) from None


class Grammars(GrammarCache[Compiled]):
    """Compiles grammars, and fills the masks of the requests that have them.

    vocab_size: of the model, which may have more rows than the tokenizer has tokens. threads: that fill the masks of one step.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, *, threads: int = 1) -> None:
        super().__init__(self.compiled)
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._threads = threads
        self._ll_tokenizer: LLTokenizer | None = None
        self._executor: LLExecutor | None = None

    def constraint(self, grammar: Grammar) -> Future[Matcher]:
        """Of one request, as soon as the grammar is compiled."""
        made: Future[Matcher] = Future()

        def make(done: Future[Compiled]) -> None:
            try:
                made.set_result(done.result().constraint())
            except BaseException as error:
                made.set_exception(error)

        self.compile(grammar).add_done_callback(make)
        return made

    def fill_masks(self, constraints: Mapping[int, Matcher], masks: Mask) -> dict[int, Exception]:
        """Fill the rows of `masks` [rows, ceil(vocabulary/32)], in parallel and without the GIL; by row what went wrong."""
        failed: dict[int, Exception] = {}
        asked: dict[int, LLConstraint] = {}
        for row, constraint in constraints.items():
            matcher = constraint.asked() if isinstance(constraint, ThinkingBudget) else constraint
            if isinstance(matcher, LLConstraint) and len(constraints) > 1 and self._width == masks.shape[1]:
                asked[row] = matcher
                continue
            try:
                constraint.fill_mask(masks[row])
            except Exception as error:
                failed[row] = error
        if asked:
            width = 4 * masks.shape[1]
            matchers = [(each.matcher, row) for row, each in asked.items()]
            self._fill.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, width, len(masks))
            for row, each in asked.items():
                try:
                    each.check()
                except InvalidRequest as error:
                    failed[row] = error
        return failed

    @property
    def _width(self) -> int:
        """Words of llguidance's masks."""
        return -(-max(self._vocab_size, self._tokenizer.vocab_size) // 32)

    @property
    def _fill(self) -> LLExecutor:
        from llguidance import LLExecutor

        if self._executor is None:
            self._executor = LLExecutor(num_threads=self._threads)
        return self._executor

    def compiled(self, grammar: Grammar) -> Compiled:
        """Now, in this thread."""
        if grammar.source is None:
            return Compiled(grammar, None, self._tokenizer)
        try:
            source = source_of(grammar, self._tokenizer.special_tokens)
            source.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(grammar.field, "got one half of a surrogate pair, which is no character, must be Unicode") from None
        matcher = self._matcher(grammar, source)
        _try_it(grammar.field, matcher, self._ll(grammar))
        return Compiled(grammar, matcher, self._tokenizer)

    def _matcher(self, grammar: Grammar, source: str) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._ll(grammar), source, log_level=0, limits=_limits())
        if matcher.is_error():
            raise InvalidRequest(grammar.field, f"the grammar cannot be used: {explained(matcher.get_error())}")
        return matcher

    def _ll(self, grammar: Grammar) -> LLTokenizer:
        """The vocabulary as llguidance wants it: half a second and 40 MB, so not before the first grammar."""
        if self._ll_tokenizer is None:
            from llguidance import LLTokenizer

            tokenizer = self._tokenizer
            if tokenizer.decoding == "whole":
                raise InvalidRequest(grammar.field, "grammars need a tokenizer whose tokens are bytes, which this model's is not")
            try:
                self._ll_tokenizer = LLTokenizer(
                    tokenizer.backend.to_str(),
                    n_vocab=max(self._vocab_size, tokenizer.vocab_size),
                    eos_token=list(tokenizer.eos_token_ids),
                )
            except ValueError as error:
                raise InvalidRequest(grammar.field, f"grammars cannot be used with this model's tokenizer: {error}") from None
        return self._ll_tokenizer


def too_slow(grammar: Grammar) -> InvalidRequest:
    message = f"the grammar was not compiled within {MAX_SECONDS:g} s, must be sooner"
    return InvalidRequest(grammar.field, message, hint="Make it simpler.")


def too_complex(field: str, message: str) -> InvalidRequest:
    return InvalidRequest(field, f"the grammar is too complex: {explained(message)}")


def _try_it(field: str, matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
    """The first mask, and the one behind what every text begins with. Raises InvalidRequest."""
    mask, error = matcher.compute_bitmask(), matcher.get_error()
    if "NoExtension" in error or not (error or any(mask)):
        raise InvalidRequest(field, "the grammar admits no text at all, must admit one")
    if error:
        raise too_complex(field, error)
    ahead = matcher.deep_copy()
    tokens = tokenizer.tokenize_bytes(ahead.compute_ff_bytes())
    if ahead.consume_tokens(tokens[: ahead.validate_tokens(tokens)]) and not ahead.is_stopped():
        ahead.compute_bitmask()
    if ahead.is_error():
        raise too_complex(field, ahead.get_error())


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(**LIMITS, verbose_errors=False)


def explained(message: str) -> str:
    """What the compiler says, in one line and by the keyword that it is about."""
    lines = message.strip().splitlines() or ["it went beyond a limit"]
    reason = next((line for line in lines[1:] if line.startswith("error:")), "")  # of a regular expression, below a drawing of it
    first = lines[0] if len(lines[0]) <= MAX_EXPLANATION else f"{lines[0][:MAX_EXPLANATION]}..."
    text = f"{first} {reason}".strip()
    for pattern, words in EXPLANATIONS:
        text = re.sub(pattern, words, text)
    return text
