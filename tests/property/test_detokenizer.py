"""Detokenizers of three families of tokenizers against decoding everything at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from gateway.detokenizer import DetokenizerFactory

if TYPE_CHECKING:
    from pathlib import Path

CORPUS = [
    "The quick brown fox jumps over the lazy dog. ",
    "Größe, Übermut, naïve café — „Zitat“ … 漢字かな交じり文。 Привет, мир! 🙂👩‍👩‍👧 ",
    "def f(x):\n    return x * 2\n\n\n\tindented  twice   thrice",
]


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3, Qwen and SmolLM have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # Not special, so it shows; with a blank and a letter that no byte stands for.
    tokenizer.add_tokens([AddedToken("<think> 思", special=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2, Mistral and Gemma have it: `▁` for a blank, `<0xE4>` for a byte."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", "<s>", "</s>", *bytes_, *"▁etaoinshrdlu.é�", "▁▁", "▁t", "▁the", "in", "▁in"]
    merges = [("▁", "▁"), ("▁", "t"), ("i", "n"), ("▁", "in")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


def metaspace() -> Tokenizer:
    """As T5 and other Unigram models have it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def real(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_folder / "tokenizer.json"))


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback", "metaspace", "real"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "real":
        return real(request.getfixturevalue("model_folder"))
    return {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}[request.param]()


def factory(tokenizer: Tokenizer) -> DetokenizerFactory:
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return DetokenizerFactory(tokenizer, frozenset(special))


RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@RELAXED
@given(data=st.data())
def test_deltas_make_up_the_whole_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    # Up to 20 ids have no piece: models pad their vocabulary.
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 20), max_size=60))
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=60, max_size=60))
    detokenizer = factory(tokenizer).new()
    text, at = "", 0
    for size in sizes:
        text += detokenizer.push(ids[at : at + size])
        at += size
    assert text + detokenizer.flush() == tokenizer.decode(ids, skip_special_tokens=True)


@RELAXED
@given(text=st.text(max_size=40))
def test_real_text_never_shows_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    detokenizer = factory(tokenizer).new()
    deltas = [detokenizer.push([token_id]) for token_id in ids]
    assert "".join(deltas) + detokenizer.flush() == whole
    assert "".join(deltas).count("\ufffd") <= whole.count("\ufffd")


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_an_incomplete_character_is_held_and_shown_at_the_end(make: object, num_bytes: int) -> None:
    tokenizer = make()
    if make is byte_fallback:
        pieces = [f"<0x{byte:02X}>" for byte in "🙂".encode()]
    else:
        [(pieces, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("🙂")
    ids = [tokenizer.token_to_id(piece) for piece in pieces[:num_bytes]]
    detokenizer = factory(tokenizer).new()
    assert [detokenizer.push([token_id]) for token_id in ids] == [""] * num_bytes
    assert detokenizer.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_a_token_costs_the_same_late_as_early(make: object) -> None:
    """Counts what is decoded again rather than seconds: at most a few tokens for each one pushed."""
    tokenizer = make()
    counting = CountingTokenizer(tokenizer)
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    detokenizer = DetokenizerFactory(counting, frozenset(special)).new()
    ids = tokenizer.encode("the inn is in the tin. 漢\n\n\n\n\n" * 200, add_special_tokens=False).ids
    for token_id in ids:
        detokenizer.push([token_id])
    detokenizer.flush()
    assert counting.num_decoded <= 5 * len(ids)


class CountingTokenizer:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.decoder = tokenizer.decoder
        self.num_decoded = 0

    def id_to_token(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
