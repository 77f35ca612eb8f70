"""instructor: JSON by a schema in the prompt, and by tools, where the server does them."""

from __future__ import annotations

import instructor
import openai
from checks import KEY, MODEL, URL, run
from openai import OpenAI
from pydantic import BaseModel


class Number(BaseModel):
    number: int


ASK = [{"role": "user", "content": 'Answer with this JSON and nothing else: {"number": 5}'}]


MODES = {instructor.Mode.JSON: "response_format", instructor.Mode.JSON_SCHEMA: "response_format", instructor.Mode.TOOLS: "tool"}
ASKED = {"model": MODEL, "messages": ASK, "response_model": Number, "max_retries": 2, "temperature": 0, "max_tokens": 60}


def check_modes() -> None:
    """What comes is an instance of the class, or the server refuses by name what the mode needs."""
    for mode, needs in MODES.items():
        client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0), mode=mode)
        try:
            made = client.chat.completions.create(**ASKED)
            assert isinstance(made.number, int)
            print(mode, "gives", made)
        except Exception as error:
            causes = [cause for cause in (error, error.__cause__, error.__context__) if isinstance(cause, openai.BadRequestError)]
            assert causes and needs in str(causes[0]), f"{mode}: {type(error).__name__}: {error}"
            print(mode, "is refused:", causes[0])


if __name__ == "__main__":
    run(globals())
