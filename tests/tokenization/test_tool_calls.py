"""TurnParser: tool calls in the formats of several model families, and with a response template."""

from __future__ import annotations

import json

import pytest
from support.fakes.scripted import CHAT, byte_tokenizer, call
from support.tool_chats import LOOK, look_call_message

from groupwise.errors import ConfigError
from groupwise.tokenization import tool_calls
from groupwise.tokenization.text import response_attribute
from groupwise.tokenization.tool_calls import TurnParser, split_thoughts

USER = {"role": "user", "content": "What is it?"}

#: Defined with ``response_template``, as tokenizers of recent models are.
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "[[",
            "close": "]]",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}


@pytest.mark.parametrize(
    ("template", "text", "content", "calls"),
    [
        (CHAT, f"Well. {call('look', at='it')}<|im_end|>", "Well.", [("look", {"at": "it"})]),
        (
            CHAT,
            f"{call('look', at='it')}\n{call('see')}<|im_end|>",
            "",
            [("look", {"at": "it"}), ("see", {})],
        ),
        (CHAT, "A cat. <|im_end|>", "A cat.", []),
        ("ipython", '{"name": "look", "parameters": {"at": "it"}}<|eot_id|>', "", [("look", {"at": "it"})]),
        ("ipython", 'It is {"name": 3}.', 'It is {"name": 3}.', []),
        (
            "<|channel|>",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.look<|channel|>"
            'commentary json<|message|>{"at": "it"}<|call|>',
            "",
            [("look", {"at": "it"})],
        ),
        (
            "<|channel|>",
            '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "it"}<|call|>',
            "",
            [("look", {"at": "it"})],
        ),
        ("<|channel|>", "<|channel|>final<|message|>A cat.<|return|>", "A cat.", []),
    ],
)
def test_tool_calls_are_parsed_in_the_format_of_the_chat_template(template, text, content, calls):
    ends = ("<|im_end|>", "<|eot_id|>", "<|call|>", "<|return|>")
    special = ("<|im_start|>", "<|channel|>", "<|message|>", "<|start|>", *ends, "<|pad|>")
    tokenizer = byte_tokenizer(special=special)
    parse = TurnParser(tokenizer, template, tokenizer.convert_tokens_to_ids(list(ends)))
    turn = parse([], tokenizer(text)["input_ids"], [])
    assert turn.message["content"] == content
    assert [(each.name, each.arguments) for each in turn.tool_calls] == calls
    assert all(each.error is None for each in turn.tool_calls)


MARKS = ("<think>", "</think>")


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nA cat.", False, ("Hm.", "\n\nA cat.")),
        ("Hm.\n</think>\n\nA cat.", True, ("Hm.", "\n\nA cat.")),
        ("Hm.\n</think>\n\nA cat.", False, ("", "Hm.\n</think>\n\nA cat.")),
        ("<think>Hm", False, ("Hm", "")),
        ("A cat.<think>Hm.</think>\n", False, ("Hm.", "A cat.")),
        ("A cat.", False, ("", "A cat.")),
    ],
)
def test_thoughts_are_split_at_their_marks(text, opened, expected):
    assert split_thoughts(text, MARKS, opened=opened) == expected


def test_a_mark_in_the_arguments_of_a_call_is_no_thought():
    tokenizer = byte_tokenizer()
    text = call("look", at="<think>it</think>") + "<|im_end|>"
    turn = TurnParser(tokenizer, CHAT)([], tokenizer(text)["input_ids"], [LOOK])
    assert [(each.name, each.arguments) for each in turn.tool_calls] == [
        ("look", {"at": "<think>it</think>"})
    ]
    assert "reasoning_content" not in turn.message


@pytest.mark.parametrize(
    ("template", "text", "content", "calls"),
    [
        (
            "<arg_key>",
            "Well.\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>it</arg_value>\n<arg_key>times</arg_key>\n"
            "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>see\n</tool_call><|observation|>",
            "Well.",
            [("look", {"at": "it", "times": 3}), ("see", {})],
        ),
        ("<arg_key>", '<tool_call>{"name": "look", "arguments": {}}</tool_call>', "", [("look", {})]),
        ("<arg_key>", "<tool_call>look<arg_key>at</arg_key>", "", [("look", {"at": ""})]),
        (
            "<|tool_call_start|>",
            "Well.<|tool_call_start|>[look(at='it''s, (a) \"b\"', times=3), see(a=[1, 'x'], b={\"c\": true}, "
            "d=False, e=None, f=word)]<|tool_call_end|><|im_end|>",
            "Well.",
            [
                ("look", {"at": "it''s, (a) \"b\"", "times": 3}),
                ("see", {"a": [1, "x"], "b": {"c": True}, "d": False, "e": None, "f": "word"}),
            ],
        ),
        ("<|tool_call_start|>", "<|tool_call_start|>[see()]", "", [("see", {})]),
        ("<|tool_call_start|>", "No call: f(x).", "No call: f(x).", []),
        (
            "<|tool_call_start|>",
            '<|tool_call_start|>{"name": "look", "arguments": {}}<|tool_call_end|>',
            "",
            [("look", {})],
        ),
    ],
)
def test_calls_of_glm_and_lfm(template, text, content, calls):
    tokenizer = byte_tokenizer()
    turn = TurnParser(tokenizer, template)([], tokenizer(text)["input_ids"], [LOOK])
    assert [(each.name, each.arguments, each.error) for each in turn.tool_calls] == [
        (*c, None) for c in calls
    ]
    assert turn.message["content"] == content


