"""Finds what is wrong with a head's configuration by how much the target accepts.

Layer ids that are off by one, another rotary base, a norm flag the wrong way round: such a head
loads and drafts, only badly. Each possibility is measured on texts of the target: the share of
drafts that are the target's own next tokens, all positions at once, by the head's mathematics
alone (dense attention, no cache).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F

from engine.drafter.head.config import HeadConfig, HeadFormatError
from engine.drafter.head.model import Eagle3Head
from engine.drafter.head.tap import HiddenStateTap
from engine.loader import LoadedModel

_MAX_ROUNDS = 3
_SHIFTS = (-1, 1)


@dataclass(frozen=True, slots=True)
class ProbeText:
    """Tokens of which those from num_prompt_tokens on are the target's own."""

    token_ids: tuple[int, ...]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Measured:
    """changes: fields that differ from the head's configuration as it is."""

    changes: Mapping[str, Any]
    acceptance_length: float


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """measured: every possibility that was tried, the head as it is first."""

    measured: tuple[Measured, ...]

    @property
    def best(self) -> Measured:
        """The fewest changes among equals."""
        return max(self.measured, key=lambda m: (m.acceptance_length, -len(m.changes)))


@dataclass(frozen=True, slots=True)
class _Captured:
    """What the target computes over a text: states [T, H] that enter each layer that is tried,
    and its next token [T]."""

    states: Mapping[int, torch.Tensor]
    next_token_ids: torch.Tensor  # [T - 1] the text's
    best_token_ids: torch.Tensor  # [T] the target's
    first: int  # the first position whose pair may draft output


@torch.inference_mode()
def probe(
    head: Eagle3Head, target: LoadedModel, texts: Sequence[ProbeText], *, num_drafts: int = 3
) -> ProbeReport:
    """Tries one field at a time and keeps what is better, until nothing is.

    head in the target's dtype or float32. Texts need two output tokens or more.
    """
    num_layers = target.model.config.get_text_config().num_hidden_layers
    wanted = _all_layers(head.config, num_layers)
    captured = _capture(target, wanted, texts)
    seen: dict[tuple[tuple[str, Any], ...], Measured] = {}

    def measure(changes: Mapping[str, Any]) -> Measured:
        key = tuple(sorted(changes.items()))
        if key not in seen:
            candidate = restated(head, **changes)
            length = _acceptance_length(candidate, captured, num_drafts)
            seen[key] = Measured(dict(changes), length)
        return seen[key]

    best = measure({})
    for _ in range(_MAX_ROUNDS):
        before = best
        for field, values in _possibilities(head.config, target, num_layers).items():
            for value in values:
                changes = {k: v for k, v in best.changes.items() if k != field}
                if value != getattr(head.config, field):
                    changes[field] = value
                found = measure(changes)
                if found.acceptance_length > best.acceptance_length:
                    best = found
        if best is before:
            break
    return ProbeReport(tuple(seen.values()))


def _possibilities(
    config: HeadConfig, target: LoadedModel, num_layers: int
) -> dict[str, tuple[Any, ...]]:
    text = target.model.config.get_text_config()
    theirs = (getattr(text, "rope_parameters", None) or {}).get("rope_theta")
    bases = {config.rope_theta, 10000.0, float(theirs or config.rope_theta)}
    return {
        "captured_layers": tuple(_shifted(config, num_layers)),
        "norm_before_residual": (True, False),
        "norm_output": (True, False),
        "rope_theta": tuple(sorted(bases)),
    }


def _shifted(config: HeadConfig, num_layers: int) -> list[tuple[int, ...]]:
    layers = config.captured_layers
    shifted = [tuple(layer + shift for layer in layers) for shift in (0, *_SHIFTS)]
    return [ids for ids in shifted if min(ids) >= 0 and max(ids) < num_layers]


def _all_layers(config: HeadConfig, num_layers: int) -> list[int]:
    return sorted({layer for ids in _shifted(config, num_layers) for layer in ids})


