"""The executor that runs a model."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from baton.core.errors import OutOfMemoryError, StartupError
from baton.core.generation import SamplingParams
from baton.engine.batch import BatchPlan, SequenceSlice, StepOutput
from baton.engine.decode_graphs import CudaRecorder, DecodeGraphs
from baton.engine.draws import draw_tokens
from baton.engine.flashinfer_attention import FlashInferAttention, open_flashinfer
from baton.engine.kv_pool import torch_dtype
from baton.engine.logprobs import logprobs_of
from baton.engine.memory_plan import SCORED_ROWS
from baton.engine.model import DecoderModel
from baton.engine.model_config import DecoderConfig
from baton.engine.native.build import build
from baton.engine.native.chunks import ChunkKernels
from baton.engine.native.decoder import NativeDecoder
from baton.engine.native.race import NativeRace
from baton.engine.out_of_memory import is_out_of_memory
from baton.engine.sampler import TorchRace, sample, torch_race
from baton.engine.sharding import WHOLE
from baton.engine.staging import Staging
from baton.engine.weights import DecoderWeights, WeightForm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from baton.core.generation import TokenLogprobs
    from baton.core.model import KVLayout
    from baton.engine.batch import ScoredIds
    from baton.engine.cores import CoreShare
    from baton.engine.decode_graphs import Recorder
    from baton.engine.executor import Executor
    from baton.engine.kv_pool import KVPool
    from baton.engine.rank_group import RankGroup
    from baton.engine.sampler import Race

_log = logging.getLogger(__name__)


class TorchExecutor:
    """Runs steps of a decoder over a pool. Implements `Executor`; used from one thread, keeps no sequence state.

    With a `decoder`, slices of one token go to it; `race` searches the logits. Computes with as many threads as
    `cores` gives, or without it with those that PyTorch had when this was made.
    """

    def __init__(
        self,
        model: DecoderModel,
        pool: KVPool,
        decoder: NativeDecoder | None = None,
        cores: CoreShare | None = None,
        race: Race = torch_race,
    ) -> None:
        self.model = model
        self._cores = cores
        self._num_threads = torch.get_num_threads()
        self._decoder = decoder
        self._race = race
        if pool.device.type != "cpu":
            self._race = TorchRace(Staging(pool.device).download)
        self._graphs: DecodeGraphs | None = None
        self._pool = pool
        self.layout: KVLayout = pool.layout
        self.num_blocks = pool.num_blocks
        self.vocab_size = model.config.vocab_size
        self.attention = model.attention.name
        self.max_context_tokens = model.config.max_positions

    @classmethod
    def from_folder(
        cls,
        path: Path,
        *,
        pool: KVPool,
        quantization: str = "none",
        group: RankGroup | None = None,
        cores: CoreShare | None = None,
    ) -> TorchExecutor:
        """Loads the model in `path`, in the dtype and on the device of `pool`, made with this model's layout.

        In a `group` that is the layout of this rank's part, and only that part is loaded; single tokens run with the
        others. Blocks for the load, and for seconds where the kernels are compiled. Raises StartupError.

        A CUDA device becomes the current one of this thread, which makes all calls.
        """
        whole = DecoderConfig.from_folder(path)
        shard = WHOLE if group is None else group.shard
        config = whole.part(shard)
        expected = config.kv_layout(pool.layout.block_size, pool.layout.dtype)
        if pool.layout != expected:
            raise StartupError(f"{path}: needs KV blocks of {expected}, the pool has {pool.layout}")
        form = WeightForm(
            dtype=torch_dtype(pool.layout.dtype), device=str(pool.device), quantization=quantization, shard=shard
        )
        weights = DecoderWeights.from_folder(path, whole, form)
        if pool.device.type == "cuda":
            torch.cuda.set_device(pool.device)
            return cls(DecoderModel(config, weights, group, attention=open_flashinfer(config, pool)), pool)
        library = build()
        if library is None:
            return cls(DecoderModel(config, weights, group), pool, cores=cores)
        num_threads = torch.get_num_threads()
        kernels = ChunkKernels(config, library, num_threads=num_threads)
        model = DecoderModel(config, weights, group, kernels=kernels)
        race = NativeRace(library)
        if group is not None:
            return cls(model, pool, cores=cores, race=race)
        decoder = NativeDecoder(model, pool, library=library, num_threads=num_threads)
        return cls(model, pool, decoder, cores, race)

    def execute(self, plan: BatchPlan, pause: Callable[[], None] | None = None) -> StepOutput:
        """Runs the step; see `Executor.execute`. Pauses between layers where PyTorch computes them on a CPU."""
        plan.assert_fits(block_size=self.layout.block_size, num_blocks=self.num_blocks)
        if not plan.slices:
            return StepOutput(tokens=())
        self._take_cores()
        try:
            scores: dict[str, list[TokenLogprobs]] = {}
            output = draw_tokens(self._forward(plan, scores, pause), plan, self._sample, scores)
            if all(token is None for token in output.tokens):
                self._await_kernels()
            return output
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        # Out here, because the caught error holds the frames of the failed step, and with them all that it allocated.
        raise OutOfMemoryError(
            f"a step of {plan.num_tokens} tokens does not fit into memory: lower engine.max_num_batched_tokens or "
            "engine.max_num_seqs",
            retry_after_s=None,
        )

    def _await_kernels(self) -> None:
        """What a step samples has been waited for; one that samples nothing has only enqueued its work on a device."""
        if self._pool.device.type == "cuda":
            torch.cuda.current_stream(self._pool.device).synchronize()

    def logits(self, plan: BatchPlan) -> torch.Tensor:
        """Runs the step without choosing tokens: the float32 logits [slices that sample, vocab_size] in its order.

        They are valid until the next call. Blocks.
        """
        plan.assert_fits(block_size=self.layout.block_size, num_blocks=self.num_blocks)
        return self._forward(plan, {}, None)

    def rest(self) -> None:
        """Leaves the cores to other engines; see `Executor.rest`."""
        if self._cores is not None:
            self._cores.rest()

    def _take_cores(self) -> None:
        if self._cores is None:
            return
        num_threads = self._cores.take()
        if num_threads != self._num_threads:
            self._num_threads = num_threads
            torch.set_num_threads(num_threads)
            self.model.use_threads(num_threads)
            if self._decoder is not None:
                self._decoder.use_threads(num_threads)

    def follow(self, plan: BatchPlan) -> None:
        """Computes a step as `execute` does, up to the logits: the part of a rank that samples nothing. Not empty."""
        self._take_cores()
        self._forward(plan, {}, None)

    def check(self) -> None:
        """Nothing to lose: all of it is in this process."""

    def record_decode(self, max_rows: int, recorder: Recorder | None = None) -> None:
        """Has steps of at most `max_rows` single tokens replayed, from recordings that `warm_up` makes: on CUDA.

        They keep the pool's last block for themselves, so `num_blocks` is one less. Where steps can't be recorded the
        log says why, and they run as they do without.
        """
        attention = self.model.attention
        if not isinstance(attention, FlashInferAttention):
            _log.warning("decode steps are not recorded: PyTorch's attention changes its shapes with each")
        elif self._pool.num_blocks < 2:
            _log.warning("decode steps are not recorded: that takes a block, and the pool has one")
        else:
            self._graphs = DecodeGraphs(self.model, self._pool, attention, recorder or CudaRecorder(), max_rows)
            self.num_blocks = self._graphs.num_usable_blocks

    def warm_up(self) -> None:
        """Runs a prefill and a decode step in block 0, and a sampled row; see `Executor.warm_up`."""
        warm_up(self)
        if self._graphs is None:
            return
        try:
            self._graphs.record()
        except Exception as error:  # of PyTorch, of FlashInfer, of what that is built on: steps run without
            _log.warning("decode steps are not recorded: %s", (str(error) or type(error).__name__).splitlines()[0])
            self._graphs = None

    def _forward(
        self, plan: BatchPlan, scores: dict[str, list[TokenLogprobs]], pause: Callable[[], None] | None
    ) -> torch.Tensor:
        """Logits [slices that sample, vocab_size] in the plan's order; scored slices' results go to `scores`."""
        if self._graphs is not None and self._graphs.takes(plan):
            return self._graphs.forward(plan)
        if self._decoder is None:
            return self._run_model(plan, scores, pause)
        singles = [piece for piece in plan.slices if _is_single(piece)]
        if len(singles) == len(plan.slices):
            return self._decoder.forward(plan)
        if not singles:
            return self._run_model(plan, scores, pause)
        chunks = [piece for piece in plan.slices if not _is_single(piece)]
        # The decoder's logits last until its next step, which may be one that runs in a pause: chunks come first.
        from_chunks = self._run_model(BatchPlan(slices=chunks), scores, pause)
        from_singles = self._decoder.forward(BatchPlan(slices=singles))
        is_single = torch.tensor([_is_single(piece) for piece in plan.slices if piece.sampling is not None])
        logits = torch.empty(len(is_single), self.vocab_size)
        logits[is_single] = from_singles
        logits[~is_single] = from_chunks
        return logits

    def _run_model(
        self, plan: BatchPlan, scores: dict[str, list[TokenLogprobs]], pause: Callable[[], None] | None
    ) -> torch.Tensor:
        """Like `_forward`, by PyTorch."""

        def between_layers() -> None:
            if pause is not None:
                pause()
            self._take_cores()

        # On a GPU the layers are only enqueued here: what ran in a pause would run behind all of them.
        hidden = self.model.hidden(plan, self._pool, between_layers if self._pool.device.type == "cpu" else None)
        start = 0
        for piece in plan.slices:
            if piece.scored is not None:
                scores[piece.attempt_id] = self._score(hidden[start : start + len(piece.token_ids)], piece.scored)
            start += len(piece.token_ids)
        return self.model.sampled_logits(hidden, plan)

    def _score(self, hidden: torch.Tensor, scored: ScoredIds) -> list[TokenLogprobs]:
        """In parts: the logits of a whole chunk are large."""
        logprobs: list[TokenLogprobs] = []
        for first in range(0, len(scored.token_ids), SCORED_ROWS):
            token_ids = scored.token_ids[first : first + SCORED_ROWS]
            logits = self.model.logits(hidden[first : first + len(token_ids)])
            logprobs += logprobs_of(logits, token_ids, [scored.top] * len(token_ids))
        return logprobs

    def _sample(self, logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
        return sample(logits, params, positions, self._race)


def warm_up(executor: Executor) -> None:
    """What `Executor.warm_up` does."""
    num_tokens = min(executor.layout.block_size, executor.max_context_tokens) - 1
    prompt, sampling = [0] * max(num_tokens, 1), SamplingParams()
    for token_ids, start in ((prompt, 0), ([0], num_tokens)):
        piece = SequenceSlice(
            attempt_id="warm-up", token_ids=token_ids, start_position=start, block_table=[0], sampling=sampling
        )
        executor.execute(BatchPlan(slices=[piece]))


def _is_single(piece: SequenceSlice) -> bool:
    """Whether the decoder computes the slice: it gives no logits but the last."""
    return len(piece.token_ids) == 1 and piece.scored is None
