"""From logits to tokens: which processors apply at which position, and the draw.

A position is one place of the output of one row; a verify step has K + 1 of them per row.
Rows that are greedy and use no processor take a bare argmax over the model's own logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.noise import Stream, gumbel_noise, noise_key
from engine.processors import (
    filter_min_p,
    filter_top_k,
    filter_top_p,
    filter_typical_p,
    penalize,
)
from engine.request import SamplingParams
from engine.upload import upload, upload_tensor


@dataclass(slots=True)
class TokenHistory:
    """What penalties count, kept only for requests that use them."""

    seen: torch.Tensor  # [V] bool: in prompt or output
    output_counts: torch.Tensor  # [V] float32

    @classmethod
    def of_prompt(
        cls, prompt_token_ids: Sequence[int], vocab_size: int, device: torch.device
    ) -> "TokenHistory":
        seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        seen[upload(list(prompt_token_ids), device)] = True
        return cls(seen, torch.zeros(vocab_size, device=device))

    def append(self, token_ids: Sequence[int]) -> None:
        index = upload(list(token_ids), self.seen.device)
        self.seen[index] = True
        self.output_counts.index_add_(
            0, index, torch.ones(len(token_ids), device=self.output_counts.device)
        )


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How one row's consecutive positions are drawn.

    first_position is the index of the first drawn token in prompt + output; positions j > 0
    follow after draft_token_ids[:j]. preceding_token_ids come before the first position but
    are not in the history yet (a drafter's earlier drafts). guarded_token_ids cannot be drawn
    at the first num_guarded_positions (end-of-sequence ids before min_tokens).
    """

    params: SamplingParams
    num_positions: int
    first_position: int
    draft_token_ids: Sequence[int] = ()
    history: TokenHistory | None = None
    preceding_token_ids: Sequence[int] = ()
    num_guarded_positions: int = 0
    guarded_token_ids: tuple[int, ...] = ()
    allowed: torch.Tensor | None = None  # [num_positions, V] bool, from a grammar

    @property
    def is_plain(self) -> bool:
        """A bare argmax decides."""
        params = self.params
        return (
            params.is_greedy
            and not self.num_guarded_positions
            and self.allowed is None
            and not changes_logits(params)
        )


def changes_logits(params: SamplingParams) -> bool:
    """Whether a processor other than temperature and the filters touches the logits."""
    return bool(
        params.logit_bias
        or params.allowed_token_ids
        or params.banned_token_ids
        or uses_penalties(params)
    )


def uses_penalties(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )


