"""Findings as text, JSON and SARIF."""

import json

import jsonschema

from fullframe.doctor.lint.catalog import RULES
from fullframe.doctor.lint.report import as_json, as_sarif, as_text

KIND = RULES["FF101"].kind
FOUND = KIND.found("total grows", evidence="total += loss", path="a.py", line=3, column=5)

# What the SARIF 2.1.0 standard asks of the parts that are written (its sections 3.13 to 3.52).
SARIF = {
    "type": "object",
    "required": ["version", "runs"],
    "properties": {
        "version": {"const": "2.1.0"},
        "runs": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/run"}},
    },
    "$defs": {
        "run": {
            "type": "object",
            "required": ["tool", "results"],
            "properties": {
                "tool": {
                    "type": "object",
                    "required": ["driver"],
                    "properties": {
                        "driver": {
                            "type": "object",
                            "required": ["name"],
                            "properties": {"rules": {"type": "array", "items": {"$ref": "#/$defs/rule"}}},
                        }
                    },
                },
                "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
                "results": {"type": "array", "items": {"$ref": "#/$defs/result"}},
            },
        },
        "message": {"type": "object", "required": ["text"], "properties": {"text": {"type": "string", "minLength": 1}}},
        "level": {"enum": ["none", "note", "warning", "error"]},
        "rule": {
            "type": "object",
            "required": ["id"],
            "properties": {
                "shortDescription": {"$ref": "#/$defs/message"},
                "fullDescription": {"$ref": "#/$defs/message"},
                "help": {"$ref": "#/$defs/message"},
                "defaultConfiguration": {
                    "type": "object",
                    "properties": {"level": {"$ref": "#/$defs/level"}, "enabled": {"type": "boolean"}},
                    "additionalProperties": False,
                },
            },
        },
        "result": {
            "type": "object",
            "required": ["message", "ruleId", "locations"],
            "properties": {
                "level": {"$ref": "#/$defs/level"},
                "message": {"$ref": "#/$defs/message"},
                "ruleIndex": {"type": "integer", "minimum": 0},
                "locations": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["physicalLocation"],
                        "properties": {
                            "physicalLocation": {
                                "type": "object",
                                "required": ["artifactLocation"],
                                "properties": {
                                    "artifactLocation": {
                                        "type": "object",
                                        "properties": {"uri": {"type": "string", "format": "uri-reference"}},
                                    },
                                    "region": {
                                        "type": "object",
                                        "properties": {
                                            "startLine": {"type": "integer", "minimum": 1},
                                            "startColumn": {"type": "integer", "minimum": 1},
                                        },
                                    },
                                },
                            }
                        },
                    },
                },
            },
        },
    },
}


def test_text_has_place_code_line_and_remedy() -> None:
    place, source, fix, summary = as_text([FOUND], 2).splitlines()
    assert place == "a.py:3:5: FF101 loss summed with its graph: total grows"
    assert source == "    total += loss"
    assert fix == f"    fix: {KIND.fix}"
    assert summary == "1 finding in 2 files: FF101 1"
    assert as_text([], 1) == "nothing found in 1 file"


def test_json_is_a_list_of_six_fields() -> None:
    (found,) = json.loads(as_json([FOUND]))
    where = {"code": "FF101", "path": "a.py", "line": 3, "column": 5}
    assert found == {**where, "message": "total grows", "fix": KIND.fix}
    assert json.loads(as_json([])) == []


def test_sarif_has_the_form_of_the_standard() -> None:
    kinds = [rule.kind for rule in RULES.values()]
    log = json.loads(as_sarif([FOUND], kinds, "1.0"))
    jsonschema.validate(log, SARIF)
    (run,) = log["runs"]
    (result,) = run["results"]
    assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "FF101"
    region = result["locations"][0]["physicalLocation"]["region"]
    assert region == {"startLine": 3, "startColumn": 5}
