"""What a step costs: `python -m tests.benchmarks.decode` -> build/bench/decode.json.

plain_vs_generate       tokens/s of our plain decoding over transformers' generate, same weights,
                        dtype, threads and prompts; 128 new tokens; runs in turn, ratio per pair
verify_cost_vs_plain    time of a step that verifies n tokens per row over one that decodes one
verify_vs_forward       a verify step with K = 4 over a bare forward of five tokens per row
invariant_vs_fast       step time with the bit-exact padding over without, by batch size
target_calls            forwards for 24 prompts x 40 tokens at K = 5, equal acceptance: ours, and
                        a static batch whose cached path has no bonus token
"""

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from engine.drafter.base import DraftJob, Proposal
from engine.engine import Engine
from engine.layout.plan import ForwardRow
from tests.benchmarks.workloads import (
    chat_token_ids,
    greedy_request,
    make_engine,
    model_folder,
    run_all,
    set_threads,
    spec_bench_prompts,
    spread,
    write_result,
)

NEW_TOKENS = 128
NUM_CALL_PROMPTS, NUM_CALL_TOKENS, CALL_DRAFTS = 24, 40, 5


class ScriptedDrafter:
    """Proposes tokens of a known output with planted errors: acceptance is exactly as scripted."""

    name = "prompt_lookup"

    def __init__(self, outputs: dict[str, list[int]], period: int | None) -> None:
        """Every period-th output token is drafted wrongly; None drafts only wrong ones."""
        self._outputs = outputs
        self._period = period

    def is_right(self, index: int) -> bool:
        return self._period is not None and index % self._period != self._period - 1

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        proposals = []
        for job in jobs:
            start = job.live.num_output_tokens
            output = self._outputs[job.live.request_id][start : start + job.max_drafts]
            proposals.append(
                Proposal(
                    tuple(
                        token_id if self.is_right(start + offset) else (token_id + 1) % 1000
                        for offset, token_id in enumerate(output)
                    ),
                    drafter=self.name,
                )
            )
        return proposals

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""

    def check_integrity(self) -> None:
        """Nothing is kept."""


def plain_vs_generate(dtype: str, rounds: int) -> dict[str, Any]:
    engine = make_engine(dtype, 8)
    reference = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=getattr(torch, dtype))
    texts = [prompt for _, prompt in spec_bench_prompts()]
    encoded = [chat_token_ids(engine, text) for text in texts[::20]]
    equal = [ids[:64] for ids in encoded if len(ids) >= 64][:8]
    mixed = sorted(encoded, key=len)[::3][:8]
    cases = {"1": equal[:1], "8": equal, "8_mixed": mixed}
    found: dict[str, Any] = {}
    for name, prompts in cases.items():
        _ours(engine, prompts, 4), _generate(reference, prompts, 4)
        ratios, ours, theirs = [], [], []
        for _ in range(rounds):
            ours.append(_ours(engine, prompts, NEW_TOKENS))
            theirs.append(_generate(reference, prompts, NEW_TOKENS))
            ratios.append(ours[-1] / theirs[-1])
        found[name] = {
            **spread(ratios),
            "tokens_per_second": spread(ours),
            "generate_tokens_per_second": spread(theirs),
            "prompt_tokens": [len(prompt) for prompt in prompts],
        }
        print(dtype, "plain / generate", name, found[name])
    return found


