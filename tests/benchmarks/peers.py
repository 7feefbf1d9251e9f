"""Tandem against what a user would pick instead -> build/bench/peers.json, peers.png.

Run with `make bench-peers`; `make bench-peers PEERS=--quick` takes minutes instead of hours. Every
peer is a process of its own with the same weights, dtype, threads, token ids and lengths. They
run in turn, one job at a time while the others sleep, in changing order; ratios are taken within
a round.

plain_over_best_torch_peer     by B: plain tokens/s over the fastest peer built on torch, on
                               spec_bench with outputs of mixed lengths; best_torch_peer names it
speculative_over_plain         by B and workload: our `auto` over our plain decoding
bandwidth_share_plain_b1       time that memory needs for a step at B = 1 over the time we take,
                               the bandwidth measured between the runs
identical_tokens               by peer: share of requests with the very tokens of our plain run
peers                          every raw figure: tokens/s, TTFT, TPOT, P50, P99, memory, versions
refused                        what a peer could not do, with its reason
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig

from engine.loader import load_tokenizer
from tests.benchmarks.limits import ModelCounts, Phase, measure_machine, phase_bytes
from tests.benchmarks.peers_jobs import Served
from tests.benchmarks.peers_plot import plot
from tests.benchmarks.peers_process import PeerProcess
from tests.benchmarks.peers_workloads import FULL, QUICK, Workload, Workloads
from tests.benchmarks.workloads import BUILD, model_folder, spec_bench_prompts, spread, write_result

CONTENDERS = (  # (name, kind of worker, mode)
    ("tandem_plain", "tandem", "plain"),
    ("tandem_speculative", "tandem", "speculative"),
    ("transformers_generate", "transformers_generate", "plain"),
    ("transformers_assisted", "transformers_generate", "speculative"),
    ("transformers_batching", "transformers_batching", "plain"),
)
PLAIN, SPECULATIVE = "tandem_plain", "tandem_speculative"
TORCH_PEERS = ("transformers_generate", "transformers_batching")
OPEN_ROWS = 8
OPEN_LOAD = 0.7  # of what our plain decoding reaches with as many rows


def summary(served: Sequence[Served], seconds: float) -> dict[str, Any]:
    """Figures of one run of a workload."""
    gaps = [r.tpot_seconds for r in served if r.tpot_seconds is not None]
    return {
        "tokens_per_second": sum(len(r.token_ids) for r in served) / seconds,
        "ttft_seconds": percentiles([r.ttft_seconds for r in served]),
        "tpot_seconds": percentiles(gaps),
        "latency_seconds": percentiles([r.finished_at - r.sent_at for r in served]),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The smallest value that at least so many percent do not exceed."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {f"p{p}": ordered[max(0, -(-len(ordered) * p // 100) - 1)] for p in (50, 99)}


class Comparison:
    """Runs workloads on all peers in turn and keeps what they gave."""

    def __init__(self, processes: Mapping[str, PeerProcess], contenders: Sequence[Any]) -> None:
        self._processes = processes
        self._contenders = contenders
        self.runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
        self.refused: dict[str, str] = {}
        self._tokens: dict[str, dict[str, list[tuple[int, ...]]]] = {}

    def run(self, workload: Workload, rounds: int) -> None:
        key = f"{workload.name}@{workload.num_rows}"
        for number in range(-1, rounds):  # the first one warms up and is not kept
            order = self._contenders if number % 2 == 0 else list(reversed(self._contenders))
            for name, kind, mode in order:
                if kind in self._processes and f"{name} {key}" not in self.refused:
                    self._run_one(name, self._processes[kind], mode, workload, key, number)

    def _run_one(
        self,
        name: str,
        process: PeerProcess,
        mode: str,
        workload: Workload,
        key: str,
        number: int,
    ) -> None:
        served: list[Served] = []
        seconds = 0.0
        for job in workload.jobs:
            # Every run has tenants of its own: no run finds the prompts of one before it cached.
            tenants = tuple(f"{mode}-{number}-{tenant}" for tenant in job.tenants)
            answer = process.ask(replace(job, mode=mode, tenants=tenants))
            if isinstance(answer, str):
                self.refused[f"{name} {key}"] = answer
                return
            served.extend(answer)
            seconds += max(request.finished_at for request in answer)
        if number < 0:
            return
        figures = summary(served, seconds) | {"peak_bytes": process.peak_bytes}
        self.runs.setdefault(key, {}).setdefault(name, []).append(figures)
        self._tokens.setdefault(key, {})[name] = [request.token_ids for request in served]
        print(f"{key:20} {name:22} {figures['tokens_per_second']:8.1f} tokens/s", flush=True)

    def rate(self, key: str, name: str) -> float:
        """Median tokens/s."""
        return statistics.median([float(r["tokens_per_second"]) for r in self.runs[key][name]])

    def ratios(self, key: str, above: str, below: Sequence[str]) -> list[float]:
        """Per round, tokens/s of `above` over the fastest of `below` that ran."""
        found = self.runs.get(key, {})
        rivals = [found[name] for name in below if name in found]
        if above not in found or not rivals:
            return []
        return [
            own["tokens_per_second"] / max(rival[n]["tokens_per_second"] for rival in rivals)
            for n, own in enumerate(found[above])
        ]

    def identical(self) -> dict[str, float]:
        """By peer: share of requests whose tokens are those of our plain run."""
        counts: dict[str, list[bool]] = {}
        for by_name in self._tokens.values():
            for name, tokens in by_name.items():
                if name != PLAIN and PLAIN in by_name:
                    pairs = zip(by_name[PLAIN], tokens, strict=True)
                    counts.setdefault(name, []).extend(a == b for a, b in pairs)
        return {name: round(sum(equal) / len(equal), 4) for name, equal in counts.items()}


def report(comparison: Comparison, batch_sizes: Sequence[int]) -> dict[str, Any]:
    """The ratios that are quoted, out of every raw figure."""
    over_best: dict[str, dict[str, float]] = {}
    best: dict[str, str] = {}
    over_plain: dict[str, dict[str, dict[str, float]]] = {}
    for size in batch_sizes:
        key = f"spec_bench@{size}"
        if found := comparison.ratios(key, PLAIN, TORCH_PEERS):
            over_best[str(size)] = spread(found)
            rates = {
                name: comparison.rate(key, name)
                for name in TORCH_PEERS
                if name in comparison.runs[key]
            }
            best[str(size)] = max(rates, key=rates.__getitem__)
    for key in comparison.runs:
        if found := comparison.ratios(key, SPECULATIVE, [PLAIN]):
            workload, _, num_rows = key.partition("@")
            over_plain.setdefault(num_rows, {})[workload] = spread(found)
    return {
        "plain_over_best_torch_peer": over_best,
        "best_torch_peer": best,
        "speculative_over_plain": over_plain,
        "identical_tokens": comparison.identical(),
        "peers": comparison.runs,
        "refused": comparison.refused,
    }


def bandwidth_share(comparison: Comparison, config: Any, dtype: str) -> dict[str, float]:
    """Of plain decoding with one row: the time that memory needs over the time between tokens.

    The history is counted as 64 tokens, which is less than it was: the share is not flattered.
    """
    tensor_dtype = getattr(torch, dtype)
    machine = measure_machine(torch.device("cpu"), tensor_dtype)
    counts = ModelCounts.of(config)
    size = torch.empty((), dtype=tensor_dtype).element_size()
    limit = phase_bytes(counts, Phase(1, 1, 64, 1), size) / machine.bytes_per_second
    runs = comparison.runs["spec_bench@1"][PLAIN]
    return {
        "bytes_per_second": machine.bytes_per_second,
        "limit_seconds": limit,
        "share": round(limit / statistics.median(r["tpot_seconds"]["p50"] for r in runs), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Tandem against its peers on this machine.")
    parser.add_argument("--quick", action="store_true", help="minutes, with rougher figures")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--workloads", help="only these, separated by commas")
    parser.add_argument("--peers", help="only these kinds, separated by commas")
    parser.add_argument("--out", default="peers")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    effort = QUICK if options.quick else FULL
    kinds = list(dict.fromkeys(kind for _, kind, _ in CONTENDERS))
    if options.peers:
        unknown = set(options.peers.split(",")) - set(kinds)
        if unknown:
            parser.error(
                f"--peers: unknown {', '.join(sorted(unknown))}; known: {', '.join(kinds)}"
            )
        kinds = options.peers.split(",")
    folder = model_folder()
    tokenizer = load_tokenizer(folder)
    workloads = Workloads(
        lambda text: list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
        ),
        spec_bench_prompts(),
        effort,
    )
    wanted = set(options.workloads.split(",")) if options.workloads else None
    chosen = [w for w in workloads.closed() if wanted is None or w.name in wanted]
    if not chosen:
        parser.error(f"--workloads: none is called {options.workloads}")
    processes: dict[str, PeerProcess] = {}
    refused: dict[str, str] = {}
    versions: dict[str, Any] = {}
    most_rows = max(effort.batch_sizes)
    try:
        for kind in kinds:
            process = PeerProcess(kind, folder, options.dtype, most_rows, options.threads)
            if process.refusal is not None:
                refused[kind] = process.refusal
                continue
            processes[kind] = process
            versions[kind] = process.versions
            print(kind, process.versions, flush=True)
        comparison = Comparison(processes, CONTENDERS)
        comparison.refused.update(refused)
        for workload in chosen:
            comparison.run(workload, effort.rounds)
        key = f"spec_bench@{OPEN_ROWS}"
        if PLAIN in comparison.runs.get(key, {}) and (wanted is None or "azure" in wanted):
            mean_tokens = statistics.mean(effort.output_tokens)
            rate = OPEN_LOAD * comparison.rate(key, PLAIN) / mean_tokens
            comparison.run(workloads.open(rate, OPEN_ROWS), max(1, effort.rounds // 2))
        result = report(comparison, effort.batch_sizes)
    finally:
        for process in processes.values():
            process.close()
    if PLAIN in comparison.runs.get("spec_bench@1", {}):
        result["bandwidth_share_plain_b1"] = bandwidth_share(
            comparison, AutoConfig.from_pretrained(folder), options.dtype
        )
    result |= {"dtype": options.dtype, "threads": options.threads, "quick": options.quick}
    result["versions"] = versions
    write_result(options.out, result)
    plot(result, BUILD / f"{options.out}.png")


if __name__ == "__main__":
    main()
