"""Schemas for every keyword of JSON Schema 2020-12, and values that try them. Which value is valid, a validator says.

Each entry: keyword -> [(schema, values beside `VALUES`)].
"""

from __future__ import annotations

from typing import Any

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 5, 7, 10, 12, 100, -7, 0.5, 1.5, -2.25, 9.99, 1e3),
    *("", "a", "ab", "abc", "foo", "bar", "A", "7", "é", "日本", "🐙", 'q"q', "b\\b", "line\nbreak", "2024-02-30"),
    *([], [1], [1, 2], [1, 1], [1, "a"], ["a", "b", "c"], [[1]], [None], [{}], [1, 2, 3, 4, 5]),
    *({}, {"a": 1}, {"a": "x"}, {"a": 1, "b": 2}, {"b": 1}, {"foo": 1, "bar": "x"}, {"a": {"b": 1}}, {"a": [1, 2]}),
    *({"a": 1, "b": 2, "c": 3}, {"a": None}, {"foo bar": 1}, {"": 1}, {"é": 1}),
]

Entry = tuple[Any, list[Any]]

CORPUS: dict[str, list[Entry]] = {
    "boolean schemas": [(True, []), ({}, []), (False, [])],
    "type": [({"type": name}, []) for name in ("null", "boolean", "integer", "number", "string", "array", "object")]
    + [({"type": ["integer", "null"]}, []), ({"type": ["string", "array", "object"]}, []), ({"type": "int"}, [])],
    "enum": [
        ({"enum": [1, 2, 3]}, []),
        ({"enum": ["foo", 1, None, True, [1], {"a": 1}]}, [{"a": 2}, [2]]),
        ({"type": "string", "enum": ["foo", 5]}, []),
        ({"enum": ['q"q', "b\\b", "line\nbreak", "é", "日本", "🐙", "e\u0301"]}, ["é", "e\u0301"]),
        ({"enum": [0, False]}, []),
        ({"enum": [[False]]}, [[0], [False]]),
        ({"enum": [0.5, -2.25, 1000]}, [1000.0]),
        ({"enum": ["a"], "minLength": 2}, []),
        ({"enum": []}, []),
    ],
    "const": [
        ({"const": value}, [])
        for value in (1, "foo", None, True, 0.5, [1, 2], {"a": 1}, "", {}, [], {"a": {"b": 1}}, -7, "é")
    ],
    "multipleOf": [
        ({"type": "integer", "multipleOf": 5}, [15, -20, 1005]),
        ({"type": "number", "multipleOf": 1.5}, [3.0, 4.5, 4.6]),
        ({"type": "number", "multipleOf": 0.25}, [0.75, 0.3]),
        ({"multipleOf": 2}, []),
        ({"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 30}, [14, 21, 28, 35]),
        ({"multipleOf": 0}, []),
    ],
    "minimum and maximum": [
        ({"type": "integer", "minimum": 3}, [1000000]),
        ({"type": "integer", "maximum": 3}, [-1000000]),
        ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 10}, [4, 9]),
        ({"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 12}, [9, 11]),
        ({"type": "integer", "minimum": -5, "maximum": 20000000000}, [-5, -6, 20000000000, 20000000001]),
        ({"type": "number", "minimum": 0.5, "maximum": 0.75}, [0.6, 0.76, 0.49, 0.75, 0.5000001]),
        ({"type": "number", "exclusiveMinimum": 0}, [0.0001, -0.0001]),
        ({"type": "number", "maximum": -1.5}, [-1.5, -1.4, -1000]),
        ({"minimum": 1.5}, [1.4]),
        ({"type": "integer", "minimum": 2.5, "maximum": 3.5}, []),
        ({"type": "integer", "minimum": 4, "maximum": 3}, []),
        ({"type": "integer", "minimum": 9007199254740993}, []),
        ({"type": "number", "minimum": 99.995, "exclusiveMaximum": 100.001}, [99.995, 100, 100.001, 99.99]),
    ],
    "minLength and maxLength": [
        ({"type": "string", "minLength": 2}, []),
        ({"type": "string", "maxLength": 2}, ["日本語"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["🐙🐙", "🐙🐙🐙🐙", "\n\n"]),
        ({"maxLength": 1}, []),
        ({"type": "string", "minLength": 3, "maxLength": 2}, []),
        ({"type": "string", "minLength": -1}, []),
    ],
    "pattern": [
        ({"type": "string", "pattern": "^a*$"}, ["aaa", "aab"]),
        ({"type": "string", "pattern": "a+"}, ["xaax", "xx"]),
        ({"type": "string", "pattern": "^[a-z]+$", "minLength": 5, "maxLength": 8}, ["abcde", "abcdefghi", "abcd"]),
        ({"type": "string", "pattern": r"^\d{3}-\d{4}$"}, ["555-1234", "555-123"]),
        ({"type": "string", "pattern": "^(foo|bar)$"}, ["foobar"]),
        ({"type": "string", "pattern": "^\\S+@\\S+$"}, ["a@b", "a b@c"]),
        ({"type": "string", "pattern": "^[\\u4e00-\\u9fff]{2}$"}, ["日本", "日本語"]),
        ({"type": "string", "pattern": "(?=a)b"}, []),
        ({"type": "string", "pattern": "["}, []),
        ({"type": "string", "pattern": "b$"}, ["ab", "ba"]),
        ({"type": "string", "pattern": "^\\w+$", "enum": ["ok", "not ok"]}, ["ok", "not ok"]),
    ],
    "format": [
        ({"type": "string", "format": "date"}, ["2024-02-29", "2023-02-29", "2024-13-01", "1999-12-31", "0000-01-01"]),
        ({"type": "string", "format": "time"}, ["12:00:00Z", "25:00:00Z", "12:00:00+01:00", "12:00:60Z", "12:00"]),
        ({"type": "string", "format": "date-time"}, ["2024-02-29T12:00:00Z", "2023-02-29T12:00:00Z", "2024-02-29"]),
        ({"type": "string", "format": "ipv4"}, ["127.0.0.1", "256.0.0.1", "1.2.3", "01.2.3.4"]),
        ({"type": "string", "format": "ipv6"}, ["::1", "2001:db8::1", ":::", "12345::", "1:2:3:4:5:6:7:8"]),
        (
            {"type": "string", "format": "uuid"},
            ["123e4567-e89b-12d3-a456-426614174000", "123e4567e89b12d3a456426614174000"],
        ),
        ({"type": "string", "format": "email"}, ["a@b.example", "a.b.example"]),
        ({"type": "string", "format": "regex"}, []),
        ({"type": "integer", "format": "int32"}, []),
        ({"type": "string", "format": "password"}, []),
        ({"type": "string", "format": "date", "pattern": "^2024"}, ["2024-01-01", "2023-01-01"]),
    ],
    "items": [
        ({"type": "array", "items": {"type": "integer"}}, [[1, 2.5]]),
        ({"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 3}, [["a"], ["a", "b"], ["a"] * 4]),
        ({"items": {"minimum": 2}}, [[2, 3], [1]]),
        ({"type": "array", "items": False}, []),
        ({"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}, [[[1], [2, 3]], [["a"]]]),
        ({"type": "array", "minItems": 3, "maxItems": 2}, []),
    ],
    "prefixItems": [
        (
            {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
            [[1, "a", None], ["a", 1], [1, 2]],
        ),
        ({"type": "array", "prefixItems": [{"const": 1}], "items": False}, [[1, 2], [2]]),
        ({"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "string"}, "minItems": 2}, [[1, "a"], [1]]),
        ({"type": "array", "items": [{"type": "integer"}], "additionalItems": False}, []),
    ],
    "uniqueItems": [
        ({"type": "array", "uniqueItems": True}, []),
        ({"type": "array", "uniqueItems": False}, []),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, []),
    ],
    "contains": [({"type": "array", "contains": {"const": 1}}, [])],
    "properties": [
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, [{"a": 1, "z": 2}]),
        ({"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}, [{"a": 1, "b": "x"}]),
        ({"type": "object", "properties": {"a": False}}, []),
        ({"type": "object", "properties": {"foo bar": {"const": 1}, "é": {"const": 1}, "": {"const": 1}}}, []),
        ({"type": "object", "properties": {'q"q': {"const": 1}, "b\\b": {"const": 2}}}, [{'q"q': 1}, {'q"q': 2}]),
        ({"type": "object", "properties": []}, []),
    ],
    "required": [
        ({"type": "object", "required": ["a"]}, []),
        ({"type": "object", "required": ["a", "b"]}, [{"b": 1, "a": 2}]),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, []),
        ({"type": "object", "required": "a"}, []),
    ],
    "additionalProperties": [
        ({"type": "object", "additionalProperties": False}, []),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": False}, []),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"z": "x"}]),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
            [{"z": 1}],
        ),
    ],
    "patternProperties": [
        ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, [{"ab": 1}, {"ab": "x"}]),
        (
            {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False},
            [{"abc": 3}, {"xa": 1}],
        ),
        (
            {"type": "object", "properties": {"ab": {"minimum": 5}}, "patternProperties": {"^a": {"type": "integer"}}},
            [{"ab": 4}, {"ab": 5}],
        ),
        ({"type": "object", "patternProperties": {"a": {"type": "integer"}, "b": {"type": "string"}}}, [{"ab": 1}]),
    ],
    "minProperties and maxProperties": [
        ({"type": "object", "minProperties": 1}, []),
        ({"type": "object", "maxProperties": 1}, []),
        ({"type": "object", "minProperties": 2}, []),
        ({"type": "object", "minProperties": 2, "required": ["a"]}, []),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": False, "minProperties": 1}, []),
        ({"type": "object", "maxProperties": 0}, []),
    ],
    "propertyNames": [
        ({"propertyNames": True}, []),
        ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}, []),
        ({"type": "object", "propertyNames": {"enum": ["a", "b", 1]}, "additionalProperties": {"type": "integer"}}, []),
        ({"propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"title": "N", "const": "foo bar"}}}, []),
        ({"type": "object", "propertyNames": {"pattern": "^f"}}, [{"f": 1}, {"fo": 1, "xf": 1}]),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "string"}, "c": {}},
                "propertyNames": {"enum": ["b", "a"]},
                "required": ["b"],
            },
            [{"a": "x", "b": 1}, {"b": 1, "c": 1}, {"a": 1, "b": 1}],
        ),
        ({"type": "object", "propertyNames": {"minLength": 2}}, []),
        ({"type": "object", "propertyNames": {"enum": ["a"]}, "patternProperties": {"b": {}}}, []),
        ({"propertyNames": {"$ref": "#/propertyNames"}}, []),
    ],
    "dependentRequired": [
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, []),
        ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, []),
    ],
    "unevaluated": [
        ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, []),
        ({"type": "array", "prefixItems": [{}], "unevaluatedItems": False}, []),
        ({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, []),
    ],
    "allOf": [
        ({"allOf": [{"type": "integer"}, {"minimum": 2}]}, []),
        ({"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"required": ["b"]}]}, []),
        ({"allOf": [{"type": "integer"}, {"type": "string"}]}, []),
        ({"type": "string", "allOf": [{"minLength": 1}, {"maxLength": 2}, {"pattern": "^a"}]}, []),
        ({"allOf": [True, {"type": "array"}]}, []),
        ({"allOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}, []),
    ],
    "anyOf": [
        ({"anyOf": [{"type": "integer"}, {"minimum": 2}]}, [1.5, 2.5]),
        ({"anyOf": [{"type": "string", "maxLength": 1}, {"type": "integer"}]}, []),
        ({"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, []),
        ({"anyOf": [{"type": "null"}, False]}, []),
        (
            {
                "anyOf": [
                    {"properties": {"a": {"type": "string"}}, "required": ["a"], "type": "object"},
                    {"type": "array"},
                ]
            },
            [],
        ),
        ({"anyOf": []}, []),
    ],
    "oneOf": [
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, []),
        ({"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 3}]}, []),
        ({"oneOf": [{"const": 1}, {"const": 2}]}, []),
        (
            {
                "oneOf": [
                    {
                        "type": "object",
                        "properties": {"k": {"const": "x"}, "v": {"type": "integer"}},
                        "required": ["k"],
                    },
                    {"type": "object", "properties": {"k": {"const": "y"}, "v": {"type": "string"}}, "required": ["k"]},
                ]
            },
            [{"k": "x", "v": 1}, {"k": "y", "v": "s"}, {"k": "x", "v": "s"}, {"k": "z"}],
        ),
    ],
    "not": [({"not": {"type": "integer"}}, [])],
    "if": [
        ({"if": {"type": "integer"}, "then": {"minimum": 3}}, []),
        ({"then": {"minimum": 3}}, []),
    ],
    "$ref": [
        ({"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"}, []),
        (
            {"definitions": {"a/b": {"type": "string"}}, "items": {"$ref": "#/definitions/a~1b"}, "type": "array"},
            [["x"], [1]],
        ),
        ({"$defs": {"a%b": {"type": "string"}}, "$ref": "#/$defs/a%25b"}, []),
        ({"$defs": {"x": {"$anchor": "here", "type": "boolean"}}, "$ref": "#here"}, []),
        (
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
            [{"a": {"a": {}}}, {"a": {"b": {}}}],
        ),
        (
            {
                "$defs": {
                    "tree": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/tree"}]}}
                },
                "$ref": "#/$defs/tree",
            },
            [[1, [2, [3]]], [1, ["a"]]],
        ),
        ({"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "minimum": 3}, []),
        ({"properties": {"a": {"$ref": "#/$defs/p"}}, "$defs": {"p": {"const": 1}}, "type": "object"}, []),
        ({"$ref": "#/$defs/none"}, []),
        ({"$ref": "https://elsewhere.example/schema"}, []),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, []),
        (
            {"$id": "https://here.example/s", "$defs": {"n": {"const": 5}}, "$ref": "https://here.example/s#/$defs/n"},
            [],
        ),
    ],
    "annotations": [
        ({"title": "t", "description": "d", "default": 1, "examples": [1], "deprecated": True, "type": "integer"}, []),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "$comment": "c", "type": "string"}, []),
        ({"x-own": {"type": "integer"}, "x-guidance": {"lenient": True}, "type": "boolean"}, []),
    ],
}
