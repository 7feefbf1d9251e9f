"""Prints the README's page of numbers, as markdown, out of build/bench/*.json.

    python -m tests.benchmarks.numbers

Every figure stands beside the command that measures it. What has not been measured on this
machine, or by an older version of its benchmark, is left out.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parents[2] / "build" / "bench"
Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Number:
    """One line: what it is, how it is read out of FILE.json, and which command writes that."""

    what: str
    file: str
    command: str
    read: Callable[[Result], str]


def _spread(value: Mapping[str, float]) -> str:
    return f"{value['median']:.2f} ({value['min']:.2f} to {value['max']:.2f})"


def _by_rows(values: Mapping[str, Mapping[str, float]]) -> str:
    return ", ".join(
        f"{values[rows]['median']:.2f} at {rows.replace('_', ' ')}"
        for rows in sorted(values, key=_number_of_rows)
    )


def _number_of_rows(rows: str) -> int:
    return int(rows.partition("_")[0])


def _auto(workload: str) -> Callable[[Result], str]:
    def read(result: Result) -> str:
        found = result["speculative_over_plain"]
        return _by_rows({rows: by[workload] for rows, by in found.items() if workload in by})

    return read


def _smallest_auto(result: Result) -> str:
    medians = [
        (spread["median"], f"{workload} at {rows}")
        for rows, by_workload in result["speculative_over_plain"].items()
        for workload, spread in by_workload.items()
    ]
    value, where = min(medians)
    return f"{value:.2f} ({where})"


def _other_peers(result: Result) -> str:
    found = []
    for peer, by_key in result["plain_over_other_peers"].items():
        values = {
            key.partition("@")[2]: spread
            for key, spread in by_key.items()
            if key.startswith("spec_bench@")
        }
        if values:
            found.append(f"{peer}: {_by_rows(values)}")
    if not found:
        raise KeyError("spec_bench")
    return "; ".join(found)


def _peers_speculation(result: Result) -> str:
    found = [
        (spread["median"], f"{peer}, {key}")
        for peer, by_key in result["peers_speculative_over_their_plain"].items()
        for key, spread in by_key.items()
    ]
    (low, low_at), (high, high_at) = min(found), max(found)
    return f"{low:.2f} ({low_at}) to {high:.2f} ({high_at})"


def _open_loop(result: Result) -> str:
    (runs,) = (by for key, by in result["peers"].items() if key.startswith("azure@"))
    return ", ".join(
        f"{name} {1e3 * rounds[0]['ttft_seconds']['p50']:.0f} / "
        f"{1e3 * rounds[0]['ttft_seconds']['p99']:.0f} ms"
        for name, rounds in runs.items()
        if name.startswith(("tandem", "transformers_g", "vllm"))
    )


def _limits(phase: str, share: str) -> Callable[[Result], str]:
    return lambda result: _spread(result["bfloat16"]["phases"][phase][share])


PEERS, HEADS, LIMITS = "make bench-peers", "make bench-heads", "make bench-limits"
NUMBERS = (
    Number(
        "plain decoding over the fastest torch peer in the same dtype, by rows",
        "peers",
        PEERS,
        lambda r: _by_rows(r["plain_over_best_torch_peer"]),
    ),
    Number("plain decoding over other engines, by rows", "peers", PEERS, _other_peers),
    Number("`auto` over plain decoding, Spec-Bench, by rows", "peers", PEERS, _auto("spec_bench")),
    Number("`auto` over plain decoding, long summaries, by rows", "peers", PEERS, _auto("summary")),
    Number("`auto` over plain decoding, code, by rows", "peers", PEERS, _auto("code")),
    Number("`auto` over plain decoding, agents, by rows", "peers", PEERS, _auto("agent")),
    Number("the least that `auto` gave over plain decoding", "peers", PEERS, _smallest_auto),
    Number("peers' speculation over their own plain decoding", "peers", PEERS, _peers_speculation),
    Number("TTFT under recorded arrivals, P50 / P99", "peers", PEERS, _open_loop),
    Number(
        "plain decoding of one row: share of the memory's limit, bf16",
        "peers",
        PEERS,
        lambda r: f"{r['bandwidth_share_plain_b1']['share']:.2f}",
    ),
    Number("prefill: share of the limit", "limits", LIMITS, _limits("prefill", "forward_share")),
    Number("step of 1 row: share", "limits", LIMITS, _limits("decode_1", "step_share")),
    Number("step of 8 rows: share", "limits", LIMITS, _limits("decode_8", "step_share")),
    Number(
        "plain decoding over transformers' `generate`, float32, by rows",
        "decode",
        "make bench",
        lambda r: _by_rows(r["float32"]["plain_vs_generate"]),
    ),
    Number(
        "acceptance length of the shipped head",
        "heads",
        HEADS,
        lambda r: f"{r['shipped']['acceptance_length']:.2f}",
    ),
    Number(
        "the shipped head over plain decoding, by rows",
        "heads",
        HEADS,
        lambda r: _by_rows(r["shipped"]["speedup"]),
    ),
    Number(
        "sequences equal to the target alone: exact / ties / divergences",
        "equivalence",
        "make bench-equivalence",
        lambda r: f"{r['exact']} / {r['ties']} / {r['divergences']} of {r['sequences']}",
    ),
    Number(
        "tokens/s through gRPC over those of the engine alone",
        "service",
        "make bench-service",
        lambda r: f"{r['through_grpc_over_engine']:.2f}",
    ),
    Number(
        "latency that gRPC adds to a message, P50 / P99",
        "service",
        "make bench-service",
        lambda r: f"{r['added_latency_p50_ms']:.1f} / {r['added_latency_p99_ms']:.1f} ms",
    ),
    Number(
        "ledger rows per second, SQLite / PostgreSQL",
        "ledger",
        "make bench-ledger",
        lambda r: f"{r['sqlite_rows_per_second']:,} / {r['postgresql_rows_per_second']:,}",
    ),
    Number(
        "ledger rows lost or doubled by kills",
        "ledger",
        "make bench-ledger",
        lambda r: f"{r['lost'] + r['duplicated']} in {r['kills']} kills",
    ),
    Number(
        "share of a step that recording costs",
        "recording",
        "make bench-ledger",
        lambda r: f"{100 * r['total_share']:.2f} %",
    ),
    Number(
        "ledger rows exported per second",
        "exports",
        "make bench-exports",
        lambda r: f"{r['rows_per_second']:,} of {r['rows']:,}",
    ),
)


def markdown(folder: Path = BENCH, numbers: Sequence[Number] = NUMBERS) -> str:
    """A table of what has been measured, and a table of tokens/s by engine and rows."""
    results: dict[str, Result] = {}
    for name in {number.file for number in numbers}:
        path = folder / f"{name}.json"
        if path.is_file():
            results[name] = json.loads(path.read_text())
    lines = ["| number | value | command |", "|---|---|---|"]
    for number in numbers:
        if number.file in results and (value := _value(number, results[number.file])):
            lines.append(f"| {number.what} | {value} | `{number.command}` |")
    if rates := rates_table(results.get("peers", {})):
        lines += ["", *rates]
    return "\n".join(lines)


def _value(number: Number, result: Result) -> str | None:
    try:
        return number.read(result) or None
    except (KeyError, ValueError):  # an older or a shorter run did not measure it
        print(f"{number.file}.json does not hold: {number.what}", file=sys.stderr)
        return None


def rates_table(result: Result) -> list[str]:
    """tokens/s on spec_bench: an engine a line, rows as columns."""
    keys = [key for key in result.get("peers", {}) if key.startswith("spec_bench@")]
    if not keys:
        return []
    sizes = sorted({int(key.partition("@")[2]) for key in keys})
    runs = {size: result["peers"][f"spec_bench@{size}"] for size in sizes}
    names = dict.fromkeys(name for by_name in runs.values() for name in by_name)
    lines = [
        f"| tokens/s on Spec-Bench, rows: | {' | '.join(map(str, sizes))} | version |",
        "|---" * (len(sizes) + 2) + "|",
    ]
    for name in names:
        cells = []
        for size in sizes:
            rates = sorted(run["tokens_per_second"] for run in runs[size].get(name, []))
            cells.append(f"{rates[len(rates) // 2]:.0f}" if rates else "")
        versions = result.get("versions", {}).get(name, {})
        version = next((f"{key} {value}" for key, value in versions.items()), "")
        lines.append(f"| {name} | {' | '.join(cells)} | {version} |")
    return lines


if __name__ == "__main__":
    print(markdown())
