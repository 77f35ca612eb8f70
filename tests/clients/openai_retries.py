"""openai, the Python client, against a server that still loads, and then has room for one request and a queue of one."""

from __future__ import annotations

import asyncio

import openai
from checks import KEY, MODEL, PROMPT, URL, equal, run
from openai import AsyncOpenAI, OpenAI

GREEDY = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}


def check_503_while_the_model_loads() -> None:
    try:
        OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0).completions.create(**GREEDY)
    except openai.InternalServerError as error:
        equal((error.status_code, error.code, error.type), (503, "loading", "server_error"))
        assert float(error.response.headers["retry-after"]) > 0
    else:
        print("it was loaded at once")
    waiting = OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=60)
    equal(waiting.completions.create(**GREEDY).usage.completion_tokens, 24)


def check_429_of_a_full_queue() -> None:
    async def all_at_once(max_retries: int) -> list[object]:
        async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=max_retries) as client:
            return await asyncio.gather(*(client.completions.create(**GREEDY) for _ in range(8)), return_exceptions=True)

    answers = asyncio.run(all_at_once(0))
    refused = [answer for answer in answers if isinstance(answer, Exception)]
    assert 0 < len(refused) < 8, answers
    for error in refused:
        assert type(error) is openai.RateLimitError, error
        equal((error.code, error.type), ("queue_full", "rate_limit_error"))
        assert float(error.response.headers["retry-after"]) > 0
    texts = {answer.choices[0].text for answer in asyncio.run(all_at_once(60))}
    equal(len(texts), 1)


if __name__ == "__main__":
    run(globals())
