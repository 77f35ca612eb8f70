"""Forward and sampling on the compute stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sidestream.engine.batch import Batch
from sidestream.engine.copies import Copies, GenerationBatchResult
from sidestream.engine.memory import DeviceMemory
from sidestream.engine.outputs import LogitsProcessorOutput, LogprobBlock, ScorePlan, TapGroup
from sidestream.engine.sampling import sample, score, score_in_pieces
from sidestream.engine.streams import Launched, Streams
from sidestream.models.interpreter import Interpreter, Spans, Tap

Masks = npt.NDArray[np.uint32]


class Runner:
    """Runs batches, in order. All methods with a leading underscore run on the compute stream."""

    def __init__(self, decoder: Interpreter, memory: DeviceMemory, streams: Streams, copies: Copies) -> None:
        self.decoder = decoder
        self.memory = memory
        self.streams = streams
        self.copies = copies

    def run_batch(self, batch: Batch, masks: Masks | None = None) -> Launched[GenerationBatchResult]:
        """Launch the forward, the sampling and the conditional copy of one step.

        masks: [sampled rows, ceil(vocabulary/32)] packed grammar masks, if the host has them. A batch with a grammar and without masks
        is only run forward; its result carries `delay_sample_func`, and `launch_batch_sample_if_needed` does the rest.
        """
        return self.streams.compute.launch(self._run_batch, batch, masks)

    def launch_batch_sample_if_needed(
        self, launched: Launched[GenerationBatchResult], batch: Batch, fill_masks: Callable[[Batch], Masks]
    ) -> Launched[GenerationBatchResult]:
        """Sample and copy a step whose sampling had to wait for the results of the step before it. Returns what to wait for."""
        if not batch.has_constraint:
            return launched
        return self.streams.compute.launch(self._sample_late, launched, batch, fill_masks(batch))

    def load(self, load: Callable[[str], Interpreter], path: str) -> None:
        """Go on with other weights. Nothing may be in flight. Raises what `load` raises, and the old weights stay."""
        failure = self.streams.compute.launch(self._load, load, path).result()
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End the streams and drop the weights, the KV cache and the arena, whoever still refers to the engine. Nothing runs after it."""
        self.streams.close()
        del self.decoder, self.memory, self.copies.arena

    def _load(self, load: Callable[[str], Interpreter], path: str) -> Exception | None:
        """An error is returned: one that is raised ends the stream."""
        try:
            self.decoder = load(path)
        except Exception as error:
            return error
        return None

    def _run_batch(self, batch: Batch, masks: Masks | None) -> GenerationBatchResult:
        self.memory.update(batch.page_updates, batch.token_uploads)
        taps = batch.outputs.taps
        copied = [self._tap(group) for group in taps.copied] if taps else []
        kept = [self._tap(group) for group in taps.kept] if taps else []
        spans = Spans(batch.slots, batch.starts, batch.lengths)
        hidden, logits = self.decoder.forward(spans, self.memory, copied + kept, batch.sampled_rows() if batch.sampled else None)
        final_layer = self.decoder.spec.num_layers
        result = GenerationBatchResult(
            logits_output=LogitsProcessorOutput(
                input_token_logprobs=self._score_inputs(batch.outputs.input_token, hidden),
                hidden_states=tuple(tap.out for tap in copied) if copied else None,
            ),
            next_token_ids=None,
            copies=self.copies,
            kept_hidden_states=tuple(tap.out for tap in kept),
            forward_tokens=batch.num_tokens,
            sampled_rows=len(batch.sampled),
            final_bytes=sum(tap.out[:, :1].nbytes * tap.layers.count(final_layer) for tap in copied),
        )
        if logits is not None:  # [sampled, vocabulary] float32
            sample_now = partial(self._sample, batch, logits)
            if batch.has_constraint and masks is None:
                result.delay_sample_func = sample_now
                return result
            self._take_sample(result, *sample_now(masks))
        result.copy_to_cpu(return_logprob=batch.return_logprob, return_hidden_states=batch.return_hidden_states)
        return result

    def _sample_late(self, launched: Launched[GenerationBatchResult], batch: Batch, masks: Masks) -> GenerationBatchResult:
        result = launched.result()
        assert result.delay_sample_func is not None
        self._take_sample(result, *result.delay_sample_func(masks))
        result.delay_sample_func = None  # it holds the logits
        result.copy_to_cpu(return_logprob=batch.return_logprob, return_hidden_states=batch.return_hidden_states)
        return result

    @staticmethod
    def _take_sample(result: GenerationBatchResult, tokens: Tensor, logprobs: LogprobBlock | None) -> None:
        result.next_token_ids = tokens
        result.logits_output = result.logits_output._replace(next_token_logprobs=logprobs)

    def _sample(self, batch: Batch, logits: Tensor, masks: Masks | None) -> tuple[Tensor, LogprobBlock | None]:
        plan, memory = batch.sampling, self.memory
        sampled = sample(logits, plan, memory.token_table, memory.upload, masks)
        memory.put_tokens(plan.slots, plan.lengths, sampled.tokens)
        wanted = batch.outputs.next_token
        return sampled.tokens, None if wanted is None else self._score_next(wanted, logits, sampled.processed, sampled.tokens.clamp(min=0))

    def _score_next(self, wanted: ScorePlan, logits: Tensor, processed: Tensor, tokens: Tensor) -> LogprobBlock:
        upload = self.memory.upload
        rows = upload(wanted.rows)
        chosen = logits[rows]  # [rows, vocabulary]
        if wanted.processed is not None:
            chosen = torch.where(upload(wanted.processed)[:, None], processed[rows], chosen)
        return score(chosen, tokens[rows], wanted, upload)

    def _score_inputs(self, wanted: ScorePlan | None, hidden: Tensor) -> LogprobBlock | None:
        if wanted is None:
            return None
        return score_in_pieces(wanted, hidden, self.decoder.logits, self.decoder.spec.vocab_size, self.memory.upload)

    def _tap(self, group: TapGroup) -> Tap:
        dtype = self.decoder.dtype if group.dtype == "model" else getattr(torch, group.dtype)
        shape = (len(group.rows), len(group.layers), self.decoder.spec.hidden_size)
        return Tap(group.rows, group.layers, torch.empty(shape, dtype=dtype, device=self.decoder.device))
