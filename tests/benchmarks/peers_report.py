"""The ratios that are quoted, out of every raw figure."""

import statistics
from collections.abc import Sequence
from typing import Any

from tests.benchmarks.peers_contenders import CONTENDERS, REFERENCE, Contender
from tests.benchmarks.peers_parts import Part
from tests.benchmarks.workloads import spread

_SPECULATIVE = "tandem_speculative"


def report(parts: Sequence[Part], contenders: Sequence[Contender] = CONTENDERS) -> dict[str, Any]:
    """What peers.py documents, but for what is measured once: limits, settings, refusals."""
    found = {(part.contender, part.key): part for part in parts}
    keys = sorted({part.key for part in parts})
    over_best: dict[str, Any] = {}
    best: dict[str, str] = {}
    over_others: dict[str, dict[str, Any]] = {}
    over_plain: dict[str, dict[str, Any]] = {}
    peers_over_plain: dict[str, dict[str, Any]] = {}
    for key in keys:
        workload, _, rows = key.partition("@")
        here = {c.name: found[c.name, key] for c in contenders if (c.name, key) in found}
        torch_peers = [here[c.name] for c in contenders if c.is_torch_peer and c.name in here]
        if workload == "spec_bench" and torch_peers:
            ratios = zip(*(part.ratios() for part in torch_peers), strict=True)
            over_best[rows] = spread([min(of_round) for of_round in ratios])
            best[rows] = min(torch_peers, key=lambda p: statistics.median(p.ratios())).contender
        if _SPECULATIVE in here:
            ours = [1 / ratio for ratio in here[_SPECULATIVE].ratios()]
            over_plain.setdefault(rows, {})[workload] = spread(ours)
        for contender in contenders:
            if (part := here.get(contender.name)) is None or contender.kind == "tandem":
                continue
            if contender.plain is None and not contender.is_torch_peer:
                over_others.setdefault(contender.name, {})[key] = spread(part.ratios())
            elif contender.plain in here:
                without = statistics.median(here[contender.plain].ratios())
                ratios_of_peer = [without / ratio for ratio in part.ratios()]
                peers_over_plain.setdefault(contender.name, {})[key] = spread(ratios_of_peer)
    raw: dict[str, dict[str, Any]] = {}
    for part in parts:
        raw.setdefault(part.key, {})[part.contender] = part.rounds
    return {
        "plain_over_best_torch_peer": dict(sorted(over_best.items(), key=lambda i: int(i[0]))),
        "best_torch_peer": best,
        "plain_over_other_peers": over_others,
        "speculative_over_plain": over_plain,
        "peers_speculative_over_their_plain": peers_over_plain,
        "identical_tokens": identical(parts),
        "versions": {part.contender: dict(part.versions) for part in parts},
        "peers": raw,
    }


def identical(parts: Sequence[Part]) -> dict[str, float]:
    """By peer: share of requests whose tokens are those of our plain run."""
    counts: dict[str, list[int]] = {}
    for part in parts:
        if part.contender != REFERENCE:
            count = counts.setdefault(part.contender, [0, 0])
            count[0] += part.num_identical
            count[1] += part.num_requests
    return {name: round(same / asked, 4) for name, (same, asked) in counts.items()}


def rate(part: Part) -> float:
    """Median tokens/s."""
    return statistics.median(float(figures["tokens_per_second"]) for figures in part.rounds)