ITEM = {"$ref": "#/$defs/Item"}
TYPES = {
    "flag": {"type": "boolean"},
    "count": {"type": "number"},
    "text": {"type": "string"},
    "free": {"description": "Anything."},
    "maybe": {"type": "string", "nullable": True},
    "either": {"type": ["integer", "string"]},
    "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "item": {"anyOf": [ITEM, {"type": "null"}]},
    "names": {"type": "array"},
}
PARAMETERS = {"properties": TYPES, "$defs": {"Item": {"type": "object"}}}
BUY = {"type": "function", "function": {"name": "buy", "parameters": PARAMETERS}}


@pytest.mark.parametrize(
    ("key", "text", "of_text", "of_json"),
    [
        *[("flag", word, False, False) for word in ("False", "false", "FALSE", " False")],
        *[("flag", word, True, True) for word in ("True", "true", "TRUE")],
        *[("flag", word, word, word) for word in ("maybe", "")],
        *[("days", word, None, None) for word in ("None", "null", "NULL")],
        ("days", "3", 3, 3),
        ("count", "2.5", 2.5, 2.5),
        *[("text", word, word, word) for word in ("False", "3", "null", " x ")],
        *[("free", word, word, word) for word in ("False", "3")],
        # A string in JSON that the schema allows is what the policy means.
        ("maybe", "None", None, "None"),
        *[("maybe", word, word, word) for word in ("none", "3", "True")],
        ("either", "3", 3, "3"),
        ("either", "x", "x", "x"),
        ("item", "{'a': [True, None]}", {"a": [True, None]}, {"a": [True, None]}),
        ("item", '{"a": {"b": false}}', {"a": {"b": False}}, {"a": {"b": False}}),
        ("item", "None", None, None),
        ("names", "['x', 1]", ["x", 1], ["x", 1]),
    ],
)
def test_arguments_have_the_types_of_the_schema_in_every_format(key, text, of_text, of_json):
    """Qwen3.5 prints a boolean argument as ``False``: as a text, it is true."""
    as_json = json.dumps({key: text})
    tagged = f"<tool_call>buy<arg_key>{key}</arg_key><arg_value>{text}</arg_value></tool_call>"
    functions = (
        f"<tool_call>\n<function=buy>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    )
    found = {
        "<function=": (functions, of_text),
        "<arg_key>": (tagged, of_text),
        "<tool_call>": (f'<tool_call>{{"name": "buy", "arguments": {as_json}}}</tool_call>', of_json),
        "<|tool_call>": (f'<|tool_call>call:buy{{{key}:<|"|>{text}<|"|>}}<tool_call|>', of_json),
        "<|channel|>": (f"to=functions.buy<|channel|>commentary json<|message|>{as_json}", of_json),
        "ipython": (f'{{"name": "buy", "parameters": {as_json}}}', of_json),
        "<|tool_call_start|>": (f'<|tool_call_start|>[buy({key}="{text}")]<|tool_call_end|>', of_json),
    }
    tokenizer = byte_tokenizer()
    for template, (turn, expected) in found.items():
        (parsed,) = TurnParser(tokenizer, template)([], tokenizer(turn)["input_ids"], [LOOK, BUY]).tool_calls
        value = parsed.arguments[key]
        assert (parsed.error, value, type(value)) == (None, expected, type(expected)), template


@pytest.mark.parametrize("text", ["[look(at='it", "[look(at=[1, 2", "[look]", "[look(at='it', 3)]", "look"])
def test_malformed_calls_of_lfm_have_an_error(text):
    tokenizer = byte_tokenizer()
    turn = TurnParser(tokenizer, "<|tool_call_start|>")(
        [], tokenizer(f"<|tool_call_start|>{text}")["input_ids"], []
    )
    assert len(turn.tool_calls) == 1 and "not valid JSON" in turn.tool_calls[0].error


@pytest.mark.parametrize(
    "text", ["<tool_call>\n<parameter=at>\nit\n</parameter>\n</tool_call>", "<tool_call>look"]
)
def test_a_call_without_a_function_name_has_an_error(text):
    tokenizer = byte_tokenizer()
    turn = TurnParser(tokenizer, "<function=")([], tokenizer(text)["input_ids"], [LOOK])
    assert len(turn.tool_calls) == 1 and "not valid JSON" in turn.tool_calls[0].error


def test_an_attribute_that_the_installed_transformers_does_not_read_is_refused():
    """``parse_response`` of transformers 5.3 takes no prefix: every call would fail to be parsed."""

    class Earlier:
        response_template, response_schema = {"fields": {}}, None

        def parse_response(self, response, schema=None): ...

    with pytest.raises(ConfigError, match=r"transformers reads tokenizer\.response_schema: set that"):
        response_attribute(Earlier())
    Earlier.response_schema = {"type": "object"}
    assert response_attribute(Earlier()) == "response_schema"


def test_a_response_template_takes_precedence_over_the_known_formats():
    tokenizer = byte_tokenizer()
    tokenizer.response_template = RESPONSE
    parse = TurnParser(tokenizer, CHAT)
    prompt = tokenizer.apply_chat_template([USER], tools=[LOOK], add_generation_prompt=True)["input_ids"]
    text = '<think>Hm.</think>Well.[[{"name": "look", "arguments": {"at": "it"}}]]<|im_end|>'
    turn = parse(prompt, tokenizer(text)["input_ids"], [LOOK])
    assert turn.message == {**look_call_message("Well."), "reasoning_content": "Hm."}
    calls = [(each.name, each.arguments, each.error) for each in turn.tool_calls]
    assert calls == [("look", {"at": "it"}, None)]
    malformed = parse(prompt, tokenizer('[[{"name": "lo]]<|im_end|>')["input_ids"], [LOOK])
    assert malformed.tool_calls[0].error is not None and "tool_calls" not in malformed.message
    text_turn = parse(prompt, tokenizer("A cat.<|im_end|>")["input_ids"], [LOOK])
    assert text_turn.message["content"] == "A cat." and text_turn.tool_calls == []


def test_a_chat_template_with_an_unknown_tool_call_format_is_refused():
    with pytest.raises(ConfigError, match=r"format of tool calls cannot be derived.*response_template"):
        TurnParser(byte_tokenizer(), CHAT.replace("tool_call>", "act>"))


MANY = 50_000


def matching(marker):
    return tool_calls.TOOL_CALL_FORMATS[marker]


FUNCTIONS = "<function=look>" + "<parameter=at>" * MANY


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("function", "text", "expected"),
    [
        (
            matching("<tool_call>"),
            "<tool_call>" * MANY,
            ("", [(None, "")] * MANY),
        ),
        (
            matching("<|channel|>"),
            "to=functions.look" + "<|channel|>analysis<|message|>" * MANY,
            ("", [("look", "")]),
        ),
        (
            matching("<function="),
            "<function=" * MANY,
            ("<function=" * MANY, []),
        ),
        (matching("<function="), FUNCTIONS, (FUNCTIONS, [("look", {})])),
        (
            matching("<|tool_call>"),
            "<|tool_call>call:look{" + "a" * 4 * MANY,
            ("", [("look", "{" + "a" * 4 * MANY)]),
        ),
        (
            matching("<arg_key>"),
            "<tool_call>look" + "<arg_key>a<arg_value>" * MANY,
            ("", [("look", {"a<arg_value>": ""})]),
        ),
        (
            matching("<|tool_call_start|>"),
            "<|tool_call_start|>[look(at=" + "[" * MANY,
            ("", [("look", "at=" + "[" * MANY)]),
        ),
    ],
    ids=["tagged", "harmony", "functions", "parameters", "braces", "arguments", "python"],
)
def test_parsing_takes_time_linear_in_the_text(function, text, expected):
    """With time quadratic in the length, each of these texts takes minutes."""
    assert function(text) == expected


@pytest.mark.parametrize(
    ("body", "values"),
    [
        ("<parameter=a>\nx\n</parameter><parameter=b> y </parameter>", [("a", "x"), ("b", " y ")]),
        ("<parameter=a>\n\nx\n\n</parameter>", [("a", "\nx\n")]),
        ("<parameter=a><parameter=b>x</parameter>", [("a", "<parameter=b>x")]),
        ("<parameter=a>x</parameter><parameter=b>y", [("a", "x")]),
        ("<parameter=a\n>x</parameter>", []),
    ],
)
def test_parameters_of_a_call(body, values):
    assert tool_calls._parameter_tags(f"look>{body}") == [("look", dict(values))]
