"""`baton eval`: what a precision loses and gains on a text that comes with the package."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from tokenizers import Tokenizer

from baton.core.errors import StartupError
from baton.engine.model_config import DecoderConfig
from baton.engine.precision import require_quantization, resolve_dtype
from baton.engine.quality import (
    MAX_PERPLEXITY_INCREASE,
    MIN_AGREEMENT,
    RATE_BATCHES,
    WINDOW,
    Precision,
    Reading,
    read,
)
from baton.engine.threads import use_threads
from decode_worker.settings import DecodeWorkerSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

TEXT = Path(__file__).with_name("eval.txt")
REFERENCE = Precision(dtype="float32", quantization="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The readings: float32's first, that of the configuration in question last.

    Where that is quantized, its element type alone stands between them.
    """

    model: str
    num_threads: int
    num_tokens: int
    readings: tuple[Reading, ...]

    @classmethod
    def run(cls, flags: Sequence[str]) -> Evaluation:
        """Measures what `flags` of a decode worker, the environment and its file ask for. Blocks for minutes.

        Raises StartupError in one line when a setting or the model is not right.
        """
        settings = DecodeWorkerSettings.load(flags)
        engine, folder = settings.engine, settings.model.path
        dtype = resolve_dtype(engine.dtype, engine.device)
        config = DecoderConfig.from_folder(folder)
        require_quantization(engine.quantization, engine.device, config.stored_quantization)
        asked = Precision(dtype=dtype, quantization=engine.quantization)
        # In this order, without repetitions.
        wanted = dict.fromkeys((REFERENCE, Precision(dtype=dtype, quantization="none"), asked))
        token_ids = _tokenize(folder)
        use_threads(engine.num_threads)
        return cls(
            model=settings.model.name,
            num_threads=engine.num_threads,
            num_tokens=len(token_ids),
            readings=tuple(read(folder, token_ids, precision, engine.device) for precision in wanted),
        )

    @property
    def reference(self) -> Reading:
        """That of float32."""
        return self.readings[0]

    @property
    def is_tolerable(self) -> bool:
        """Whether the configuration in question loses no more than the thresholds allow."""
        return self.readings[-1].is_tolerable(self.reference)


def show_evaluation(evaluation: Evaluation, console: Console) -> None:
    """Prints the table for people."""
    console.print(
        f"{evaluation.model}, {evaluation.num_tokens} tokens of text, threads: {evaluation.num_threads}",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    rates = [f"tok/s at {size}" for size in RATE_BATCHES]
    for name in ("perplexity", "increase", "same choice", "weights", *rates):
        table.add_column(name, justify="right")
    for reading in evaluation.readings:
        table.add_row(
            reading.precision.name,
            f"{reading.perplexity:.3f}",
            f"{reading.perplexity_increase(evaluation.reference):+.2%}",
            f"{reading.agreement(evaluation.reference):.1%}",
            f"{reading.weight_bytes / 1e6:,.0f} MB",
            *(f"{reading.tokens_per_s[size]:,.1f}" for size in RATE_BATCHES),
        )
    table.add_row("tolerated", "", f"{MAX_PERPLEXITY_INCREASE:+.2%}", f"{MIN_AGREEMENT:.1%}")
    console.print(table)
    verdict = "within" if evaluation.is_tolerable else "over"
    console.print(f"{evaluation.readings[-1].precision.name}: {verdict} the tolerated loss", highlight=False)


def evaluation_as_json(evaluation: Evaluation) -> str:
    """The same for programs; shares, not percents."""
    return json.dumps(
        {
            "model": evaluation.model,
            "num_threads": evaluation.num_threads,
            "num_tokens": evaluation.num_tokens,
            "tolerated": {"perplexity_increase": MAX_PERPLEXITY_INCREASE, "agreement": MIN_AGREEMENT},
            "is_tolerable": evaluation.is_tolerable,
            "readings": [
                {
                    "dtype": reading.precision.dtype,
                    "quantization": reading.precision.quantization,
                    "perplexity": reading.perplexity,
                    "perplexity_increase": reading.perplexity_increase(evaluation.reference),
                    "agreement": reading.agreement(evaluation.reference),
                    "weight_bytes": reading.weight_bytes,
                    "decode_tokens_per_s": {str(size): rate for size, rate in reading.tokens_per_s.items()},
                }
                for reading in evaluation.readings
            ],
        },
        indent=2,
    )


def _tokenize(folder: Path) -> list[int]:
    file = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise StartupError(f"{file}: cannot be read as a tokenizer") from error
    ids: list[int] = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False).ids
    assert len(ids) >= WINDOW
    return ids