def _ours(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
    requests = [
        greedy_request(f"{n}-{time.monotonic_ns()}", p, max_tokens, "off", ignore_eos=True)
        for n, p in enumerate(prompts)
    ]
    _, _, _, seconds = run_all(engine, requests)
    return len(prompts) * max_tokens / seconds


def _generate(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    started = time.perf_counter()
    model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return len(prompts) * max_tokens / (time.perf_counter() - started)


def verify_cost(dtype: str, rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Cost of verification by tokens per row, and against a bare forward of as many tokens."""
    by_tokens: dict[str, Any] = {}
    against_forward: dict[str, Any] = {}
    for num_rows in (1, 8):
        engine = make_engine(dtype, num_rows, max_draft_tokens=16)
        prompts = [[100 + n] * 64 for n in range(num_rows)]
        ratios: dict[int, list[float]] = {2: [], 3: [], 5: [], 9: [], 17: []}
        forward_ratios = []
        for _ in range(rounds):
            plain = _step_seconds(engine, prompts, 0)
            for tokens, found in ratios.items():
                verify = _step_seconds(engine, prompts, tokens - 1)
                found.append(verify / plain)
                if tokens == 5:
                    forward_ratios.append(verify / _forward_seconds(engine, prompts, 5))
        by_tokens[str(num_rows)] = {str(t): spread(r) for t, r in ratios.items()}
        against_forward[str(num_rows)] = spread(forward_ratios)
        print(dtype, "verify / plain, rows", num_rows, by_tokens[str(num_rows)])
        print(dtype, "verify of 5 / forward of 5", against_forward[str(num_rows)])
    return by_tokens, against_forward


def _step_seconds(engine: Engine, prompts: Sequence[Sequence[int]], num_drafts: int) -> float:
    """Median time of a step that verifies num_drafts wrong drafts per row."""
    stamp = time.monotonic_ns()
    requests = [
        greedy_request(f"{n}-{stamp}", prompt, 20, "on" if num_drafts else "off", ignore_eos=True)
        for n, prompt in enumerate(prompts)
    ]
    outputs = {request.request_id: [7] * 64 for request in requests}
    engine._drafters._drafters[:] = [ScriptedDrafter(outputs, None)]
    engine._lengths.max_draft_tokens = num_drafts
    _, _, steps, _ = run_all(engine, requests)
    wanted = len(prompts) * (1 + num_drafts)
    times = [
        step.duration_nanoseconds
        for step in steps
        if sum(r.num_positions for r in step.rows) == wanted
        and not step.rows[0].num_prefill_positions
    ]
    return statistics.median(times) / 1e9


def _forward_seconds(engine: Engine, prompts: Sequence[Sequence[int]], width: int) -> float:
    runner = engine._verifier.runner
    rows = [runner.cache.allocate_row([1], f"bench{n}")[0] for n in range(len(prompts))]
    try:
        for row in rows:
            runner.cache.reserve(row, 96)
        runner.forward([ForwardRow(row, [5] * 64, 0, 0) for row in rows])
        times = []
        for _ in range(12):
            started = time.perf_counter()
            runner.forward([ForwardRow(row, [5] * width, 64, width) for row in rows])
            times.append(time.perf_counter() - started)
    finally:
        for row in rows:
            runner.cache.free_row(row, keep=False)
    return statistics.median(times)


def invariant_vs_fast(dtype: str, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for num_rows in (1, 2, 4, 8, 16):
        engines = {
            numerics: make_engine(dtype, num_rows, numerics=numerics)
            for numerics in ("invariant", "fast")
        }
        prompts = [[100 + n] * (40 + 9 * n) for n in range(num_rows)]
        ratios = []
        for _ in range(rounds):
            times = {name: _step_seconds(engine, prompts, 0) for name, engine in engines.items()}
            ratios.append(times["invariant"] / times["fast"])
        found[str(num_rows)] = spread(ratios)
        print(dtype, "invariant / fast, rows", num_rows, found[str(num_rows)])
        del engines
        gc.collect()
    return found


def target_calls(dtype: str) -> dict[str, Any]:
    """Forwards at equal acceptance: the same drafts, wrong at the same places, for both."""
    engine = make_engine(dtype, 8)
    texts = [prompt for _, prompt in spec_bench_prompts()][::20][:NUM_CALL_PROMPTS]
    prompts = [chat_token_ids(engine, text)[-120:] for text in texts]

    def requests(mode: str) -> list[Any]:
        return [
            greedy_request(f"{mode}{n}", p, NUM_CALL_TOKENS, mode, ignore_eos=True)
            for n, p in enumerate(prompts)
        ]

    outputs, _, _, _ = run_all(engine, requests("off"))
    scripted = {request_id.replace("off", "on"): ids for request_id, ids in outputs.items()}
    drafter = ScriptedDrafter(scripted, period=12)
    found: dict[str, Any] = {}
    for num_rows in (1, 4, 8):
        engine = make_engine(dtype, num_rows, max_draft_tokens=CALL_DRAFTS)
        engine._drafters._drafters[:] = [drafter]
        before = engine._verifier.runner.num_forwards
        spoken, _, _, _ = run_all(engine, requests("on"))
        if spoken != scripted:
            raise SystemExit("speculation changed the tokens")
        found[str(num_rows)] = {
            "ours": engine._verifier.runner.num_forwards - before,
            "static_without_bonus": _static_calls(drafter, num_rows),
        }
        print("target calls, rows", num_rows, found[str(num_rows)])
    return found


def _static_calls(drafter: ScriptedDrafter, num_rows: int) -> int:
    """Forwards of static batches in which a verification of K drafts yields at most K tokens
    (the logits after the last draft are dropped) and the nearest end limits all rows."""
    calls = 0
    for first in range(0, NUM_CALL_PROMPTS, num_rows):
        done = [0] * min(num_rows, NUM_CALL_PROMPTS - first)
        while min(done) < NUM_CALL_TOKENS:
            remaining = min(NUM_CALL_TOKENS - d for d in done if d < NUM_CALL_TOKENS)
            num_drafts = min(CALL_DRAFTS, remaining)
            calls += 1
            for row, start in enumerate(done):
                if start >= NUM_CALL_TOKENS:
                    continue
                accepted = 0
                while accepted < num_drafts and drafter.is_right(start + accepted):
                    accepted += 1
                done[row] = min(NUM_CALL_TOKENS, start + min(accepted + 1, num_drafts))
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    set_threads(arguments.threads)
    result: dict[str, Any] = {
        "threads": arguments.threads,
        "torch": torch.__version__,
        "new_tokens": NEW_TOKENS,
    }
    for dtype in arguments.dtypes.split(","):
        by_tokens, against_forward = verify_cost(dtype, arguments.rounds)
        result[dtype] = {
            "plain_vs_generate": plain_vs_generate(dtype, arguments.rounds),
            "verify_cost_vs_plain": by_tokens,
            "verify_vs_forward": against_forward,
            "invariant_vs_fast": invariant_vs_fast(dtype, arguments.rounds),
        }
    result["target_calls"] = target_calls(arguments.dtypes.split(",")[0])
    result.update(result[arguments.dtypes.split(",")[0]])
    write_result("decode", result)


if __name__ == "__main__":
    main()
