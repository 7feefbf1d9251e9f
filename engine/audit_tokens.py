"""Are emitted tokens the target's own choice? Checked by the logits at their positions."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.grammar import Grammar
from engine.noise import Stream
from engine.request import AcceptanceRule, GenerationRequest
from engine.sampler import RowSampling, Sampler, TokenHistory, uses_penalties


@dataclass(frozen=True, slots=True)
class Mismatch:
    """An emitted token, counted in the output, that the target did not choose, and by how much
    the target's own choice scored higher."""

    index: int
    expected_token_id: int
    margin: float


class TokenCheck:
    """Walks over the output of one request, as its logits come."""

    def __init__(
        self,
        sampler: Sampler,
        request: GenerationRequest,
        output_token_ids: Sequence[int],
        guarded_token_ids: Sequence[int],
        grammar: Grammar | None,
        epsilon: float,
    ) -> None:
        """grammar: as at the first output token."""
        self._sampler = sampler
        self._request = request
        self._emitted = tuple(output_token_ids)
        self._guarded_token_ids = tuple(guarded_token_ids)
        self._grammar = grammar
        self._epsilon = epsilon
        self._num_checked = 0
        self._history: TokenHistory | None = None
        if uses_penalties(request.sampling):
            self._history = TokenHistory.of_prompt(
                request.prompt_token_ids, sampler.vocab_size, sampler.device
            )
        sampling = request.sampling
        self._by_rejection = (
            not sampling.is_greedy and sampling.acceptance_rule is AcceptanceRule.REJECTION
        )

    @torch.inference_mode()
    def check(self, logits: torch.Tensor) -> list[Mismatch]:
        """Those among the next tokens, one per position of logits [n, V].

        Under the rejection rule any token of the target's distribution may be emitted: a mismatch
        is one that has no probability there, with an infinite margin; see `_at_the_edge` for those
        that a filter would let pass if rounding had fallen otherwise.
        """
        start = self._num_checked
        chunk = self._emitted[start : start + len(logits)]
        if not chunk:
            return []
        row = self._row(start, chunk)
        scores = self._sampler.process(logits.clone(), [row])
        index = torch.tensor(chunk, device=scores.device).unsqueeze(1)
        if self._by_rejection:
            chosen = scores.gather(1, index).squeeze(1)
            best, expected = scores.max(dim=1)
            is_wrong = torch.isinf(chosen)
        else:
            scores += self._sampler.noise([(row, Stream.TARGET)])
            chosen = scores.gather(1, index).squeeze(1)
            best, expected = scores.max(dim=1)
            is_wrong = expected != index.squeeze(1)
        wrong = is_wrong.nonzero().flatten()
        found: list[Mismatch] = []
        if len(wrong):
            margins = best - chosen
            edge = self._at_the_edge(logits, row, wrong, index, expected)
            margins[wrong] = torch.where(edge.isnan(), margins[wrong], edge)
            found = [
                Mismatch(start + offset, int(expected[offset]), margins[offset].item())
                for offset in wrong.tolist()
            ]
        self._num_checked += len(chunk)
        if self._history is not None:
            self._history.append(chunk)
        if self._grammar is not None:
            self._grammar.commit(chunk)
        return found

    def _at_the_edge(
        self,
        logits: torch.Tensor,  # [n, V]
        row: RowSampling,
        wrong: torch.Tensor,  # [M] offsets of mismatches
        emitted: torch.Tensor,  # [n, 1]
        expected: torch.Tensor,  # [n]
    ) -> torch.Tensor:
        """[M] margins of mismatches that hang on a filter (top_k, top_p, ...), NaN of the others.

        A filter keeps or drops a token as a whole, so a difference in the last bits may turn
        certainty into nothing. Whether that happened is seen by moving the emitted token up and
        the expected one down by epsilon: if that changes which of the two the filters keep, the
        margin is that between the moved ones.
        """
        nudged = logits.clone()
        chosen = emitted.squeeze(1)[wrong]
        before = self._sampler.process(nudged.clone(), [row])[wrong]
        nudged[wrong, chosen] += self._epsilon
        nudged[wrong, expected[wrong]] -= self._epsilon
        scores = self._sampler.process(nudged, [row])
        if not self._by_rejection:
            scores += self._sampler.noise([(row, Stream.TARGET)])
        scores = scores[wrong]
        each = torch.arange(len(wrong), device=scores.device)
        is_let_in = before[each, chosen].isinf() & scores[each, chosen].isfinite()
        is_left_out = scores[each, expected[wrong]].isinf() & scores[each, chosen].isfinite()
        margins = scores.max(dim=1).values - scores[each, chosen]
        if self._by_rejection:
            margins = torch.zeros_like(margins)  # kept is all that this rule asks of a token
        return torch.where(is_let_in | is_left_out, margins, torch.full_like(margins, torch.nan))

    def _row(self, start: int, chunk: Sequence[int]) -> RowSampling:
        request = self._request
        return RowSampling(
            params=request.sampling,
            num_positions=len(chunk),
            first_position=len(request.prompt_token_ids) + start,
            draft_token_ids=chunk[:-1],
            history=self._history,
            num_guarded_positions=max(0, min(len(chunk), request.stopping.min_tokens - start)),
            guarded_token_ids=self._guarded_token_ids,
            allowed=self._grammar.masks(chunk[:-1]) if self._grammar is not None else None,
        )
