"""What benchmarks share: the pulled model, Spec-Bench prompts, engines, timing, results."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig, SpeculationConfig
from engine.engine import Engine
from engine.loader import load_model
from engine.request import (
    GenerationRequest,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)
from engine.stats import RequestStats, StepStats

BUILD = Path(__file__).resolve().parents[2] / "build" / "bench"
DATA = Path(os.environ.get("TANDEM_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))


def model_folder() -> str:
    """The pulled demo model, or what TANDEM_BENCH_MODEL names."""
    home = Path(os.environ.get("TANDEM_HOME", Path.home() / ".cache" / "tandem"))
    folder = os.environ.get("TANDEM_BENCH_MODEL", str(home / "models" / "smollm2-135m-instruct"))
    if not Path(folder).is_dir():
        raise SystemExit(f"{folder} is missing: run `tandem models pull smollm2-135m-instruct`")
    return folder


def spec_bench_prompts() -> list[tuple[str, str]]:
    """(category, prompt) of the 480 Spec-Bench prompts."""
    path = DATA / "spec_bench.jsonl"
    if not path.is_file():
        raise SystemExit(f"{path} is missing: set TANDEM_DATA to the folder that holds it")
    rows = [json.loads(line) for line in path.read_text().splitlines() if line]
    return [(row["category"], row["turns"][0]) for row in rows]


def chat_token_ids(engine: Engine, prompt: str) -> list[int]:
    encoded = engine.tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True
    )
    token_ids: list[int] = encoded["input_ids"] if not isinstance(encoded, list) else encoded
    return list(token_ids)


def make_engine(dtype: str, num_rows: int, **options: Any) -> Engine:
    """An engine over the demo model; drafters and max_draft_tokens go to speculation."""
    drafters = options.pop("drafters", ("prompt_lookup",))
    max_draft_tokens = options.pop("max_draft_tokens", 4)
    draft = options.pop("draft", None)
    config = EngineConfig(
        target=model_folder(),
        dtype=dtype,  # type: ignore[arg-type]
        max_num_rows=num_rows,
        speculation=SpeculationConfig(
            drafters=drafters,
            max_draft_tokens=max_draft_tokens,
            draft_model="layer-skip" if draft is not None else None,
        ),
        **options,
    )
    return Engine.from_models(config, load_model(config.target, dtype=dtype, device="cpu"), draft)


def greedy_request(
    request_id: str, token_ids: Sequence[int], max_tokens: int, mode: str, *, ignore_eos: bool
) -> GenerationRequest:
    return GenerationRequest(
        request_id,
        tuple(token_ids),
        SamplingParams(temperature=0),
        StoppingParams(max_tokens=max_tokens, ignore_eos=ignore_eos),
        SpeculationParams(SpeculationMode(mode)),
        tenant=request_id,  # a salt of its own: no run profits from the one before
    )


def run_all(
    engine: Engine, requests: Sequence[GenerationRequest]
) -> tuple[dict[str, list[int]], dict[str, RequestStats], list[StepStats], float]:
    """Outputs, statistics, steps and wall seconds."""
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    finished: dict[str, RequestStats] = {}
    steps: list[StepStats] = []
    started = time.perf_counter()
    for request in requests:
        engine.submit(request)
    while engine.has_work():
        step = engine.step()
        if step.stats is not None:
            steps.append(step.stats)
        for delta in step.deltas:
            outputs[delta.request_id].extend(delta.token_ids)
        for stats in step.finished:
            finished[stats.request_id] = stats
    return outputs, finished, steps, time.perf_counter() - started


def spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(ordered[len(ordered) // 2], 4),
        "min": round(ordered[0], 4),
        "max": round(ordered[-1], 4),
    }


def write_result(name: str, result: dict[str, Any]) -> Path:
    BUILD.mkdir(parents=True, exist_ok=True)
    path = BUILD / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written: {path}")
    return path


def set_threads(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
