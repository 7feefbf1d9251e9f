"""Tandem against what a user would pick instead -> build/bench/peers.json, peers.png.

Run with `make bench-peers`; PEERS=--quick takes minutes, PEERS="--medium --minutes 25" as long as
it says. What has been measured is kept: a run that was interrupted, or ran out of its minutes,
goes on where it was when it is started again, until the engine changes.

Every peer is a process of its own with the same weights, dtype, threads, token ids and lengths,
in an environment of its own where it is no dependency of ours (peers_environments). They run in
turn, one job at a time while the others are stopped, in changing order; ratios are taken within a
round.

plain_over_best_torch_peer     by B: our plain tokens/s over the fastest peer built on torch that
                               runs our weights in our dtype, on spec_bench with outputs of mixed
                               lengths; best_torch_peer names it
plain_over_other_peers         by peer and workload@B: our plain tokens/s over engines that are not
                               built on torch, and over our own int8; names tell the weights
speculative_over_plain         by B and workload: our `auto` over our plain decoding
peers_speculative_over_their_plain   the same of peers that speculate
bandwidth_share_plain_b1       time that memory needs for a step at B = 1 over the time we take,
                               the bandwidth measured in the same run
identical_tokens               by peer: share of requests with the very tokens of our plain run
peers                          every raw figure: tokens/s, TTFT, TPOT, P50, P99, memory
versions, refused, unfinished  by contender; what a peer could not do, with its reason; workloads
                               for which the minutes were too few
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from engine.loader import load_tokenizer
from tests.benchmarks.limits import ModelCounts, Phase, measure_machine, phase_bytes
from tests.benchmarks.peers_comparison import Comparison
from tests.benchmarks.peers_contenders import CONTENDERS, REFERENCE, Contender, start
from tests.benchmarks.peers_environments import EnvironmentRefusedError
from tests.benchmarks.peers_parts import Part, Parts, engine_digest
from tests.benchmarks.peers_plot import plot
from tests.benchmarks.peers_process import PeerProcess
from tests.benchmarks.peers_report import rate, report
from tests.benchmarks.peers_workloads import FULL, MEDIUM, QUICK, Effort, Workload, Workloads
from tests.benchmarks.workloads import BUILD, model_folder, spec_bench_prompts, write_result

OPEN_ROWS = 8
OPEN_LOAD = 0.7  # of what our plain decoding reaches with as many rows
OTHERS_BATCH_SIZES = (1, 8)  # of engines that are not built on torch
BY_CATEGORY = (REFERENCE, "tandem_speculative", "transformers_generate", "vllm")


def takes_part(contender: Contender, workload: Workload) -> bool:
    """What is asked of whom, so that a run ends in time."""
    if "/" in workload.name:
        return contender.name in BY_CATEGORY
    return contender.group == "torch" or workload.num_rows in OTHERS_BATCH_SIZES


def run_group(
    group: str,
    contenders: Sequence[Contender],
    workloads: Callable[[], Sequence[Workload]],
    parts: Parts,
    start_process: Callable[[str], PeerProcess],
    rounds: int,
    has_time: Callable[[], bool],
) -> tuple[dict[str, str], list[str]]:
    """(refused with reasons, keys for which there was no time) of one group's contenders.

    workloads is asked anew after each: the open loop is known when the closed one has run.
    """
    members = [c for c in contenders if c.group == group or c.name == REFERENCE]

    def unfinished() -> list[tuple[Workload, list[Contender]]]:
        found = []
        for workload in workloads():
            key = f"{workload.name}@{workload.num_rows}"
            here = [c for c in members if takes_part(c, workload)]
            missing = [c for c in here if parts.find(c.name, key) is None]
            if any(c.group == group for c in missing):
                found.append((workload, here))
        return found

    refused: dict[str, str] = {}
    processes: dict[str, PeerProcess] = {}
    tried: set[str] = set()
    try:
        while has_time():
            waiting = [u for u in unfinished() if f"{u[0].name}@{u[0].num_rows}" not in tried]
            if not waiting:
                return refused, []
            workload, here = waiting[0]
            tried.add(f"{workload.name}@{workload.num_rows}")
            for kind in dict.fromkeys(c.kind for c in here):
                if kind in processes or kind in refused:
                    continue
                try:
                    process = start_process(kind)
                    reason = process.refusal
                except EnvironmentRefusedError as error:
                    reason = str(error)
                if reason is not None:
                    refused[kind] = reason
                    print(f"{kind} refused: {reason}", flush=True)
                else:
                    processes[kind] = process
                    print(kind, process.versions, flush=True)
            comparison = Comparison(processes, here, parts)
            comparison.run(workload, rounds)
            refused |= comparison.refused
        return refused, [f"{w.name}@{w.num_rows}" for w, _ in unfinished()]
    finally:
        for process in processes.values():
            process.close()


def bandwidth_share(part: Part, config: Any, dtype: str) -> dict[str, float]:
    """Of plain decoding with one row: the time that memory needs over the time between tokens.

    The history is counted as 64 tokens, which is less than it was: the share is not flattered.
    """
    tensor_dtype = getattr(torch, dtype)
    machine = measure_machine(torch.device("cpu"), tensor_dtype)
    counts = ModelCounts.of(config)
    size = torch.empty((), dtype=tensor_dtype).element_size()
    limit = phase_bytes(counts, Phase(1, 1, 64, 1), size) / machine.bytes_per_second
    taken = statistics.median(figures["tpot_seconds"]["p50"] for figures in part.rounds)
    return {
        "bytes_per_second": machine.bytes_per_second,
        "limit_seconds": limit,
        "share": round(limit / taken, 4),
    }


def _options() -> tuple[argparse.Namespace, Effort, list[Contender]]:
    parser = argparse.ArgumentParser(description="Tandem against its peers on this machine.")
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument("--quick", action="store_true", help="minutes, with rougher figures")
    effort.add_argument("--medium", action="store_true", help="half an hour instead of hours")
    parser.add_argument("--minutes", type=float, help="begin no further workload after these")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--workloads", help="only these, separated by commas")
    parser.add_argument("--contenders", help="only these beside ours, separated by commas")
    parser.add_argument("--out", default="peers")
    options = parser.parse_args()
    chosen = QUICK if options.quick else MEDIUM if options.medium else FULL
    contenders = list(CONTENDERS)
    if options.contenders is not None:
        wanted = set(filter(None, options.contenders.split(",")))
        known = {c.name for c in CONTENDERS}
        if unknown := sorted(wanted - known):
            parser.error(
                f"--contenders: unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        contenders = [c for c in CONTENDERS if c.kind == "tandem" or c.name in wanted]
    return options, chosen, contenders


def main() -> None:
    options, effort, contenders = _options()
    started = time.monotonic()
    torch.set_num_threads(options.threads)
    folder = model_folder()
    tokenizer = load_tokenizer(folder)
    made = Workloads(
        lambda text: list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
        ),
        spec_bench_prompts(),
        effort,
    )
    wanted = set(options.workloads.split(",")) if options.workloads else None
    closed = [w for w in made.closed() if wanted is None or w.name in wanted]
    if not closed:
        raise SystemExit(f"--workloads: no closed loop is called {options.workloads}")
    settings = {
        "engine": engine_digest(),
        "dtype": options.dtype,
        "threads": options.threads,
        "model": Path(folder).name,
        "effort": asdict(effort),
    }
    parts = Parts(BUILD / "peers-parts", settings)

    def workloads() -> list[Workload]:
        plain = parts.find(REFERENCE, f"spec_bench@{OPEN_ROWS}")
        if plain is None or (wanted is not None and "azure" not in wanted):
            return closed
        arriving = OPEN_LOAD * rate(plain) / statistics.mean(effort.output_tokens)
        chats = [w for w in closed if "/" not in w.name]
        return [*chats, made.open(arriving, OPEN_ROWS), *closed[len(chats) :]]

    refused: dict[str, str] = {}
    unfinished: dict[str, list[str]] = {}
    for group in dict.fromkeys(c.group for c in contenders):
        rows = max(w.num_rows for w in closed)
        most_rows = rows if group == "torch" else min(rows, max(OTHERS_BATCH_SIZES))
        reasons, left = run_group(
            group,
            contenders,
            workloads,
            parts,
            lambda kind, rows=most_rows: start(  # type: ignore[misc]
                kind, folder, options.dtype, rows, options.threads
            ),
            effort.rounds,
            lambda: options.minutes is None or time.monotonic() - started < 60 * options.minutes,
        )
        refused |= reasons
        if left:
            unfinished[group] = left
    result = report(parts.all())
    if (alone := parts.find(REFERENCE, "spec_bench@1")) is not None:
        config = AutoConfig.from_pretrained(folder)
        result["bandwidth_share_plain_b1"] = bandwidth_share(alone, config, options.dtype)
    result |= settings | {"refused": refused, "unfinished": unfinished, "quick": options.quick}
    write_result(options.out, result)
    if result["peers"]:
        plot(result, BUILD / f"{options.out}.png")


if __name__ == "__main__":
    main()
