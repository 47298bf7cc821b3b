"""From chat messages to the text that a model was trained on: finds a model's Jinja template and renders it.

Used by `LLM.chat` and the server alike. Imports jinja2 only; token ids are made in prompts.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes

from octavo.errors import ConfigError, ModelError, RequestError
from octavo.template_sandbox import make_environment, render

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
# What a template is given by name: a request's chat_template_kwargs must not replace these.
RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "image_placeholder",
        "add_generation_prompt",
        "add_special_tokens",
        "continue_final_message",
        "chat_template",
        "tokenize",
        *SPECIAL_TOKENS,
    }
)

NO_TEMPLATE = (
    "this model has no chat template; start with --chat-template FILE (a Jinja template), "
    "or send text to /v1/completions"
)


class Arguments(dict[str, Any]):
    """A call's arguments: an object to templates that look into them, JSON text to those that write them."""

    __slots__ = ("_text",)

    def __init__(self, values: Mapping[str, Any], text: str | None = None) -> None:
        super().__init__(values)
        self._text = text

    @classmethod
    def of(cls, given: object) -> Arguments | None:
        """From the text or the object of a message; None when it is neither.

        Text that is no JSON object is what a model wrote that was cut or went wrong, which agents send back with the
        error: templates that look into it find it under one name.
        """
        if given is None or given == "":
            return cls({})
        if not isinstance(given, str):
            return cls(given) if isinstance(given, Mapping) else None
        try:
            values = json.loads(given)
        except (ValueError, RecursionError):
            values = None
        return cls(values if isinstance(values, Mapping) else {"arguments": given}, given)

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False) if self._text is None else self._text

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raise `RequestError` for a variable that a request may not give a template."""
    for name in kwargs:
        if name in RESERVED or name.startswith("__"):
            raise RequestError(f"chat_template_kwargs may not set {name[:80]!r}", param="chat_template_kwargs")


class ChatTemplate:
    """A model's chat template, compiled once; thread-safe.

    Attributes:
        source: The template's text; None when the model has none (`render` then raises `RequestError`).
        special_tokens: "bos_token", "eos_token", … to their strings, as tokenizer_config.json gives them.
    """

    def __init__(
        self, source: str | None, special_tokens: Mapping[str, str], *, tool_source: str | None = None
    ) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)
        self._template = _compile(source) if source is not None else None
        self._tool_template = _compile(tool_source) if tool_source is not None else self._template
        self.all_source = f"{source or ''}\n{tool_source or ''}"
        """The text of all templates, for those who ask what a model knows of."""
        self._takes_parts = source is not None and _iterates_content(source)
        self._knows_developer = source is not None and "developer" in source

    @classmethod
    def from_folder(cls, path: str | Path | None, override: str | None = None) -> ChatTemplate:
        """Read the template of a tokenizer folder.

        Args:
            path: Folder with tokenizer_config.json and perhaps chat_template.jinja (which wins); None: no tokenizer.
            override: A Jinja file, or template text, used instead.

        Raises:
            ConfigError: `override` names no file.
            ModelError: A file is broken; the message has the line.
        """
        config = _read_config(Path(path)) if path is not None else {}
        tokens = _special_tokens(config)
        if override is not None:
            return cls(_read_override(override), tokens)
        named = _named_templates(config)
        folder = Path(path) if path is not None else None
        if folder is not None and (folder / "chat_template.jinja").is_file():
            named["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        if folder is not None and (folder / "additional_chat_templates").is_dir():
            for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
                named.setdefault(file.stem, file.read_text(encoding="utf-8"))
        source = named.get("default") or next(iter(named.values()), None)
        return cls(source, tokens, tool_source=named.get("tool_use"))

    def reads(self, name: str) -> bool:
        """Whether a template names a variable; others change nothing."""
        return re.search(rf"\b{re.escape(name)}\b", self.all_source) is not None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        image_placeholder: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Text of the prompt.

        Args:
            messages: OpenAI chat messages; checked here.
            add_generation_prompt: End with the opening of the assistant's turn.
            continue_final_message: Leave the last message open, so that the model goes on writing it.
            tools: JSON schemas of functions that the model may call.
            documents: Texts that the answer may draw on, for templates that show such.
            image_placeholder: What stands for an image in the text; None: parts of type image are refused.
            kwargs: Further variables of the template (`enable_thinking=False`).

        Raises:
            RequestError: The messages are malformed, the template refuses them, or there is no template.
        """
        template = self._tool_template if tools else self._template
        if template is None:
            raise RequestError(NO_TEMPLATE, param="messages")
        check_template_kwargs(kwargs)
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        if documents and not self.reads("documents"):
            raise RequestError("documents: this model's chat template shows none", param="documents")
        prepared = self.prepare(messages, image_placeholder)
        variables = {
            **self.special_tokens,
            **kwargs,
            "messages": prepared,
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = render(template, variables)
        except TemplateError as error:
            raise RequestError(f"the chat template refused the messages: {error.message}", param="messages") from error
        return _cut_after_final(text, prepared) if continue_final_message else text

    def prepare(self, messages: Sequence[Message], image_placeholder: str | None = None) -> list[dict[str, Any]]:
        """Check messages and bring them into the form that the template expects. `RequestError` names what is wrong."""
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise RequestError("messages must be a non-empty list", param="messages")
        return [self._message(message, f"messages[{i}]", image_placeholder) for i, message in enumerate(messages)]

    def _message(self, message: Message, where: str, image_placeholder: str | None) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise RequestError(f"{where} must be an object", param=where)
        role = message.get("role")
        if role not in ROLES:
            raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
        out = {key: value for key, value in message.items() if value is not None}
        if role == "developer" and not self._knows_developer:
            out["role"] = "system"
        if role == "assistant" and "tool_calls" in out:
            out["tool_calls"] = _tool_calls(out["tool_calls"], f"{where}.tool_calls")
        if role == "assistant":
            out |= _reasoning(out)
        content, has_calls = message.get("content"), bool(out.get("tool_calls"))
        if role == "assistant" and content is None:
            content = message.get("refusal")
        out["content"] = self._content(content, role, has_calls, f"{where}.content", image_placeholder)
        return out

    def _content(
        self, content: object, role: str, has_calls: bool, where: str, image_placeholder: str | None
    ) -> str | list[dict[str, Any]]:
        if isinstance(content, str):
            return content
        if content is None and (role == "assistant" or has_calls):
            return ""
        if not isinstance(content, list):
            raise RequestError(f"{where} must be a string or a list of parts", param=where)
        parts = [_part(part, f"{where}[{i}]", image_placeholder) for i, part in enumerate(content)]
        if self._takes_parts:
            return parts
        return "\n".join(part.get("text", image_placeholder or "") for part in parts)


def _part(part: object, where: str, image_placeholder: str | None) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise RequestError(f"{where} must be an object with a type", param=where)
    kind = part.get("type")
    if kind == "image" and image_placeholder is not None:
        return {"type": "image"}
    if kind not in TEXT_PARTS:
        reads = "text only" if image_placeholder is None else "text and images"
        raise RequestError(f"{where}: this model reads {reads}, not {str(kind)[:40]!r} parts", param=f"{where}.type")
    name = "refusal" if kind == "refusal" else "text"
    text = part.get(name)
    if not isinstance(text, str):
        raise RequestError(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return {"type": "text", "text": text}


def _reasoning(message: Mapping[str, Any]) -> dict[str, str]:
    """An earlier turn's reasoning under every name that clients and templates have for it."""
    given = next((message[name] for name in REASONING_NAMES if isinstance(message.get(name), str)), "")
    return dict.fromkeys(REASONING_NAMES, given) if given else {}


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    """Calls of an earlier turn, with their `Arguments`."""
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list", param=where)
    out = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}[{i}].function.name must be a string", param=f"{where}[{i}]")
        arguments = Arguments.of(function.get("arguments"))
        if arguments is None:
            raise RequestError(f"{where}[{i}].function.arguments must be text or an object", param=f"{where}[{i}]")
        out.append({**call, "function": {**function, "arguments": arguments}})
    return out


def _cut_after_final(text: str, messages: Sequence[Message]) -> str:
    """The rendered text up to the end of the last message's content (templates may have trimmed it)."""
    content = messages[-1]["content"]
    final = content if isinstance(content, str) else content[-1].get("text", "") if content else ""
    for form in (final, final.rstrip(), final.strip()):
        at = text.rfind(form)
        if form and at >= 0:
            return text[: at + len(form)]
    raise RequestError(
        "continue_final_message: the template does not show the last message's content as it is, or it is empty",
        param="continue_final_message",
    )


def _compile(source: str) -> Any:
    try:
        return make_environment().from_string(source)
    except TemplateSyntaxError as error:
        raise ModelError(f"the chat template has a syntax error in line {error.lineno}: {error.message}") from error


def _is_content(node: nodes.Node, aliases: set[str]) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in aliases


def _iterates_content(source: str) -> bool:
    """Whether the template loops over a message's content, which means that it understands lists of parts."""
    tree = make_environment().parse(source)
    aliases: set[str] = set()
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, set()):
            aliases.add(assign.target.name)
    return any(_is_content(loop.iter, aliases) for loop in tree.find_all(nodes.For))


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} must hold an object")
    return config


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Strings of special tokens; older files wrap them as {"content": …}."""
    out = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            out[name] = value
    return out


def _named_templates(config: Mapping[str, Any]) -> dict[str, str]:
    value = config.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        try:
            return {entry["name"]: entry["template"] for entry in value}
        except (KeyError, TypeError) as error:
            raise ModelError("tokenizer_config.json: chat_template entries need a name and a template") from error
    return {}


def _read_override(override: str) -> str:
    if "{" in override or "\n" in override:
        return override
    try:
        return Path(override).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template: can't read {override}: {getattr(error, 'strerror', None) or error}", "chat_template"
        ) from error
