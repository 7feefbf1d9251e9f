"""Speculation changes no token: `python -m tests.benchmarks.equivalence`
-> build/bench/equivalence.json.

For every Spec-Bench prompt, 128 new tokens: our speculative decoding in batches of 8, by drafter
and dtype, against our own plain decoding one request at a time (equal to the bit or a
divergence), and in float32 against transformers' generate (equal, or a proven tie: the margin of
the two tokens is shown). Progress is kept in build/bench, so an interrupted run goes on.
"""

import argparse
import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from engine.loader import LoadedModel, describe_model, load_model
from tests.benchmarks.workloads import (
    BUILD,
    chat_token_ids,
    greedy_request,
    make_engine,
    model_folder,
    run_all,
    set_threads,
    spec_bench_prompts,
    write_result,
)

NEW_TOKENS = 128
TIE_MARGIN = 1e-3  # float32 logits of this model agree to about 1e-4 between kernels
SKIPPED_LAYERS = range(12, 20)  # of 30: without them the target still agrees with itself often
NUM_GENERATE_ROWS = 8


def layer_skip_draft(dtype: str) -> LoadedModel:
    """The target without its middle layers: a draft model with the right vocabulary, untrained."""
    target = load_model(model_folder(), dtype=dtype, device="cpu")
    config = copy.deepcopy(target.model.config)
    kept = [layer for layer in range(config.num_hidden_layers) if layer not in SKIPPED_LAYERS]
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in kept]
    draft = AutoModelForCausalLM.from_config(config).to(target.model.dtype).eval()
    for index, layer in enumerate(kept):
        draft.model.layers[index].load_state_dict(target.model.model.layers[layer].state_dict())
    others = {
        name: value
        for name, value in target.model.state_dict().items()
        if not name.startswith("model.layers.")
    }
    draft.load_state_dict(others, strict=False)
    return describe_model("layer-skip", draft, target.tokenizer)


def cached(name: str, make: Callable[[], dict[str, list[int]]]) -> dict[str, list[int]]:
    path = BUILD / "equivalence-parts" / f"{name}.json"
    if path.is_file():
        found: dict[str, list[int]] = json.loads(path.read_text())
        return found
    result = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result))
    part.replace(path)
    print("done:", name, flush=True)
    return result


def ours(
    dtype: str, num_rows: int, prompts: dict[str, list[int]], mode: str, **options: Any
) -> dict[str, list[int]]:
    if "draft_model" in options.get("drafters", ()):
        options["draft"] = layer_skip_draft(dtype)
    engine = make_engine(dtype, num_rows, max_model_tokens=4096, **options)
    if engine.info.guarantee != "bit_exact":
        print(f"note: {dtype} on this machine is {engine.info.guarantee}")
    requests = [
        greedy_request(number, ids, NEW_TOKENS, mode, ignore_eos=False)
        for number, ids in prompts.items()
    ]
    outputs, stats, _, seconds = run_all(engine, requests)
    drafted = sum(s.num_draft_tokens for s in stats.values())
    accepted = sum(s.num_accepted_tokens for s in stats.values())
    tokens = sum(map(len, outputs.values()))
    print(
        f"{dtype} {options.get('drafters')} {mode} rows {num_rows}: {tokens} tokens, "
        f"{tokens / seconds:.1f} tokens/s, {accepted}/{drafted} accepted",
        flush=True,
    )
    return outputs


def generated(prompts: dict[str, list[int]], eos_token_ids: Sequence[int]) -> dict[str, list[int]]:
    """transformers' greedy generate, in batches of prompts of similar length, padded left."""
    model = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32)
    found = {}
    by_length = sorted(prompts, key=lambda number: len(prompts[number]))
    for start in range(0, len(by_length), NUM_GENERATE_ROWS):
        numbers = by_length[start : start + NUM_GENERATE_ROWS]
        width = max(len(prompts[number]) for number in numbers)
        padding = [width - len(prompts[number]) for number in numbers]
        rows = [[0] * pad + prompts[n] for pad, n in zip(padding, numbers, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        output = model.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=list(eos_token_ids),
        )
        for number, tokens in zip(numbers, output[:, width:].tolist(), strict=True):
            ends = [at for at, token in enumerate(tokens) if token in eos_token_ids]
            found[number] = tokens[: ends[0] + 1] if ends else tokens
    return found


def margin(model: Any, prompt: list[int], left: list[int], right: list[int]) -> float:
    """Difference of the two tokens' logits where the outputs first differ, in float64."""
    at = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )
    if at >= len(left) or at >= len(right):
        return float("inf")
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + left[:at]])).logits[0, -1]
    return float((logits[left[at]] - logits[right[at]]).abs())


def compare(
    prompts: dict[str, list[int]], expected: dict[str, list[int]], got: dict[str, list[int]]
) -> dict[str, int]:
    exact = sum(expected[number] == got[number] for number in prompts)
    return {
        "sequences": len(prompts),
        "exact": exact,
        "ties": 0,
        "divergences": len(prompts) - exact,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=480)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--no-generate", action="store_true", help="leave transformers out")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    set_threads(arguments.threads)
    texts = [prompt for _, prompt in spec_bench_prompts()]
    step = max(1, len(texts) // arguments.prompts)
    engine = make_engine("float32", 1, max_model_tokens=512)
    eos_token_ids = engine.info.eos_token_ids
    chosen = list(enumerate(texts))[::step][: arguments.prompts]
    prompts = {str(n): chat_token_ids(engine, text) for n, text in chosen}
    del engine
    result: dict[str, Any] = {"prompts": len(prompts), "by_drafter": {}}
    tag = f"{len(prompts)}"
    for dtype in arguments.dtypes.split(","):
        plain = cached(f"{tag}-{dtype}-plain-1", lambda d=dtype: ours(d, 1, prompts, "off"))
        for drafter in ("prompt_lookup", "draft_model"):
            got = cached(
                f"{tag}-{dtype}-{drafter}-8",
                lambda d=dtype, name=drafter: ours(d, 8, prompts, "on", drafters=(name,)),
            )
            result["by_drafter"][f"{dtype}/{drafter}"] = compare(prompts, plain, got)
        if dtype == "float32" and not arguments.no_generate:
            reference = cached(f"{tag}-generate", lambda: generated(prompts, eos_token_ids))
            counts = compare(prompts, reference, plain)
            different = [n for n in prompts if reference[n] != plain[n]]
            model = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float64)
            margins = {n: margin(model, prompts[n], reference[n], plain[n]) for n in different}
            counts["ties"] = sum(value < TIE_MARGIN for value in margins.values())
            counts["divergences"] = len(different) - counts["ties"]
            result["against_generate"] = {**counts, "margins": margins}
    for key in ("sequences", "exact", "ties", "divergences"):
        result[key] = sum(counts[key] for counts in result["by_drafter"].values())
    write_result("equivalence", result)
    print(json.dumps(result, indent=2))
    divergences = result["divergences"] + result.get("against_generate", {}).get("divergences", 0)
    raise SystemExit(1 if divergences else 0)


if __name__ == "__main__":
    main()
