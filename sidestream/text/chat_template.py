"""Chat messages to a prompt, with the template that comes with the model: Jinja, set up as transformers sets it up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from sidestream.errors import InvalidRequest, ModelError

# Put behind the last message's text to find where it ended. The space at its end tells whether the template strips messages.
CONTINUE_MARK = "\x02continue\x03 "
PARTS_MARK = "\x02parts\x03"


class ChatTemplate:
    """A chat template, compiled once; `render` may be called from several threads.

    `source` is None for a model that has none. `extra` are variables that every render sees, like `unk_token`.
    """

    def __init__(
        self,
        source: str | None,
        *,
        bos_token: str,
        eos_token: str,
        model: str = "the model",
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.source = source
        self._model = model
        self._variables = {"bos_token": bos_token, "eos_token": eos_token, **(extra or {})}
        self._template: jinja2.Template | None = None
        self.variables: frozenset[str] = frozenset()  # that the template looks at
        if source is not None:
            environment = _environment()
            try:
                self._template = environment.from_string(source)
                self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
            except jinja2.TemplateSyntaxError as error:
                raise ModelError(
                    f"The chat template of {model} does not parse, line {error.lineno}: {error.message}",
                    hint="Send a prompt instead of messages, or repair the template in the model's files.",
                ) from error
        self._takes_parts = self._template is not None and self._renders_parts()

    @property
    def takes_tools(self) -> bool:
        """Whether the template tells the model of tools."""
        return "tools" in self.variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt. Raises `InvalidRequest` if messages are malformed or the template refuses them, or if there is no template.

        With `continue_final_message` the prompt ends where the last message's text ends, so that the model writes on.
        """
        if self._template is None:
            hint = "Send a prompt instead: generate(...) in Python, no --chat on the command line."
            raise InvalidRequest("messages", f"{self._model} has no chat template", hint=hint)
        chat = self._checked(messages)
        if continue_final_message:
            if add_generation_prompt:
                message = "cannot go together with add_generation_prompt: one continues a message, the other begins one"
                raise InvalidRequest("continue_final_message", message)
            _mark_end(chat[-1])
        variables = {key: _plain(value, key) for key, value in kwargs.items()}
        tool_list = None if tools is None else _plain(list(tools), "tools")
        text = self._render(chat, tools=tool_list, add_generation_prompt=add_generation_prompt, **variables)
        return _cut_at_mark(text) if continue_final_message else text

    def _render(self, chat: list[dict[str, Any]], /, **variables: Any) -> str:
        assert self._template is not None
        try:
            return self._template.render({**self._variables, "documents": None, **variables, "messages": chat})
        except Exception as error:  # the template is the model's own program, and may fail in any way
            reason = getattr(error, "message", None) or str(error) or type(error).__name__
            raise InvalidRequest("messages", f"the chat template of {self._model} refuses them: {reason}") from error

    def _renders_parts(self) -> bool:
        """Whether the template reads content that is a list of parts: asked by trying, others fail or print the list."""
        parts = [{"type": "text", "text": PARTS_MARK}]
        try:
            text = self._render([{"role": "user", "content": parts}], tools=None, add_generation_prompt=False)
        except InvalidRequest:
            return False
        return PARTS_MARK in text and "'type'" not in text

    def _checked(self, messages: Any) -> list[dict[str, Any]]:
        """A plain copy of the messages, in the form that templates expect."""
        if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
            raise InvalidRequest("messages", f"must be a list of messages, got {type(messages).__name__}")
        if not messages:
            raise InvalidRequest("messages", "must have at least one message")
        return [self._checked_message(message, f"messages[{index}]") for index, message in enumerate(messages)]

    def _checked_message(self, message: Any, where: str) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise InvalidRequest(where, f"must be an object with role and content, got {type(message).__name__}")
        plain: dict[str, Any] = _plain(message, where)
        if not isinstance(plain.get("role"), str) or not plain["role"]:
            raise InvalidRequest(f"{where}.role", f"must be a text such as 'user', got {plain.get('role')!r}")
        if "content" not in plain and "tool_calls" not in plain:
            raise InvalidRequest(f"{where}.content", "is missing")
        content = plain.setdefault("content", None)
        if isinstance(content, list):
            texts = [_part_text(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
            if self._takes_parts:
                plain["content"] = [{"type": "text", "text": text} for text in texts]
            else:
                plain["content"] = "\n".join(texts)
        elif content is None and "tool_calls" not in plain:
            raise InvalidRequest(f"{where}.content", "must be a text, got null")
        elif content is not None and not isinstance(content, str):
            raise InvalidRequest(f"{where}.content", f"must be a text or a list of parts, got {type(content).__name__}")
        _parse_arguments(plain.get("tool_calls"))
        return plain


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise InvalidRequest(where, f"must be a part of type 'text', got {kind!r}")
    return str(part["text"])


def _parse_arguments(tool_calls: Any) -> None:
    """OpenAI's clients send the arguments of a past call as a JSON text; templates expect the object."""
    for call in tool_calls if isinstance(tool_calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            with suppress(ValueError):  # what the model wrote was no JSON: the template shows it as it was
                function["arguments"] = json.loads(function["arguments"])


def _plain(value: Any, where: str) -> Any:
    """A copy of JSON values. Templates are untrusted programs: they get no object with methods of its own."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each, f"{where}.{key}") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, f"{where}[{index}]") for index, each in enumerate(value)]
    raise InvalidRequest(where, f"must be a JSON value, got {type(value).__name__}")


def _mark_end(message: dict[str, Any]) -> None:
    content = message["content"]
    if isinstance(content, list) and content:
        content[-1]["text"] += CONTINUE_MARK
    elif isinstance(content, str):
        message["content"] = content + CONTINUE_MARK
    else:
        raise InvalidRequest("continue_final_message", "the last message has no text to continue")


def _cut_at_mark(text: str) -> str:
    before, mark, after = text.rpartition(CONTINUE_MARK.strip())
    if not mark:
        raise InvalidRequest("continue_final_message", "the chat template leaves out the end of the last message")
    return before if after.startswith(" ") else before.rstrip()


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it only has to be read."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads the class attribute)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """`namespace()` without underscore names, which lead to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML and sorts keys, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace)
    return environment
