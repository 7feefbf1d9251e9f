"""How long a head's accepted drafts are on conversations it never saw.

Exact from logs: the output of a lossless engine is the target's own whatever drafted it, so
any head can be scored on it. Names say which definition is meant:

  accept_cond@k    P(draft k is accepted, given that those before it were)
  accept_reach@k   P(draft k and all before it are accepted)
  acceptance length (tau)  1 + mean accepted drafts per round, the target's own token included

At temperature 0 rounds are walked as an engine walks them: a round of n accepted drafts is
followed by one n + 1 tokens later. At temperature 1 there are two figures, for there are two
rules. Under the rejection rule the expected accepted length of a round, sum over k of the
product of the overlaps, is averaged over positions. Under the coupled rule, the default of
serving, the drafts follow from the seed of the answer: its rounds are walked like greedy ones.

All of this is replay. What only live traffic shows, speed, is not here: `make bench-heads`
measures it, and experiments compare heads in production.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.drafter.head.model import Eagle3Head
from engine.training.feature_cache import CachedRow, FeatureCache
from engine.training.replay import coupled_matches
from engine.training.scores import Teacher, score
from engine.training.unrolled import make_batch, unroll


@dataclass(frozen=True, slots=True)
class ConversationScore:
    """Of one conversation, what every figure is made of.

    accepted[k] and rounds[k] are of greedy rounds of at most k + 1 drafts. reach[k]: rounds of
    the longest kind that accepted draft k. expected[k]: mean expected accepted drafts of
    rounds of at most k + 1 sampled drafts. confidences: (confidence, was accepted) of reached
    drafts. walk: (output position, accepted drafts) of every round of the longest kind. language:
    of the answer, ISO 639-1. coupled_walk: as walk, of a sampled answer under the coupled rule.
    """

    key: str
    source: str
    num_output_tokens: int
    num_prompt_tokens: int
    accepted: tuple[int, ...]
    rounds: tuple[int, ...]
    reach: tuple[int, ...]
    expected: tuple[float, ...]
    confidences: tuple[tuple[float, bool], ...]
    walk: tuple[tuple[int, int], ...]
    language: str = "unknown"
    coupled_walk: tuple[tuple[int, int], ...] = ()


def walk_rounds(is_match: Sequence[Sequence[bool]], num_drafts: int) -> list[tuple[int, int]]:
    """(position, accepted drafts) of the greedy rounds over one conversation.

    is_match[t][k]: draft k of a round that starts at t is the target's own token.
    """
    position, rounds = 0, []
    while position < len(is_match):
        count = 0
        while count < num_drafts and count < len(is_match[position]) and is_match[position][count]:
            count += 1
        rounds.append((position, count))
        position += count + 1
    return rounds


@torch.inference_mode()
def score_conversations(
    head: Eagle3Head,
    teacher: Teacher,
    cache: FeatureCache,
    rows: Iterable[CachedRow],
    num_steps: int,
    language_of: Callable[[Sequence[int]], str] | None = None,
    seeds: Mapping[str, int] | None = None,
) -> list[ConversationScore]:
    """One score per conversation that has anything to draft. language_of: from an answer's token
    ids to its language. seeds: of the answers by their keys, for their coupled walks."""
    found = []
    for row in rows:
        features = cache.read(row)
        batch = make_batch([features]).to(head.device)
        if not bool((batch.depth_limits > 0).any()):
            continue
        outputs = [output.to(batch.last.dtype) for output in unroll(head, batch, num_steps)]
        scores = score(outputs, batch, head.lm_head.weight, teacher, needs_overlap_gradient=False)
        limits = scores.is_valid.sum(0).tolist()  # [M]
        matches = scores.is_match.t().tolist()
        is_match = [m[:limit] for m, limit in zip(matches, limits, strict=True)]
        walks = [walk_rounds(is_match, count + 1) for count in range(num_steps)]
        reached = (scores.overlap * scores.is_valid).cumprod(0)  # [K, M]
        confidences = []
        sure = scores.confidence.t().tolist()
        for match, confidence in zip(is_match, sure, strict=True):
            for ok, value in zip(match, confidence, strict=False):
                confidences.append((value, bool(ok)))
                if not ok:
                    break
        coupled: list[tuple[int, int]] = []
        if seeds is not None and row.temperature > 0:
            drawn = coupled_matches(
                outputs,
                batch,
                head.lm_head.weight,
                teacher.draft_token_ids,
                temperature=row.temperature,
                seed=seeds[row.key],
            )
            coupled = walk_rounds(drawn, num_steps)
        found.append(
            ConversationScore(
                row.key,
                row.source,
                row.num_output_tokens,
                row.num_prompt_tokens,
                tuple(sum(count for _, count in walk) for walk in walks),
                tuple(len(walk) for walk in walks),
                tuple(_reach(is_match, depth + 1) for depth in range(num_steps)),
                tuple(reached.cumsum(0).mean(1).tolist()),
                tuple(confidences),
                tuple(walks[-1]),
                language_of(features.token_ids[row.num_prompt_tokens :].tolist())
                if language_of is not None
                else "unknown",
                tuple(coupled),
            )
        )
    return found


def _reach(is_match: Sequence[Sequence[bool]], depth: int) -> int:
    return sum(len(m) >= depth and all(m[:depth]) for m in is_match)


def greedy_acceptance_length(scores: Sequence[ConversationScore], num_drafts: int) -> float:
    rounds = sum(s.rounds[num_drafts - 1] for s in scores)
    return 1 + sum(s.accepted[num_drafts - 1] for s in scores) / max(1, rounds)


def sampled_acceptance_length(scores: Sequence[ConversationScore], num_drafts: int) -> float:
    """Mean over conversations, weighted by their output tokens."""
    total = sum(s.num_output_tokens for s in scores)
    return 1 + sum(s.expected[num_drafts - 1] * s.num_output_tokens for s in scores) / max(1, total)


def coupled_acceptance_length(scores: Sequence[ConversationScore]) -> float | None:
    """Under the coupled rule with the longest drafts; None where no sampled answer was walked."""
    counts = [count for score in scores for _, count in score.coupled_walk]
    return 1 + sum(counts) / len(counts) if counts else None


def served_acceptance_length(greedy: float, sampled: float, sampled_share: float) -> float:
    """Of a server that answers sampled_share of its requests at T = 1, the others greedily; both
    lengths at its K. What heads are chosen by."""
    return (1 - sampled_share) * greedy + sampled_share * sampled


def paired_bootstrap(
    first: Sequence[ConversationScore],
    second: Sequence[ConversationScore],
    num_drafts: int,
    *,
    is_greedy: bool = True,
    num_samples: int = 2000,
    seed: int = 0,
) -> tuple[float, float, float]:
    """(difference of acceptance lengths second - first, 2.5 % and 97.5 % quantile).

    Conversations are drawn with replacement, the same for both heads, so that what makes one
    conversation easy cancels out. Both need the same conversations in the same order.
    """
    if [s.key for s in first] != [s.key for s in second]:
        raise ValueError("both heads must be scored on the same conversations")
    a, b = _sums(first, num_drafts, is_greedy), _sums(second, num_drafts, is_greedy)
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(a), (num_samples, len(a)), generator=generator)
    differences = _ratio(b[picks].sum(1)) - _ratio(a[picks].sum(1))
    low, high = torch.quantile(differences, torch.tensor([0.025, 0.975], dtype=torch.float64))
    return float(_ratio(b.sum(0)) - _ratio(a.sum(0))), float(low), float(high)


def bootstrap(
    scores: Sequence[ConversationScore],
    num_drafts: int,
    *,
    is_greedy: bool = True,
    num_samples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """2.5 % and 97.5 % quantile of the acceptance length."""
    sums = _sums(scores, num_drafts, is_greedy)
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(sums), (num_samples, len(sums)), generator=generator)
    lengths = 1 + _ratio(sums[picks].sum(1))
    low, high = torch.quantile(lengths, torch.tensor([0.025, 0.975], dtype=torch.float64))
    return float(low), float(high)


def _sums(scores: Sequence[ConversationScore], num_drafts: int, is_greedy: bool) -> torch.Tensor:
    """[C, 2] float64: accepted drafts and what they are counted over."""
    k = num_drafts - 1
    pairs = [
        (s.accepted[k], s.rounds[k])
        if is_greedy
        else (s.expected[k] * s.num_output_tokens, s.num_output_tokens)
        for s in scores
    ]
    return torch.tensor(pairs, dtype=torch.float64)


def _ratio(sums: torch.Tensor) -> torch.Tensor:
    return sums[..., 0] / sums[..., 1].clamp(min=1e-9)


def expected_calibration_error(
    confidences: Sequence[tuple[float, bool]], num_bins: int = 15
) -> float:
    """Mean gap between confidence and share of accepted drafts over equal-width bins, weighted
    by their size (Guo et al. 2017)."""
    if not confidences:
        return 0.0
    values = torch.tensor([c for c, _ in confidences], dtype=torch.float64)
    hits = torch.tensor([float(hit) for _, hit in confidences], dtype=torch.float64)
    bins = (values * num_bins).long().clamp(max=num_bins - 1)
    gap = 0.0
    for index in range(num_bins):
        members = bins == index
        if bool(members.any()):
            gap += float(members.sum()) * abs(float(values[members].mean() - hits[members].mean()))
    return gap / len(confidences)