def _capture(
    target: LoadedModel, layers: Sequence[int], texts: Sequence[ProbeText]
) -> list[_Captured]:
    tap = HiddenStateTap(target.model, layers)
    found = []
    try:
        for text in texts:
            token_ids = torch.tensor([text.token_ids], device=target.model.device)
            logits = target.model(input_ids=token_ids, use_cache=False).logits[0]
            parts = tap.take()[0].float().chunk(len(layers), dim=-1)
            found.append(
                _Captured(
                    dict(zip(layers, parts, strict=True)),
                    token_ids[0, 1:],
                    logits.argmax(dim=-1),
                    max(0, text.num_prompt_tokens - 1),
                )
            )
    finally:
        tap.close()
    return found


def _acceptance_length(head: Eagle3Head, texts: Sequence[_Captured], num_drafts: int) -> float:
    """1 + the mean over positions of how many drafts in a row are the target's own."""
    accepted = positions = 0
    for text in texts:
        states = torch.cat([text.states[layer] for layer in head.config.captured_layers], dim=-1)
        drafts = draft_everywhere(head, text.next_token_ids, states[:-1].to(head.dtype), num_drafts)
        running = torch.ones(len(text.next_token_ids), dtype=torch.bool, device=drafts.device)
        count = 0
        for step in range(num_drafts):
            # The pair of position t drafts token t + 2 + step.
            expected = text.best_token_ids[1 + step :]
            expected = F.pad(expected, (0, len(running) - len(expected)), value=-1)
            running = running & (drafts[step] == expected)
            count += int(running[text.first :].sum())
        accepted += count
        positions += max(0, len(running) - text.first)
    return 1 + accepted / max(1, positions)


def draft_everywhere(
    head: Eagle3Head,
    next_token_ids: torch.Tensor,  # [T]
    captured: torch.Tensor,  # [T, 3H]
    num_drafts: int,
) -> torch.Tensor:
    """[num_drafts, T] token ids drafted from every position, the true tokens being fed.

    Step k of position t reads the keys of step 0 up to t and those of its own earlier steps,
    which is what a server's cache holds there.
    """
    length = len(next_token_ids)
    positions = torch.arange(length, device=captured.device)
    is_hidden = positions[None, :] > positions[:, None]  # [T, T]
    group = head.config.num_heads // head.config.num_kv_heads
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys.append(key.repeat_interleave(group, dim=1).float())  # [T, num_heads, D]
        values.append(value.repeat_interleave(group, dim=1).float())
        wide = query.float() * head.config.head_size**-0.5
        scores = torch.einsum("thd,shd->hts", wide, keys[0])
        scores = scores.masked_fill(is_hidden, float("-inf"))
        own = [torch.einsum("thd,thd->ht", wide, k)[..., None] for k in keys[1:]]
        weights = torch.cat([scores, *own], dim=-1).softmax(dim=-1)
        attended = torch.einsum("hts,shd->thd", weights[..., :length], values[0])
        for step, step_values in enumerate(values[1:]):
            attended = attended + weights[..., length + step].t()[..., None] * step_values
        return attended.to(query.dtype)

    states = head.fuse(captured)
    drafts = []
    for step in range(num_drafts):
        fed = (positions + step).clamp(max=length - 1)
        output, states = head.advance(
            next_token_ids[fed], states, head.rotation(positions + step), attend
        )
        drafts.append(head.draft_token_ids[head.lm_head(output).argmax(dim=-1)])
    return torch.stack(drafts)


def restated(head: Eagle3Head, **changes: Any) -> Eagle3Head:
    """The same weights under a configuration with other flags, layers or base."""
    known = {field.name for field in fields(HeadConfig)}
    if unknown := changes.keys() - known:
        raise HeadFormatError(f"{sorted(unknown)}: no fields of a head")
    other = Eagle3Head(replace(head.config, **changes)).to(head.dtype)
    other.load_state_dict(head.state_dict())
    return other.eval().requires_grad_(False)
