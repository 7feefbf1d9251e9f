"""Speculation changes no token: `python -m tests.benchmarks.equivalence`
-> build/bench/equivalence.json.

For every Spec-Bench prompt, 128 new tokens: our speculative decoding in batches of 8, by drafter
and dtype, against our own plain decoding one request at a time (equal to the bit or a
divergence), and in float32 against transformers' generate (equal, or a proven tie: the margin of
the two tokens is shown). Progress is kept in build/bench, 60 prompts at a time, so that an
interrupted run goes on; several may run at once, each with --only one drafter of one dtype.
"""

import argparse
import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
DRAFTERS = ("prompt_lookup", "draft_model")
PLAIN, GENERATE = "plain", "generate"
PART = 60  # prompts that are decoded before progress is kept

Prompts = dict[str, list[int]]


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


def by_parts(
    name: str, prompts: Prompts, make: Callable[[Prompts], Prompts], first: int = 0
) -> Prompts:
    """What `make` gives for the prompts from place `first` on, asked for a part at a time."""
    numbers = list(prompts)
    found: Prompts = {}
    for start in range(first, len(numbers), PART):
        part = {number: prompts[number] for number in numbers[start : start + PART]}
        found |= cached(f"{name}-{start}", partial(make, part))
    return found


def cached(name: str, make: Callable[[], Prompts]) -> Prompts:
    path = BUILD / "equivalence-parts" / f"{name}.json"
    if path.is_file():
        found: Prompts = json.loads(path.read_text())
        return found
    result = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result))
    part.replace(path)
    print("done:", name, flush=True)
    return result


def ours(prompts: Prompts, *, dtype: str, num_rows: int, mode: str, **options: Any) -> Prompts:
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


def generated(prompts: Prompts, *, eos_token_ids: Sequence[int]) -> Prompts:
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


def compare(prompts: Prompts, expected: Prompts, got: Prompts) -> dict[str, int]:
    exact = sum(expected[number] == got[number] for number in prompts)
    return {
        "sequences": len(prompts),
        "exact": exact,
        "ties": 0,
        "divergences": len(prompts) - exact,
    }


def eos_and_prompts(count: int) -> tuple[Sequence[int], Prompts]:
    texts = [prompt for _, prompt in spec_bench_prompts()]
    step = max(1, len(texts) // count)
    engine = make_engine("float32", 1, max_model_tokens=512)
    chosen = list(enumerate(texts))[::step][:count]
    prompts = {str(n): chat_token_ids(engine, text) for n, text in chosen}
    return engine.info.eos_token_ids, prompts


@dataclass(frozen=True, slots=True)
class Runs:
    """Every decoding that is compared, by a name such as float32/plain or generate."""

    prompts: Prompts
    eos_token_ids: Sequence[int]

    def outputs(self, name: str, first: int = 0) -> Prompts:
        """Of the prompts from place `first` on; what was computed before is read."""
        dtype, _, drafter = name.partition("/")
        label = f"{len(self.prompts)}-{name.replace('/', '-')}"
        make: Callable[[Prompts], Prompts]
        if name == GENERATE:
            make = partial(generated, eos_token_ids=self.eos_token_ids)
        elif drafter == PLAIN:
            make = partial(ours, dtype=dtype, num_rows=1, mode="off")
        else:
            make = partial(ours, dtype=dtype, num_rows=8, mode="on", drafters=(drafter,))
        return by_parts(label, self.prompts, make, first)

    def against_generate(self) -> dict[str, Any]:
        reference, plain = self.outputs(GENERATE), self.outputs(f"float32/{PLAIN}")
        counts: dict[str, Any] = compare(self.prompts, reference, plain)
        different = [n for n in self.prompts if reference[n] != plain[n]]
        model = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float64)
        margins = {n: margin(model, self.prompts[n], reference[n], plain[n]) for n in different}
        counts["ties"] = sum(value < TIE_MARGIN for value in margins.values())
        counts["divergences"] = len(different) - counts["ties"]
        return {**counts, "margins": margins}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=480)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", help="compute this alone: float32/plain, generate, ...")
    parser.add_argument("--first", type=int, default=0, help="with --only: leave these out")
    arguments = parser.parse_args()
    set_threads(arguments.threads)
    eos_token_ids, prompts = eos_and_prompts(arguments.prompts)
    runs = Runs(prompts, eos_token_ids)
    if arguments.only:
        runs.outputs(arguments.only, arguments.first)
        return
    result: dict[str, Any] = {"prompts": len(prompts), "by_drafter": {}}
    for dtype in arguments.dtypes.split(","):
        plain = runs.outputs(f"{dtype}/{PLAIN}")
        for drafter in DRAFTERS:
            name = f"{dtype}/{drafter}"
            result["by_drafter"][name] = compare(prompts, plain, runs.outputs(name))
        if dtype == "float32":
            result["against_generate"] = runs.against_generate()
    for key in ("sequences", "exact", "ties", "divergences"):
        result[key] = sum(counts[key] for counts in result["by_drafter"].values())
    write_result("equivalence", result)
    print(json.dumps(result, indent=2))
    divergences = result["divergences"]
    divergences += result.get("against_generate", {}).get("divergences", 0)
    raise SystemExit(1 if divergences else 0)


if __name__ == "__main__":
    main()
