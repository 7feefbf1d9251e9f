"""Logit processors as pure functions over positions: [P, V] float32 in and out.

Every position has its own history (committed tokens plus the drafts before it), so the
result at a drafted position is what plain decoding would have computed there.
Excluded tokens are -inf. Each function gets one parameter per position.
"""

import torch

_EXCLUDED = float("-inf")


def penalize(
    logits: torch.Tensor,
    seen: torch.Tensor,  # [P, V] bool: in the prompt or the output so far
    output_counts: torch.Tensor,  # [P, V] float: occurrences in the output so far
    repetition: torch.Tensor,  # [P, 1]
    presence: torch.Tensor,  # [P, 1]
    frequency: torch.Tensor,  # [P, 1]
) -> torch.Tensor:
    """Repetition penalty (Keskar et al. 2019) on prompt and output; presence and frequency
    penalties (OpenAI API) on the output."""
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, repeated, logits)
    return logits - presence * (output_counts > 0) - frequency * output_counts


def filter_top_k(logits: torch.Tensor, top_k: torch.Tensor, largest_top_k: int) -> torch.Tensor:
    """Keep each position's top_k [P, 1] (0: all) largest logits; ties with the last are kept.

    largest_top_k is the greatest entry, known to the caller without asking the device.
    """
    largest = torch.topk(logits, min(largest_top_k, logits.shape[-1]), dim=-1).values
    threshold = largest.gather(1, top_k.clamp(min=1, max=largest.shape[-1]) - 1)
    return logits.masked_fill((logits < threshold) & (top_k > 0), _EXCLUDED)


def filter_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the smallest set of most likely tokens with probability >= top_p [P, 1], ties kept
    (Holtzman et al. 2020)."""
    ordered = torch.sort(logits, dim=-1, descending=True).values
    probs = torch.softmax(ordered, dim=-1)
    before = torch.cumsum(probs, dim=-1) - probs
    num_kept = (before < top_p).sum(dim=-1, keepdim=True).clamp(min=1)
    threshold = ordered.gather(1, num_kept - 1)
    return logits.masked_fill((logits < threshold) & (top_p < 1), _EXCLUDED)


def filter_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Keep tokens at least min_p [P, 1] times as likely as the best one (arXiv 2407.01082)."""
    best = logits.max(dim=-1, keepdim=True).values
    threshold = torch.where(min_p > 0, best + torch.log(min_p), _EXCLUDED)
    return logits.masked_fill(logits < threshold, _EXCLUDED)


def filter_typical_p(logits: torch.Tensor, typical_p: torch.Tensor) -> torch.Tensor:
    """Keep the tokens whose surprise is nearest the entropy, with probability >= typical_p [P, 1]
    (Meister et al. 2023)."""
    logprobs = torch.log_softmax(logits, dim=-1)
    probs = logprobs.exp()
    entropy = -(probs * logprobs.masked_fill(probs == 0, 0.0)).sum(dim=-1, keepdim=True)
    distance = (-logprobs - entropy).abs()
    ordered, order = torch.sort(distance, dim=-1, stable=True)
    ordered_probs = probs.gather(1, order)
    before = torch.cumsum(ordered_probs, dim=-1) - ordered_probs
    num_kept = (before < typical_p).sum(dim=-1, keepdim=True).clamp(min=1)
    threshold = ordered.gather(1, num_kept - 1)
    return logits.masked_fill((distance > threshold) & (typical_p < 1), _EXCLUDED)
