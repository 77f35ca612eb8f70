"""litellm: three of its providers, and what it makes of errors."""

from __future__ import annotations

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches one
from typing import Any

import litellm
from checks import KEY, MODEL, PROMPT, UNICODE, URL, equal, refused, run

litellm.suppress_debug_info = True
ASK = [{"role": "user", "content": PROMPT}]
AT = {"api_base": f"{URL}/v1", "api_key": KEY, "max_retries": 0, "timeout": 60}
GREEDY = {"temperature": 0, "max_tokens": 24, **AT}


def chat(provider: str, **fields: Any) -> Any:
    return litellm.completion(model=f"{provider}/{MODEL}", **{"messages": ASK, **GREEDY, **fields})


def check_providers() -> None:
    for provider in ("openai", "hosted_vllm", "text-completion-openai"):
        whole = chat(provider)
        text = whole.choices[0].message.content
        assert text and whole.usage.completion_tokens > 0, provider
        chunks = list(chat(provider, stream=True, stream_options={"include_usage": True}))
        equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), text)
        equal(next(chunk.usage for chunk in chunks if getattr(chunk, "usage", None)).completion_tokens, whole.usage.completion_tokens)


def check_unicode() -> None:
    asked = {"messages": [{"role": "user", "content": f"Repeat after me: {UNICODE}"}]}
    whole = chat("openai", **asked).choices[0].message.content
    equal("".join(chunk.choices[0].delta.content or "" for chunk in chat("openai", stream=True, **asked)), whole)


def check_logprobs() -> None:
    answer = chat("openai", logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    equal(len(entries), answer.usage.completion_tokens)
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


def check_embedding() -> None:
    data = litellm.embedding(model=f"openai/{MODEL}", input=["The sea", "is blue."], encoding_format="float", **AT).data
    equal(len(data), 2)


def check_errors() -> None:
    for provider in ("openai", "hosted_vllm"):
        refused(lambda p=provider: chat(p, messages=[{"role": "user", "content": "word " * 9000}]), litellm.ContextWindowExceededError)
        refused(lambda p=provider: chat(p, api_key="wrong"), litellm.AuthenticationError)
        refused(lambda p=provider: chat(p, top_p=5), litellm.BadRequestError)
        refused(lambda p=provider: litellm.completion(model=f"{p}/no-such", messages=ASK, **GREEDY), litellm.NotFoundError)


if __name__ == "__main__":
    run(globals())
