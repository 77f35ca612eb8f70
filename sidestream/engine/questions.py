"""Questions to the engine, answered between two steps: what it counts, and what changes it as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sidestream.messages import Abort, Answer, Ask, Submit

if TYPE_CHECKING:
    from sidestream.engine.loop import EngineLoop


class Questions:
    """What was asked and not answered yet.

    A question for other weights waits for the requests before it, and those after it wait for the question: every request is computed
    with one set of weights.
    """

    def __init__(self) -> None:
        self._asked: list[Ask] = []
        self._held: list[Submit | Abort] = []  # what came after a question for other weights, in order

    def __bool__(self) -> bool:
        return bool(self._asked)

    def take(self, question: Ask) -> None:
        self._asked.append(question)

    def hold(self, message: Submit | Abort) -> bool:
        """Whether the message has to wait for a question; it comes back when that is answered."""
        if not any(question.what == "update_weights" for question in self._asked):
            return False
        self._held.append(message)
        return True

    def answer(self, loop: EngineLoop) -> list[Submit | Abort]:
        """Answer what can be answered now: nothing is in flight. Returns the messages that waited for it."""
        waiting = []
        for question in self._asked:
            if question.what == "update_weights" and loop.requests:
                waiting.append(question)
                continue
            try:
                answer = Answer(question.id, ANSWERS[question.what](loop, question.argument))
            except Exception as error:
                answer = Answer(question.id, None, error)
            loop.emit(answer)
        self._asked = waiting
        held: list[Submit | Abort] = []
        if not waiting:
            held, self._held = self._held, held
        return held


def stats(loop: EngineLoop) -> dict[str, Any]:
    """Counters since the start, and what is there now."""
    scheduler, page_size = loop.scheduler, loop.scheduler.pool.page_size
    return {
        "d2h": loop.copies.ledger.as_dict(),
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "kv_tokens_total": scheduler.pool.num_pages * page_size,
        "kv_tokens_free": scheduler.pool.free_pages * page_size,
        "kv_tokens_cached": scheduler.radix.cached_pages * page_size,
        "kv_tokens_evictable": scheduler.radix.evictable_pages * page_size,
        "page_size": page_size,
        "steps": scheduler.steps,
        "forward_tokens": scheduler.forward_tokens,
        "retracted": scheduler.retracted,
        **{name: loop.totals[name] for name in ("requests", "aborted", "prompt_tokens", "cached_tokens", "generation_tokens")},
        "step_seconds": dict(loop.seconds),
        "weight_version": loop.weight_version,
    }


def flush_cache(loop: EngineLoop) -> int:
    """Drop all cached prefixes that no running request uses. Returns the number of tokens dropped."""
    return loop.scheduler.radix.flush() * loop.scheduler.pool.page_size


def update_weights(loop: EngineLoop, path: str) -> int:
    """Load other weights of the same model; nothing of the old ones' cache is used again. Returns how often that was done.

    Raises ModelError, and the old weights stay.
    """
    loop.runner.load(loop.factories.load, path)
    flush_cache(loop)
    loop.weight_version += 1
    return loop.weight_version


def check(loop: EngineLoop) -> None:
    """Verify that every page is free, cached or owned, exactly once. Raises AssertionError."""
    loop.scheduler.check()


# Each by its name in `Ask`, with the loop and the question's argument.
ANSWERS: dict[str, Callable[[EngineLoop, Any], Any]] = {
    "stats": lambda loop, _: stats(loop),
    "flush_cache": lambda loop, _: flush_cache(loop),
    "check": lambda loop, _: check(loop),
    "update_weights": update_weights,
}
