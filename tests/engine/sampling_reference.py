"""What a token's distribution must be: written token by token in double precision, sharing no
code with the engine. Also the laws of chance that tests compare draws with."""

import math
from collections.abc import Callable, Sequence

import torch

from engine.request import SamplingParams

# One entry per processor, strong enough to matter on a vocabulary of a few tokens.
PROCESSORS: dict[str, SamplingParams] = {
    "plain": SamplingParams(),
    "temperature_low": SamplingParams(temperature=0.4),
    "temperature_high": SamplingParams(temperature=1.7),
    "top_k": SamplingParams(top_k=2),
    "top_p": SamplingParams(top_p=0.7),
    "min_p": SamplingParams(min_p=0.3),
    "typical_p": SamplingParams(typical_p=0.6),
    "repetition_penalty": SamplingParams(repetition_penalty=1.8),
    "presence_penalty": SamplingParams(presence_penalty=0.9),
    "frequency_penalty": SamplingParams(frequency_penalty=0.7),
    "logit_bias": SamplingParams(logit_bias=((1, 1.5), (2, -2.0))),
    "allowed": SamplingParams(allowed_token_ids=(0, 1, 3)),
    "banned": SamplingParams(banned_token_ids=(2,)),
    "all_together": SamplingParams(
        temperature=0.8,
        top_k=3,
        top_p=0.95,
        min_p=0.02,
        typical_p=0.97,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.5,
        logit_bias=((0, 0.7),),
        banned_token_ids=(1,),
    ),
}


def reference_probs(
    logits: Sequence[float],
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
) -> list[float]:
    """The distribution of the next token after this prompt and this output."""
    tokens = range(len(logits))
    bias = dict(params.logit_bias)
    scores = []
    for token, logit in enumerate(logits):
        is_allowed = not params.allowed_token_ids or token in params.allowed_token_ids
        if not is_allowed or token in params.banned_token_ids:
            scores.append(-math.inf)
            continue
        score = logit + bias.get(token, 0.0)
        if token in prompt_token_ids or token in output_token_ids:
            is_positive = score > 0
            score *= 1 / params.repetition_penalty if is_positive else params.repetition_penalty
        count = list(output_token_ids).count(token)
        score -= params.presence_penalty * (count > 0) + params.frequency_penalty * count
        scores.append(score / params.temperature)
    kept = {token for token in tokens if scores[token] > -math.inf}
    if params.top_k:
        kept = set(sorted(kept, key=lambda token: -scores[token])[: params.top_k])
    if params.top_p < 1:
        probs = _softmax(scores, kept)
        kept = _smallest_set(sorted(kept, key=lambda token: -probs[token]), probs, params.top_p)
    if params.min_p > 0:
        probs = _softmax(scores, kept)
        kept = {token for token in kept if probs[token] >= params.min_p * max(probs)}
    if params.typical_p < 1:
        probs = _softmax(scores, kept)
        entropy = -sum(probs[token] * math.log(probs[token]) for token in kept)
        surprise = {token: abs(-math.log(probs[token]) - entropy) for token in kept}
        kept = _smallest_set(sorted(kept, key=surprise.__getitem__), probs, params.typical_p)
    return _softmax(scores, kept)


def _softmax(scores: Sequence[float], kept: set[int]) -> list[float]:
    best = max(scores[token] for token in kept)
    weights = [
        math.exp(scores[token] - best) if token in kept else 0.0 for token in range(len(scores))
    ]
    return [weight / sum(weights) for weight in weights]


def _smallest_set(ordered: list[int], probs: Sequence[float], share: float) -> set[int]:
    """The first tokens whose probabilities add up to share."""
    chosen: set[int] = set()
    total = 0.0
    for token in ordered:
        if total >= share:
            break
        chosen.add(token)
        total += probs[token]
    return chosen


class PrefixModel:
    """A language model by table: its logits depend on every token before."""

    def __init__(self, vocab_size: int, seed: int, spread: float = 1.5) -> None:
        self.vocab_size = vocab_size
        self._seed = seed
        self._spread = spread
        self._known: dict[int, torch.Tensor] = {}

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[V] float32 after these tokens."""
        number = self._seed
        for token_id in token_ids:
            number = (number * 1_000_003 + token_id + 1) % (2**61 - 1)
        if number not in self._known:
            generator = torch.Generator().manual_seed(number)
            drawn = torch.randn(self.vocab_size, generator=generator)
            self._known[number] = drawn * self._spread
        return self._known[number].clone()


def joint_probs(
    next_probs: Callable[[tuple[int, ...]], Sequence[float]], vocab_size: int, length: int
) -> torch.Tensor:
    """[V] * length: the probability of every sequence, float64."""
    joint = torch.ones((), dtype=torch.float64)
    prefixes: list[tuple[int, ...]] = [()]
    for _ in range(length):
        table = torch.tensor([next_probs(prefix) for prefix in prefixes], dtype=torch.float64)
        joint = joint.reshape(-1, 1) * table
        prefixes = [(*prefix, token) for prefix in prefixes for token in range(vocab_size)]
    return joint.reshape([vocab_size] * length)


def chi_square_p_value(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """How likely a deviation this large is by chance; 0 when something impossible was drawn.

    Cells of fewer than 5 expected draws are put together.
    """
    counts, probs = counts.flatten().double(), probs.flatten().double()
    if bool(counts[probs == 0].sum() > 0):
        return 0.0
    expected = probs / probs.sum() * counts.sum()
    is_rare = expected < 5
    observed = torch.cat([counts[~is_rare], counts[is_rare].sum().reshape(1)])
    expected = torch.cat([expected[~is_rare], expected[is_rare].sum().reshape(1)])
    is_used = expected > 0
    observed, expected = observed[is_used], expected[is_used]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    if freedom == 0:
        return 1.0
    return float(torch.special.gammaincc(freedom, statistic / 2))
