"""Draws build/bench/fleet.json: `python -m tests.benchmarks.fleet_plot` draws it again."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

BLUE, RED, GREEN, GREY = "#1f6f8b", "#c8553d", "#588157", "#888888"


def plot(result: dict[str, Any], path: Path) -> None:
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.5), constrained_layout=True)
    size, tail, demand, surge = axes.flat
    factors = [entry["factor"] for entry in result["factors"]]

    def line(axis: Any, values: list[float], label: str, colour: str, style: str = "-") -> None:
        axis.plot(factors, values, label=label, color=colour, marker="o", linestyle=style)

    entries = result["factors"]
    line(size, [e["replicas_peak"] for e in entries], "replicas, peak", RED, ":")
    line(size, [e["replicas_mean"] for e in entries], "replicas, mean", BLUE)
    line(size, [e["usd_per_hour"] for e in entries], "USD per hour", GREEN)
    for name, style in (("p50", ":"), ("p95", "--"), ("p99", "-")):
        of_fleet = [e["one_fleet"] for e in entries]
        line(tail, [f["ttft_seconds"][name] for f in of_fleet], f"TTFT {name}", BLUE, style)
        line(tail, [f["queue_seconds"][name] for f in of_fleet], f"queue {name}", RED, style)
    line(demand, [100 * e["ledger"]["share_of_sqlite"] for e in entries], "SQLite", GREY)
    line(demand, [100 * e["ledger"]["share_of_postgresql"] for e in entries], "PostgreSQL", BLUE)
    line(demand, [100 * e["exports"]["cores"] for e in entries], "export, one core", GREEN)
    tail.margins(y=0.3)  # above the lines, for the legend
    tail.set_ylim(bottom=-0.3)
    demand.axhline(100, color=RED, linewidth=0.8)
    for axis in (size, tail, demand):
        axis.set_xscale("log")
        axis.set_xlabel("times the trace's traffic")
    size.set_yscale("log")
    demand.set_yscale("log")
    readings = result["reaction"]["readings"]
    minutes = [reading["at"] / 60 for reading in readings]
    surge.plot(minutes, [r["num_ready"] for r in readings], color=BLUE, label="replicas ready")
    surge.plot(minutes, [r["num_waiting"] for r in readings], color=RED, label="waiting")
    first, last = result["reaction"]["surge_seconds"]
    surge.axvspan(first / 60, last / 60, color=GREY, alpha=0.15, label="twice the traffic")
    surge.set_xlabel("minutes")
    for axis, title, unit in (
        (size, "Replicas and cost", ""),
        (tail, "Waiting, of one fleet", "seconds"),
        (demand, "Ledger and export, of what was measured", "%"),
        (surge, "The autoscaler under a surge at 1x", ""),
    ):
        axis.set_title(title)
        axis.set_ylabel(unit)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8, ncols=3 if axis is tail else 1)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    folder = Path(__file__).resolve().parents[2] / "build" / "bench"
    plot(json.loads((folder / "fleet.json").read_text()), folder / "fleet.png")
