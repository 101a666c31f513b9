"""Structures with the real tokenizer: what is refused, and which tokens are let through."""

from __future__ import annotations

import json
import random
import re
import shutil
from typing import TYPE_CHECKING

import jsonschema
import pytest
from tokenizers import Tokenizer

from baton.core.errors import InvalidArgumentError
from baton.core.generation import Structure, StructureKind
from baton.structure.compiler import StructureCompiler

if TYPE_CHECKING:
    from pathlib import Path

    from baton.structure.matcher import StructureMatcher

JSON, REGEX, GRAMMAR = StructureKind
EOS = 2
VOCAB_SIZE = 49_152
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": -20, "maximum": 300},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "minItems": 1, "maxItems": 3},
        "kind": {"anyOf": [{"type": "boolean"}, {"const": "ö"}]},
    },
    "required": ["name", "size", "tags", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def compiler(model_folder: Path) -> StructureCompiler:
    made = StructureCompiler.load(model_folder, vocab_size=VOCAB_SIZE)
    assert made is not None
    return made


def allowed(matcher: StructureMatcher) -> list[int]:
    return [8 * at + bit for at, byte in enumerate(matcher.allowed) if byte for bit in range(8) if byte >> bit & 1]


def walk(matcher: StructureMatcher, seed: int) -> list[int]:
    """Allowed tokens at random until the output is over."""
    choices, output = random.Random(seed), []
    while not matcher.is_complete:
        output.append(choices.choice(allowed(matcher)))
        matcher.append(output[-1])
    return output


@pytest.mark.parametrize("seed", range(20))
def test_any_way_through_a_schema_is_valid(compiler, tokenizer, seed):
    text = tokenizer.decode(walk(compiler.start(Structure(JSON, json.dumps(SCHEMA)), [EOS]), seed))
    value = json.loads(text)
    jsonschema.validate(value, SCHEMA)
    assert json.loads(json.dumps(value)) == value


@pytest.mark.parametrize("seed", range(20))
def test_any_way_through_a_regex_matches_it(compiler, tokenizer, seed):
    output = walk(compiler.start(Structure(REGEX, "(ab|c[0-9]{2}){1,6}x?"), [EOS]), seed)
    assert re.fullmatch("(ab|c[0-9]{2}){1,6}x?", tokenizer.decode(output))


def test_a_grammar_nests(compiler, tokenizer):
    grammar = Structure(GRAMMAR, 'start: "(" start ")" | /[0-9]/')
    texts = [tokenizer.decode(walk(compiler.start(grammar, [EOS]), seed)) for seed in range(20)]
    assert all(re.fullmatch(r"(\(*)[0-9](\)*)", text) and text.count("(") == text.count(")") for text in texts)
    assert len(set(texts)) > 5


def test_a_stop_token_comes_only_where_the_output_is_complete(compiler, tokenizer):
    comma = tokenizer.encode(",").ids[0]
    matcher = compiler.start(Structure(REGEX, "a(,a|b)*"), [EOS, comma])
    assert not {EOS, comma} & set(allowed(matcher))
    matcher.append(tokenizer.encode("a").ids[0])
    assert {EOS, comma} <= set(allowed(matcher))
    matcher.append(comma)  # as a stop token, although the structure has it too
    assert matcher.is_complete


def test_no_end_is_made_up_where_no_token_ends(compiler, tokenizer):
    matcher = compiler.start(Structure(REGEX, "aa?"), [])
    matcher.append(tokenizer.encode("a").ids[0])
    assert allowed(matcher) == tokenizer.encode("a").ids
    matcher.append(tokenizer.encode("a").ids[0])
    assert matcher.is_complete


def test_an_output_is_over_where_nothing_but_a_stop_token_could_follow(compiler, tokenizer):
    matcher = compiler.start(Structure(REGEX, "a(,a)*"), [EOS, *tokenizer.encode(",").ids])
    matcher.append(tokenizer.encode("a").ids[0])
    assert matcher.is_complete


def test_matchers_of_one_structure_do_not_share_their_state(compiler):
    structure = Structure(REGEX, "[ab]{4}")
    first = compiler.start(structure, [EOS])
    before = bytes(first.allowed)
    walk(compiler.start(structure, [EOS]), 1)
    assert bytes(first.allowed) == before == bytes(compiler.start(structure, [EOS]).allowed)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (JSON, "{", "is not JSON"),
        (JSON, "[" * 100_000, "is not JSON"),
        (JSON, '{"items":' * 200 + "{}" + "}" * 200, "recursion limit exceeded"),
        (JSON, "[1]", "must be a JSON object"),
        (JSON, '{"type": "objekt"}', "Invalid type: objekt"),
        (JSON, '{"type": "string", "not": {"const": "x"}}', 'Unimplemented keys: ["not"]'),
        (JSON, '{"allOf": [{"type": "integer"}, {"type": "string"}]}', "Unsatisfiable schema"),
        (JSON, '{"$ref": "https://example.org/schema"}', "does not fetch"),
        (
            JSON,
            json.dumps({"properties": {f"p{i}": {} for i in range(4_000)}}),
            "too big (limit for this grammar: 8000)",
        ),
        (REGEX, "[a-", "unclosed character class"),
        (REGEX, "(?=a)b", "look-ahead"),
        (REGEX, "", "allows no output"),
        (GRAMMAR, "start: foo", 'unknown name: "foo"'),
        (GRAMMAR, "begin: /a/", "start"),
        (GRAMMAR, ' {"grammars": []}', "is not a Lark grammar"),
        (GRAMMAR, "", "Empty grammar"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_field(compiler, kind, text, words):
    with pytest.raises(InvalidArgumentError) as caught:
        compiler.check(Structure(kind, text))
    assert caught.value.field == f"structure.{kind.value}"
    assert words in caught.value.description
    assert "\n" not in caught.value.description
    assert len(caught.value.description) <= 300


def test_a_schema_that_is_let_in_can_be_followed_however_many_optional_properties_it_has(compiler, tokenizer):
    properties = {f"p{number}": {"type": "null"} for number in range(900)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    matcher = compiler.start(Structure(JSON, json.dumps(schema)), {EOS})
    for token_id in tokenizer.encode('{"p7": null, "p899": null}').ids:
        assert token_id in allowed(matcher)
        matcher.append(token_id)
    assert matcher.is_complete


def test_a_tokenizer_that_the_library_cannot_use_has_no_compiler(tmp_path, model_folder):
    assert StructureCompiler.load(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert StructureCompiler.load(tmp_path) is None
    shutil.copy(model_folder / "tokenizer.json", tmp_path)
    assert StructureCompiler.load(tmp_path) is not None
