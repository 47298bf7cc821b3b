"""Chat templates: where they come from, what they are given, and that a hostile one is stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.chat_template import ChatTemplate
from octavo.errors import ConfigError, ModelError, RequestError

HELLO = [{"role": "user", "content": "hi"}]


def render(source: str, messages: Any = HELLO, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)


def folder_with(path: Path, **files: str) -> Path:
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def test_special_tokens_and_prompt_flag_reach_the_template() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{{ '!' if add_generation_prompt }}"
    assert render(source) == "<s>hi!"
    assert render(source, add_generation_prompt=False) == "<s>hi"


def test_extra_variables_reach_the_template_but_reserved_ones_may_not() -> None:
    assert render("{{ style }}", style="plain") == "plain"
    for name in ("bos_token", "chat_template", "tokenize"):
        with pytest.raises(RequestError, match=name):
            render("x", **{name: "v"})


def test_blocks_are_trimmed_as_in_training() -> None:
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}\nend"
    assert render(source) == "user\nend"


def test_tojson_keeps_html_and_unicode() -> None:
    assert render("{{ messages | tojson }}", [{"role": "user", "content": "<é&'>"}]) == (
        '[{"role": "user", "content": "<é&\'>"}]'
    )


def test_generation_tag_and_loop_controls() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert render(source, HELLO * 3) == "hi"


def test_strftime_now_gives_a_date() -> None:
    assert render("{{ strftime_now('%Y') }}").isdigit()


def test_part_lists_are_joined_for_templates_that_want_strings() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"


@pytest.mark.parametrize("content", ["m.content", "m['content']", "c"])
def test_part_lists_stay_lists_for_templates_that_loop_over_them(content: str) -> None:
    source = (
        "{% for m in messages %}{% set c = m.content %}{% for p in CONTENT %}[{{ p.text }}]{% endfor %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(source.replace("CONTENT", content), [{"role": "user", "content": parts}]) == "[a][b]"


def test_missing_content_of_a_calling_assistant_is_empty_not_none() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    source = "{{ messages[1].content }}|{{ messages[1].tool_calls[0].function.arguments.a }}"
    assert render(source, messages) == "|1"


def test_developer_is_system_where_the_template_does_not_know_it() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert render("{{ messages[0].role }}", messages) == "system"
    assert render("{{ messages[0].role }}{# developer #}", messages) == "developer"


def test_continue_final_message_ends_with_the_message() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
    messages = [*HELLO, {"role": "assistant", "content": "Sure, "}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert render(source, messages, **options) == "<user>hi</><assistant>Sure,"
    with pytest.raises(RequestError, match="exclude"):
        render(source, messages, continue_final_message=True)
    parts = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}</>{% endfor %}"
    with pytest.raises(RequestError, match="empty"):
        render(parts, [*HELLO, {"role": "assistant", "content": []}], **options)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([1], "messages[0]"),
        ([{"role": "alien", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
    ],
)
def test_malformed_messages_are_named(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        render("{{ messages }}", messages)
    assert caught.value.param == param


def test_the_templates_own_refusal_is_shown() -> None:
    with pytest.raises(RequestError, match="only one tool call"):
        render("{{ raise_exception('only one tool call') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ nothing.at.all }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ 'x' * 10000000000 }}",
        "{{ 9 ** 999999999 }}",
        "{{ '%9999999d' % 1 }}",
        "{{ '%9999999d' | format(1) }}",
        "{{ '{:9999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 9999999) }}",
        "{{ 'a'.center(10000000000) }}",
        "{{ 'a' | center(width=10000000000) }}",
        "{{ 'x' | indent(10000000000) }}",
        "{{ lipsum(10000000) }}",
        "{{ ('a' * 60000).replace('a', 'b' * 60000) }}",
        "{{ ('a' * 60000) | replace('a', 'b' * 60000) }}",
        "{{ '{:{w}}'.format_map({'w': 9999999}) }}",
        "{{ (['x' * 60000] * 60000) | join }}",
        "{{ ''.join(['x' * 60000] * 60000) }}",
        "{{ 1 / 0 }}",
        "{% for i in range(1000000) %}x{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_what_a_template_must_not_do_is_an_error(source: str) -> None:
    with pytest.raises(RequestError):
        render(source)


def test_ordinary_filters_and_methods_work() -> None:
    source = (
        "{{ 'a b' | replace(' ', '_') }}{{ ['x', 'y'] | map('upper') | join(', ') }}{{ 'q' | indent(4, true) }}"
        "{{ 'k'.center(3) }}{{ '%05.1f' | format(2) }}{{ '{:>4} in: 2024'.format(1) }}{{ [3, 1] | sort | first }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ ','.join(['1', '2']) }}"
    )
    assert render(source) == "a_bX, Y    q k 002.0   1 in: 2024111,2"


def test_endless_loops_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.template_sandbox.MAX_RENDER_S", 0.05)
    silent = "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = 1 %}{% endfor %}{% endfor %}"
    with pytest.raises(RequestError, match="ran for more than"):
        render(silent)


def test_output_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.template_sandbox.render.__kwdefaults__", {"max_chars": 100})
    with pytest.raises(RequestError, match="wrote more than"):
        render("{% for i in range(1000) %}xxx{% endfor %}")


def test_a_model_without_a_template_says_how_to_give_one(tmp_path: Path) -> None:
    template = ChatTemplate.from_folder(tmp_path)
    assert template.source is None
    with pytest.raises(RequestError, match="--chat-template"):
        template.render(HELLO)


def test_the_jinja_file_wins_over_the_config(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path, tokenizer_config__json=json.dumps({"chat_template": "config"}), chat_template__jinja="file"
    )
    assert ChatTemplate.from_folder(folder).render(HELLO) == "file"
    assert ChatTemplate.from_folder(folder, "{{ 'given' }}").render(HELLO) == "given"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    folder = folder_with(tmp_path, tokenizer_config__json=json.dumps({"chat_template": named}))
    template = ChatTemplate.from_folder(folder)
    assert template.render(HELLO) == "plain"
    assert template.render(HELLO, tools=[{"type": "function"}]) == "tools"


def test_special_tokens_in_both_forms(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None}
    folder = folder_with(tmp_path, tokenizer_config__json=json.dumps(config))
    assert ChatTemplate.from_folder(folder).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_broken_files_are_errors_of_the_start(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="line 2"):
        ChatTemplate("{% if x %}\n{% endfor %}", {})
    with pytest.raises(ConfigError, match="--chat-template"):
        ChatTemplate.from_folder(tmp_path, "missing.jinja")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        ChatTemplate.from_folder(tmp_path)


def test_documents_and_tools_reach_the_template() -> None:
    source = "{{ documents[0].text }} {{ tools[0].function.name }}"
    tools = [{"type": "function", "function": {"name": "now"}}]
    assert render(source, documents=[{"text": "doc"}], tools=tools) == "doc now"


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo",  "n": [1]}'}}


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ call.arguments }}", '{"city": "Oslo",  "n": [1]}'),
        ("{{ 'a' + call.arguments + 'b' }}", 'a{"city": "Oslo",  "n": [1]}b'),
        ("{{ 'a' ~ call.arguments }}", 'a{"city": "Oslo",  "n": [1]}'),
        ("{{ call.arguments | string }}", '{"city": "Oslo",  "n": [1]}'),
        ("{{ call.arguments | tojson }}", '{"city": "Oslo", "n": [1]}'),
        ("{{ call.arguments.city }}{{ call['arguments']['n'] }}", "Oslo[1]"),
        (
            "{% for key, value in call.arguments | items %}{{ key }}={{ value | tojson }};{% endfor %}",
            'city="Oslo";n=[1];',
        ),
        ("{{ call.arguments is mapping }}{{ call.arguments is string }}", "TrueFalse"),
    ],
)
def test_arguments_are_an_object_or_text_as_the_template_wants(source: str, text: str) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    template = "{% set call = messages[1].tool_calls[0].function %}" + source
    assert ChatTemplate(template, {}).render(messages) == text


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_calls_without_arguments(arguments: object) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments }}", {})
    assert template.render(messages) == (arguments if isinstance(arguments, str) and arguments else "{}")


@pytest.mark.parametrize("arguments", [5, [1], True])
def test_arguments_that_are_neither_text_nor_an_object(arguments: object) -> None:
    messages = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]
    with pytest.raises(RequestError, match="must be text or an object"):
        ChatTemplate("x", {}).render(messages)


@pytest.mark.parametrize("arguments", ["[1]", "nope", '{"city": "Os', "5", "[" * 100_000])
def test_a_call_that_went_wrong_can_be_sent_back(arguments: str) -> None:
    """A call that max_tokens cut is no JSON; agents answer it with an error and go on."""
    messages = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]
    call = "{% set call = messages[0].tool_calls[0].function %}"
    assert ChatTemplate(call + "{{ call.arguments }}", {}).render(messages) == arguments
    looked_into = call + "{% for key, value in call.arguments.items() %}{{ key }}={{ value }}{% endfor %}"
    assert ChatTemplate(looked_into, {}).render(messages) == f"arguments={arguments}"


def test_refusals_of_earlier_turns_are_text() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    for message in ({"content": [{"type": "refusal", "refusal": "no"}]}, {"content": None, "refusal": "no"}):
        assert template.render([{"role": "assistant", **message}]) == "no"
    assert template.render([{"role": "assistant", "content": "yes", "refusal": None}]) == "yes"
    with pytest.raises(RequestError, match=r"content\[0\]\.refusal must be a string"):
        template.render([{"role": "assistant", "content": [{"type": "refusal", "text": "no"}]}])


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_of_earlier_turns(name: str) -> None:
    source = "{{ messages[0].reasoning_content }}{{ messages[0].reasoning }}{{ messages[0].thinking }}"
    assert ChatTemplate(source, {}).render([{"role": "assistant", "content": "a", name: "hm "}]) == "hm hm hm "
