from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from baton.core.errors import InvalidArgumentError, ResourceExhaustedError, StartupError
from baton.core.settings import ModelSettings
from gateway.served_model import load_served_model
from gateway.tokenization import ChatMessage, Tokenizer, TokenizerPool

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system must come first') }}{% endif %}"
    "{{ '<s>' + m.role + ':' + m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant:' }}{% endif %}"
)


def write_folder(folder: Path, template: str | None = TEMPLATE) -> Path:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    library.train_from_iterator(["the cat and the hat"], trainer)
    library.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    library.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path)


def test_round_trip_and_special_tokens(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    library = Library.from_file(str(folder / "tokenizer.json"))
    text = "the cat 漢 <s>"
    ids = tokenizer.encode(text)
    assert ids == library.encode(text).ids
    assert tokenizer.decode(ids) == "the cat 漢 "
    assert tokenizer.decode(ids, include_special_tokens=True) == text
    assert tokenizer.longest_token_chars == max(map(len, library.get_vocab()))
    assert tokenizer.eos_token_id == library.token_to_id("</s>")


def test_the_chat_template_opens_the_assistants_turn(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.has_chat_template
    ids = tokenizer.encode_chat([ChatMessage("system", "be brief"), ChatMessage("user", "hi")])
    shown = tokenizer.decode(ids, include_special_tokens=True)
    assert shown == "<s>system:be brief</s><s>user:hi</s><s>assistant:"


def test_a_template_may_refuse_and_says_why(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    with pytest.raises(InvalidArgumentError) as caught:
        tokenizer.encode_chat([ChatMessage("user", "hi"), ChatMessage("system", "x")])
    assert (caught.value.field, caught.value.reason) == ("messages", "CHAT_TEMPLATE")
    assert caught.value.description.endswith(": system must come first")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content + 1 }}",
        "{% for",
        # The sandbox: nothing of Python is in reach.
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_a_template_that_fails_says_nothing_of_the_prompt(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, template))
    with pytest.raises(InvalidArgumentError) as caught:
        tokenizer.encode_chat([ChatMessage("user", "SECRET")])
    assert "SECRET" not in str(caught.value)


def test_a_model_without_a_template(tmp_path: Path) -> None:
    assert not Tokenizer.load(write_folder(tmp_path, None)).has_chat_template


@pytest.mark.parametrize("content", [None, "", "{", '{"model": 3}', "[]"])
def test_a_broken_tokenizer_is_one_line(folder: Path, content: str | None) -> None:
    file = folder / "tokenizer.json"
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(StartupError) as caught:
        Tokenizer.load(folder)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "not a JSON object"),
        (lambda folder: (folder / "config.json").write_text('{"vocab_size": 5}'), "max_position_embeddings"),
    ],
)
def test_a_broken_model_folder_is_one_line(folder: Path, change: Callable[[Path], object], words: str) -> None:
    (folder / "config.json").write_text('{"vocab_size": 300, "max_position_embeddings": 64}')
    change(folder)
    with pytest.raises(StartupError, match=words):
        load_served_model(ModelSettings(path=folder), Tokenizer.load(folder), default_max_tokens=5)


def test_a_context_beyond_the_models_own_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"vocab_size": 300, "max_position_embeddings": 64}')
    settings = ModelSettings(path=folder, max_context_tokens=65)
    with pytest.raises(StartupError, match="65 is over the model's own 64"):
        load_served_model(settings, Tokenizer.load(folder), default_max_tokens=5)


class SlowTokenizer:
    """Blocks until it is let go."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.has_begun = threading.Event()

    def encode(self, text: str) -> list[int]:
        self.has_begun.set()
        assert self.gate.wait(60)
        return [len(text)]


async def test_the_pool_refuses_what_does_not_fit_its_queue() -> None:
    slow = SlowTokenizer()
    pool = TokenizerPool(slow, num_threads=1, max_pending=2)
    first, second = asyncio.ensure_future(pool.encode("a")), asyncio.ensure_future(pool.encode("bb"))
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhaustedError) as caught:
        await pool.encode("ccc")
    assert caught.value.reason == "TOKENIZER_BUSY"
    assert caught.value.retry_after_s > 0
    slow.gate.set()
    assert await asyncio.gather(first, second) == [[1], [2]]
    assert await pool.encode("ccc") == [3]
    pool.close()


async def test_a_cancelled_text_counts_until_its_thread_is_done() -> None:
    slow = SlowTokenizer()
    pool = TokenizerPool(slow, num_threads=1, max_pending=1)
    running = asyncio.ensure_future(pool.encode("a"))
    await asyncio.sleep(0)
    assert await asyncio.to_thread(slow.has_begun.wait, 60)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    with pytest.raises(ResourceExhaustedError):
        await pool.encode("b")
    slow.gate.set()
    async with asyncio.timeout(60):
        while True:
            try:
                assert await pool.encode("b") == [1]
                break
            except ResourceExhaustedError:
                await asyncio.sleep(0.01)
    pool.close()


async def test_the_event_loop_runs_on_while_a_long_text_is_tokenized(folder: Path) -> None:
    pool = TokenizerPool(Tokenizer.load(folder), num_threads=1, max_pending=1)
    work = asyncio.ensure_future(pool.encode("the cat and the hat " * 40_000))
    num_turns = 0
    while not work.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert len(work.result()) > 100_000
    assert num_turns > 20
    pool.close()


def test_the_gateway_loads_no_torch() -> None:
    """A gateway computes nothing: 200 MB and two seconds of start that it does not need."""
    code = "import sys, gateway.__main__; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
