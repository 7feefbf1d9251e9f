"""The shipped head on Spec-Bench: acceptance length, and speed by batch size.

Run with `make bench-heads`. Writes build/bench/heads.json: `distilled`, `variational` and
`control` as they were measured when the head was trained (results.json beside the weights), and
`shipped`, measured now: acceptance length with chains of four drafts at T = 0, and the speed of
`auto` over plain decoding by B, alternately in one run.
"""

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

from engine.config import EngineConfig, SpeculationConfig
from engine.engine import Engine
from engine.loader import load_model
from engine.request import GenerationRequest
from tests.benchmarks.workloads import (
    chat_token_ids,
    greedy_request,
    model_folder,
    run_all,
    set_threads,
    spec_bench_prompts,
    spread,
    write_result,
)

SHIPPED = Path(__file__).resolve().parents[2] / "engine" / "drafter" / "pretrained"
_NUM_DRAFTS = 4


def make_engine(head: Path, drafters: tuple[str, ...], num_rows: int) -> Engine:
    config = EngineConfig(
        target=model_folder(),
        dtype="bfloat16",
        max_num_rows=num_rows,
        max_model_tokens=2048,
        speculation=SpeculationConfig(
            drafters=drafters, head=str(head), max_draft_tokens=_NUM_DRAFTS
        ),
    )
    return Engine.from_models(config, load_model(config.target, dtype="bfloat16", device="cpu"))


def requests_of(
    engine: Engine, prompts: list[tuple[str, str]], mode: str, num_tokens: int, name: str
) -> list[GenerationRequest]:
    return [
        greedy_request(
            f"{name}-{index}", chat_token_ids(engine, text), num_tokens, mode, ignore_eos=False
        )
        for index, (_, text) in enumerate(prompts)
    ]


def acceptance(engine: Engine, prompts: list[tuple[str, str]], num_tokens: int) -> dict[str, Any]:
    """Chains of four drafts in every round, by the head alone."""
    _, finished, _, _ = run_all(engine, requests_of(engine, prompts, "on", num_tokens, "tau"))
    by_category: dict[str, list[int]] = {}
    accepted = rounds = 0
    for index, (category, _) in enumerate(prompts):
        stats = finished[f"tau-{index}"]
        accepted += stats.num_accepted_tokens
        rounds += stats.num_verify_steps
        total = by_category.setdefault(category, [0, 0])
        total[0] += stats.num_accepted_tokens
        total[1] += stats.num_verify_steps
    return {
        "acceptance_length": round(1 + accepted / max(1, rounds), 4),
        "num_prompts": len(prompts),
        "num_rounds": rounds,
        "by_category": {c: round(1 + a / max(1, n), 3) for c, (a, n) in by_category.items()},
    }


def speedups(
    engine: Engine,
    prompts: list[tuple[str, str]],
    batch_sizes: list[int],
    num_tokens: int,
    rounds: int,
) -> dict[str, Any]:
    """`auto` over `off` by B, the same prompts in both, alternately."""
    found = {}
    for size in batch_sizes:
        chosen = prompts[: max(size, min(len(prompts), 4))]
        ratios = []
        for number in range(rounds):
            rates = {}
            order = ["off", "auto"] if number % 2 == 0 else ["auto", "off"]
            for mode in order:
                tokens, seconds = 0, 0.0
                for start in range(0, len(chosen), size):
                    part = chosen[start : start + size]
                    name = f"{mode}-{size}-{number}-{start}"
                    outputs, _, _, wall = run_all(
                        engine, requests_of(engine, part, mode, num_tokens, name)
                    )
                    tokens += sum(len(output) for output in outputs.values())
                    seconds += wall
                rates[mode] = tokens / seconds
            ratios.append(rates["auto"] / rates["off"])
        found[str(size)] = spread(ratios)
        print(f"B={size}: auto over off {statistics.median(ratios):.3f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", type=Path, default=SHIPPED)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-sizes", default="1,2,4,8,16,32")
    parser.add_argument("--name", default="heads")
    options = parser.parse_args()
    set_threads(options.threads)
    prompts = spec_bench_prompts()
    random.Random(0).shuffle(prompts)
    prompts = prompts[: options.prompts]
    sizes = [int(size) for size in options.batch_sizes.split(",") if size]
    engine = make_engine(options.head, ("head",), max([8, *sizes]))
    shipped = acceptance(engine, prompts, options.tokens)
    print(
        f"acceptance length {shipped['acceptance_length']} (K = {_NUM_DRAFTS}, T = 0)", flush=True
    )
    del engine
    if sizes:
        engine = make_engine(options.head, ("prompt_lookup", "head"), max(sizes))
        shipped["speedup"] = speedups(engine, prompts, sizes, options.tokens, options.rounds)
    result: dict[str, Any] = {"shipped": shipped}
    recorded = options.head / "results.json"
    if recorded.exists():
        trained = json.loads(recorded.read_text())
        result |= {name: trained[name] for name in ("distilled", "variational", "control")}
    write_result(options.name, result)


if __name__ == "__main__":
    main()
