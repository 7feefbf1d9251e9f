"""Records what prompt lookup would have had accepted: python -m tests.engine.record_lookup_traces

Over Spec-Bench prompts and the demo model's own greedy answers, as `make bench-equivalence` keeps
them (plain decoding in float32): at every position of an answer, how many of 8 looked-up tokens
are the ones that follow. Verification is lossless, so this is what a server would have accepted.
Writes lookup_traces.json: a text per prompt, one character per position, "." where nothing was
found and else the digit of the accepted tokens. Needs the pulled model's tokenizer and TANDEM_DATA.
"""

import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

from engine.drafter.prompt_lookup import NgramIndex
from tests.benchmarks.workloads import BUILD, model_folder, spec_bench_prompts

MAX_DRAFTS = 8
MIN_NGRAM, MAX_NGRAM = 2, 4  # a test compares them with the configuration's
TRACES = Path(__file__).with_name("lookup_traces.json")


def trace_of(prompt_token_ids: list[int], output_token_ids: list[int]) -> str:
    """Of every output position but the first, which a prefill emits."""
    index = NgramIndex(MIN_NGRAM, MAX_NGRAM)
    found = []
    for position in range(1, len(output_token_ids)):
        known = [*prompt_token_ids, *output_token_ids[:position]]
        index.catch_up(known)
        drafts = index.lookup(known, MAX_DRAFTS)
        num_accepted = 0
        for draft, token_id in zip(drafts, output_token_ids[position:], strict=False):
            if draft != token_id:
                break
            num_accepted += 1
        found.append(str(num_accepted) if drafts else ".")
    return "".join(found)


def main(outputs: Path) -> None:
    """outputs: a JSON object of output token ids by the number of the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    prompts = spec_bench_prompts()
    traces: dict[str, list[str]] = {}
    for number, output in json.loads(outputs.read_text()).items():
        category, prompt = prompts[int(number)]
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True
        )
        token_ids = encoded if isinstance(encoded, list) else encoded["input_ids"]
        traces.setdefault(category, []).append(trace_of(list(token_ids), output))
    TRACES.write_text(json.dumps(traces, indent=0) + "\n")
    print(f"{TRACES}: {sum(map(len, traces.values()))} answers, {TRACES.stat().st_size} bytes")


if __name__ == "__main__":
    default = BUILD / "equivalence-parts" / "120-float32-plain-1.json"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
