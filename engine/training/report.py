"""A head's evaluation as JSON and as a picture; comparisons with confidence intervals."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.training.errors import TrainingError
from engine.training.evaluation import (
    ConversationScore,
    bootstrap,
    coupled_acceptance_length,
    expected_calibration_error,
    greedy_acceptance_length,
    paired_bootstrap,
    sampled_acceptance_length,
)

_POSITION_BOUNDS = (32, 128, 512)
_CONTEXT_BOUNDS = (64, 128, 256, 512)


def summarize(
    greedy: Sequence[ConversationScore], sampled: Sequence[ConversationScore], num_drafts: int
) -> dict[str, Any]:
    """All figures of one head. greedy: conversations answered at T = 0; sampled: at T = 1, or
    whatever they were answered at. Raises TrainingError if there is nothing to count."""
    if not greedy or not sampled:
        raise TrainingError("evaluate: no conversation is long enough to be drafted")
    rounds = sum(len(s.walk) for s in greedy)
    depth = range(1, num_drafts + 1)
    accepted_at = [sum(count >= k for s in greedy for _, count in s.walk) for k in depth]
    confidences = [pair for s in greedy for pair in s.confidences]
    coupled = coupled_acceptance_length(sampled)
    return {
        "num_conversations": len(greedy),
        "num_rounds": rounds,
        "num_draft_tokens": num_drafts,
        "acceptance_length": round(greedy_acceptance_length(greedy, num_drafts), 4),
        "ci": [round(x, 4) for x in bootstrap(greedy, num_drafts)],
        "acceptance_length_sampled": round(sampled_acceptance_length(sampled, num_drafts), 4),
        "ci_sampled": [round(x, 4) for x in bootstrap(sampled, num_drafts, is_greedy=False)],
        "acceptance_length_coupled": None if coupled is None else round(coupled, 4),
        "by_draft_length": {str(k): round(greedy_acceptance_length(greedy, k), 4) for k in depth},
        "accept_reach": [round(n / max(1, rounds), 4) for n in accepted_at],
        "accept_cond": [
            round(n / max(1, before), 4)
            for n, before in zip(accepted_at, [rounds, *accepted_at], strict=False)
        ],
        "by_source": _grouped(greedy, lambda s: s.source or "unknown", num_drafts),
        "by_language": _grouped(greedy, lambda s: s.language, num_drafts),
        "by_context": _grouped(
            greedy, lambda s: _bucket(s.num_prompt_tokens, _CONTEXT_BOUNDS), num_drafts
        ),
        "by_output_position": _by_position(greedy),
        "expected_calibration_error": round(expected_calibration_error(confidences), 4),
    }


def compare(
    scores: Mapping[str, tuple[Sequence[ConversationScore], Sequence[ConversationScore]]],
    num_drafts: int,
) -> dict[str, Any]:
    """For every pair of heads, second minus first: the difference of acceptance lengths and its
    95 % interval, at T = 0 and T = 1. scores: name -> (greedy, sampled)."""
    names = list(scores)
    found = {}
    for index, first in enumerate(names):
        for second in names[index + 1 :]:
            entry = {}
            for part, label in ((0, "greedy"), (1, "sampled")):
                difference, low, high = paired_bootstrap(
                    scores[first][part], scores[second][part], num_drafts, is_greedy=part == 0
                )
                entry[label] = {
                    "difference": round(difference, 4),
                    "ci": [round(low, 4), round(high, 4)],
                    "is_significant": not low <= 0 <= high,
                }
            found[f"{second} - {first}"] = entry
    return found


def draw(path: Path, reports: Mapping[str, Mapping[str, Any]]) -> None:
    """Acceptance by depth, by draft length and by source, one colour per head.

    Raises TrainingError where matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise TrainingError("the picture needs matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (depth, length, source) = pyplot.subplots(1, 3, figsize=(15, 4.5))
    for name, report in reports.items():
        reach = report["accept_reach"]
        depth.plot(range(1, len(reach) + 1), reach, marker="o", label=name)
        lengths = report["by_draft_length"]
        length.plot([int(k) for k in lengths], list(lengths.values()), marker="o", label=name)
    sources = sorted({s for report in reports.values() for s in report["by_source"]})
    width = 0.8 / max(1, len(reports))
    for index, (name, report) in enumerate(reports.items()):
        values = [report["by_source"].get(s, {}).get("acceptance_length", 0) for s in sources]
        source.barh([i + index * width for i in range(len(sources))], values, width, label=name)
    depth.set(xlabel="draft k", ylabel="P(k and all before accepted)", ylim=(0, 1))
    length.set(xlabel="draft tokens K", ylabel="acceptance length at T = 0")
    source.set(xlabel="acceptance length", xlim=(1, None))
    source.set_yticks([i + 0.4 - width / 2 for i in range(len(sources))], sources)
    depth.legend()
    for axes in (depth, length):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _grouped(
    scores: Sequence[ConversationScore], key: Callable[[ConversationScore], str], num_drafts: int
) -> dict[str, Any]:
    groups: dict[str, list[ConversationScore]] = defaultdict(list)
    for score in scores:
        groups[key(score)].append(score)
    return {
        name: {
            "num_conversations": len(group),
            "acceptance_length": round(greedy_acceptance_length(group, num_drafts), 4),
        }
        for name, group in sorted(groups.items())
    }


def _bucket(value: int, bounds: Sequence[int]) -> str:
    low = 0
    for bound in bounds:
        if value < bound:
            return f"{low}-{bound}"
        low = bound
    return f"{low}+"


def _by_position(scores: Sequence[ConversationScore]) -> dict[str, float]:
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for score in scores:
        for position, count in score.walk:
            total = totals[_bucket(position, _POSITION_BOUNDS)]
            total[0] += count
            total[1] += 1
    return {name: round(1 + a / n, 4) for name, (a, n) in totals.items()}