@dataclass(slots=True)
class Sampler:
    """Draws tokens for one vocabulary on one device."""

    vocab_size: int
    device: torch.device
    _token_ids: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._token_ids = torch.arange(self.vocab_size, device=self.device)

    def draw(
        self,
        logits: torch.Tensor,
        rows: Sequence[RowSampling],
        streams: Sequence[Stream] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [M] and whether each position's logits are finite where it matters [M].

        logits [M, V] hold the rows' positions in order. The draw at a position is the argmax
        of the processed logits plus the Gumbel noise of (seed, position, stream); at
        temperature 0 there is no noise. streams (one per row) default to the target's.
        """
        best, token_ids = logits.max(dim=-1)
        is_sound = torch.isfinite(best)
        if not all(row.is_plain for row in rows):
            index = self._positions(rows, plain=False)
            streams = streams or [Stream.TARGET] * len(rows)
            special = [(r, s) for r, s in zip(rows, streams, strict=True) if not r.is_plain]
            scores = self.process(logits.index_select(0, index), [row for row, _ in special])
            scores += self.noise(special)
            best, drawn = scores.max(dim=-1)
            token_ids = token_ids.index_copy(0, index, drawn)
            is_sound = is_sound.index_copy(0, index, torch.isfinite(best) & is_sound[index])
        return token_ids, is_sound

    def process(self, logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
        """[P, V] float32: logits after every processor and temperature; softmax of it is the
        distribution that is drawn from. Greedy rows keep their logits unscaled."""
        logits = logits.float()
        logits = self._constrain(logits, rows)
        if any(uses_penalties(row.params) for row in rows):
            logits = self._penalize(logits, rows)
        params = [row.params for row in rows for _ in range(row.num_positions)]
        if any(p.temperature not in (0.0, 1.0) for p in params):
            logits = logits / self._column([p.temperature or 1.0 for p in params])
        sampled = [p for p in params if not p.is_greedy]
        if any(p.top_k for p in sampled):
            top_k = [0 if p.is_greedy else p.top_k for p in params]
            column = upload(top_k, self.device).unsqueeze(1)
            logits = filter_top_k(logits, column, max(top_k))
        if any(p.top_p < 1 for p in sampled):
            logits = filter_top_p(
                logits, self._column([1.0 if p.is_greedy else p.top_p for p in params])
            )
        if any(p.min_p > 0 for p in sampled):
            logits = filter_min_p(
                logits, self._column([0.0 if p.is_greedy else p.min_p for p in params])
            )
        if any(p.typical_p < 1 for p in sampled):
            logits = filter_typical_p(
                logits, self._column([1.0 if p.is_greedy else p.typical_p for p in params])
            )
        return logits

    def _positions(self, rows: Sequence[RowSampling], *, plain: bool) -> torch.Tensor:
        index: list[int] = []
        start = 0
        for row in rows:
            if row.is_plain == plain:
                index.extend(range(start, start + row.num_positions))
            start += row.num_positions
        return upload(index, self.device)

    def _column(self, values: Sequence[float]) -> torch.Tensor:
        return upload(values, self.device, torch.float32).unsqueeze(1)

    def noise(self, rows: Sequence[tuple[RowSampling, Stream]]) -> torch.Tensor:
        """[P, V] noise of the rows' positions, zero where a row is greedy; [1, 1] if all are."""
        keys: list[int] = []
        index: list[int] = []
        place = 0
        for row, stream in rows:
            for offset in range(row.num_positions):
                if not row.params.is_greedy:
                    keys.append(noise_key(row.params.seed, row.first_position + offset, stream))
                    index.append(place)
                place += 1
        if not keys:
            return torch.zeros(1, 1, device=self.device)
        noise = gumbel_noise(keys, self._token_ids)
        if len(keys) == place:
            return noise
        padded = torch.zeros(place, self.vocab_size, device=self.device)
        return padded.index_copy_(0, upload(index, self.device), noise)

    def _constrain(self, logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
        """Allowed and banned tokens, bias and guarded stop tokens; `logits` is ours to change."""
        start = 0
        for row in rows:
            stop, params = start + row.num_positions, row.params
            part = logits[start:stop]
            if params.allowed_token_ids:
                allowed = upload(params.allowed_token_ids, self.device)
                kept = part[:, allowed]
                part.fill_(float("-inf"))
                part[:, allowed] = kept
            if params.logit_bias:
                ids, biases = zip(*params.logit_bias, strict=True)
                part[:, upload(ids, self.device)] += upload(biases, self.device, torch.float32)
            if params.banned_token_ids:
                part[:, upload(params.banned_token_ids, self.device)] = float("-inf")
            if row.allowed is not None:
                part.masked_fill_(~upload_tensor(row.allowed, self.device), float("-inf"))
            if row.num_guarded_positions and row.guarded_token_ids:
                guarded = upload(row.guarded_token_ids, self.device)
                part[: row.num_guarded_positions, guarded] = float("-inf")
            start = stop
        return logits

    def _penalize(self, logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
        seen = torch.zeros(logits.shape, dtype=torch.bool, device=self.device)
        counts = torch.zeros(logits.shape, device=self.device)
        repetition, presence, frequency = [], [], []
        start = 0
        for row in rows:
            stop, params = start + row.num_positions, row.params
            if row.history is not None:
                seen[start:stop] = row.history.seen
                counts[start:stop] = row.history.output_counts
                for token_id in row.preceding_token_ids:
                    seen[start:stop, token_id] = True
                    counts[start:stop, token_id] += 1
                for offset, token_id in enumerate(row.draft_token_ids[: row.num_positions - 1]):
                    seen[start + offset + 1 : stop, token_id] = True
                    counts[start + offset + 1 : stop, token_id] += 1
            repetition += [params.repetition_penalty] * row.num_positions
            presence += [params.presence_penalty] * row.num_positions
            frequency += [params.frequency_penalty] * row.num_positions
            start = stop
        return penalize(
            logits,
            seen,
            counts,
            self._column(repetition),
            self._column(presence),
            self._column(frequency),
        )
