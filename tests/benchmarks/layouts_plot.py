"""Draws build/bench/layouts.json: `python -m tests.benchmarks.layouts_plot` draws it again."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

COLOURS = {"ragged": "#1f6f8b", "aligned": "#c8553d", "grouped": "#588157"}


def plot(result: dict[str, Any], path: Path) -> None:
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.5), constrained_layout=True)
    speed, share, latency, gain = axes.flat
    for layout, of_layout in result["layouts"].items():
        rows = sorted(int(number) for number in of_layout["by_rows"])
        by_rows = {int(number): found for number, found in of_layout["by_rows"].items()}
        label = {"color": COLOURS[layout], "label": layout, "marker": "o"}
        speed.plot(rows, [by_rows[n]["tokens_per_second"] for n in rows], **label)
        share.plot(rows, [100 * by_rows[n]["share"]["align"] for n in rows], **label)
        timed = [n for n in rows if "latency_seconds" in by_rows[n]]
        for name, style in (("p50", ":"), ("p99", "-")):
            seconds = [by_rows[n]["latency_seconds"][name] for n in timed]
            latency.plot(
                timed, seconds, color=COLOURS[layout], marker="o", linestyle=style,
                label=f"{layout} {name}",
            )  # fmt: skip
    ratios = {int(number): ratio for number, ratio in result.get("auto_over_off", {}).items()}
    gain.plot(sorted(ratios), [ratios[n] for n in sorted(ratios)], color="#444444", marker="o")
    gain.axhline(1, color="#999999", linewidth=0.8)
    titles = (
        (speed, "Tokens per second", "tokens/s"),
        (share, "Time spent on laying rows out", "% of the steps' time"),
        (latency, "Latency under random arrivals", "seconds"),
        (gain, "Speculation auto over off (ragged)", "ratio of tokens/s"),
    )
    for axis, title, unit in titles:
        axis.set_title(title)
        axis.set_xlabel("rows per forward (B)")
        axis.set_ylabel(unit)
        axis.set_xscale("log", base=2)
        axis.set_xlim(0.9, 36)
        axis.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
        axis.grid(alpha=0.3)
    for axis in (speed, share, latency):
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False)
    figure.suptitle(f"Layouts, {result['dtype']}, {result['threads']} threads")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    folder = Path(__file__).resolve().parents[2] / "build" / "bench"
    plot(json.loads((folder / "layouts.json").read_text()), folder / "layouts.png")
