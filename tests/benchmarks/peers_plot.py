"""Draws build/bench/peers.json: tokens per second of all peers, and our ratios."""

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

_OURS = {"tandem_plain": "#1f6f8b", "tandem_speculative": "#0b3c49"}
_SPECULATING = ("assisted", "ngram", "lookup")  # of peers: their ratios are in the JSON


def plot(result: dict[str, Any], path: Path) -> None:
    """By workload: tokens per second over B; and speculative over plain over B."""
    runs = result["peers"]
    workloads = sorted({key.partition("@")[0] for key in runs if "/" not in key})
    names = [
        name
        for name in dict.fromkeys(name for by_name in runs.values() for name in by_name)
        if not name.endswith(_SPECULATING)
    ]
    others = [name for name in names if name not in _OURS]
    palette = pyplot.get_cmap("tab20").colors  # type: ignore[attr-defined]
    colours = _OURS | dict(zip(others, itertools.cycle(palette), strict=False))
    columns = 3
    lines = -(-(len(workloads) + 1) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(5 * columns, 3.8 * lines), constrained_layout=True, squeeze=False
    )
    for axis, workload in zip(axes.flat, workloads, strict=False):
        for name in names:
            points = {
                int(key.partition("@")[2]): statistics.median(
                    run["tokens_per_second"] for run in by_name[name]
                )
                for key, by_name in runs.items()
                if key.partition("@")[0] == workload and name in by_name
            }
            sizes = sorted(points)
            axis.plot(
                sizes, [points[s] for s in sizes], marker="o", color=colours[name], label=name
            )
        axis.set_title(workload)
        axis.set_ylabel("tokens/s")
        axis.set_ylim(bottom=0)
    ratio = axes.flat[len(workloads)]
    for workload in workloads:
        found = {
            int(size): by_workload[workload]["median"]
            for size, by_workload in result["speculative_over_plain"].items()
            if workload in by_workload
        }
        ratio.plot(sorted(found), [found[s] for s in sorted(found)], marker="o", label=workload)
    ratio.axhline(1, color="#999999", linewidth=0.8)
    ratio.set_title("Tandem: speculative over plain")
    ratio.set_ylabel("ratio of tokens/s")
    for axis in axes.flat[: len(workloads) + 1]:
        axis.set_xlabel("rows (B)")
        axis.set_xscale("log", base=2)
        axis.set_xlim(0.9, 36)
        axis.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
        axis.grid(alpha=0.3)
    axes.flat[0].legend(frameon=False, fontsize=8)
    ratio.legend(frameon=False, fontsize=8)
    for axis in axes.flat[len(workloads) + 1 :]:
        axis.set_visible(False)
    figure.suptitle(f"Peers, {result['dtype']}, {result['threads']} threads")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    folder = Path(__file__).resolve().parents[2] / "build" / "bench"
    plot(json.loads((folder / "peers.json").read_text()), folder / "peers.png")
