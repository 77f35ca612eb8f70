"""langchain-openai: chat, streams, logprobs, embeddings."""

from __future__ import annotations

import openai
from checks import KEY, MODEL, PROMPT, URL, equal, refused, run
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

AT = {"base_url": f"{URL}/v1", "api_key": KEY, "model": MODEL, "max_retries": 0}
GREEDY = {"temperature": 0, "max_tokens": 24, **AT}


def check_chat() -> None:
    answer = ChatOpenAI(**GREEDY).invoke(PROMPT)
    assert answer.content and answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    chunks = list(ChatOpenAI(stream_usage=True, **GREEDY).stream(PROMPT))
    equal("".join(chunk.content for chunk in chunks), answer.content)
    equal(sum((chunk.usage_metadata or {"output_tokens": 0})["output_tokens"] for chunk in chunks), answer.usage_metadata["output_tokens"])


def check_batch() -> None:
    answers = ChatOpenAI(**GREEDY).batch([PROMPT] * 4)
    equal(len({answer.content for answer in answers}), 1)


def check_logprobs() -> None:
    answer = ChatOpenAI(logprobs=True, top_logprobs=2, **GREEDY).invoke(PROMPT)
    equal(len(answer.response_metadata["logprobs"]["content"]), answer.usage_metadata["output_tokens"])


def check_completions() -> None:
    assert OpenAI(**GREEDY).invoke(PROMPT)


def check_responses() -> None:
    assert ChatOpenAI(use_responses_api=True, **GREEDY).invoke(PROMPT).text


def check_embeddings() -> None:
    vectors = OpenAIEmbeddings(check_embedding_ctx_length=False, **AT).embed_documents(["The sea", "is blue."])  # else tiktoken fetches
    equal((len(vectors), len(vectors[0]) > 100), (2, True))


def check_errors() -> None:
    refused(lambda: ChatOpenAI(**GREEDY | {"api_key": "wrong"}).invoke(PROMPT), openai.AuthenticationError, exactly=False)
    error = refused(lambda: ChatOpenAI(top_p=5, **GREEDY).invoke(PROMPT), openai.BadRequestError, exactly=False)
    equal(error.param, "top_p")


if __name__ == "__main__":
    run(globals())
