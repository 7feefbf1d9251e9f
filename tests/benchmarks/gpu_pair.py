"""A synthetic target and draft model that agree as often as asked, and engines over them.

The target is the draft model plus further layers. Their output projections are scaled by
epsilon, so they cost what layers cost and change the result as little as wanted.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config import AuditConfig, EngineConfig, LayoutName, SpeculationConfig
from engine.engine import Engine
from engine.loader import describe_model
from engine.request import GenerationRequest
from engine.stats import RequestStats
from tests.benchmarks.workloads import greedy_request, run_all
from tests.tiny import EOS_TOKEN_ID, VOCAB_SIZE, tiny_tokenizer

_NUM_SEARCH_STEPS = 8
_NUM_AGREEMENT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Size:
    """Of the target, and how it is measured. The draft model has the first num_draft_layers."""

    num_layers: int
    num_draft_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    weight_spread: float  # standard deviation of the random weights
    context: int  # tokens before those that the limits are measured with
    new_tokens: int
    batch_sizes: tuple[int, ...]


_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
SIZES = {
    "small": Size(4, 2, 64, 128, 4, 2, VOCAB_SIZE, 0.2, 32, 12, (1, 3)),
    "1b": Size(16, 2, 2048, 8192, 32, 8, 32768, 0.02, 512, 48, _BATCH_SIZES),
    "3b": Size(28, 3, 3072, 8192, 24, 8, 32768, 0.02, 512, 48, _BATCH_SIZES),
    "8b": Size(32, 2, 4096, 14336, 32, 8, 32768, 0.02, 512, 48, _BATCH_SIZES),
}


@dataclass(frozen=True, slots=True)
class Agreement:
    """epsilon, and the share of positions of a random text where both models' argmax is equal."""

    epsilon: float
    share: float


@dataclass(frozen=True, slots=True)
class TimedRun:
    tokens_per_second: float
    acceptance_length: float


def build_pair(
    size: Size, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """(target, draft) with epsilon 1; the draft model's weights are the target's own memory."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            target = LlamaForCausalLM(_config(size, size.num_layers)).eval()
        with torch.device("meta"):
            draft = LlamaForCausalLM(_config(size, size.num_draft_layers)).eval()
    finally:
        torch.set_default_dtype(before)
    kept = {name for name, _ in draft.named_parameters()}
    draft.load_state_dict(
        {name: value for name, value in target.state_dict().items() if name in kept}, assign=True
    )
    # Buffers outside the state dict (rotary frequencies) are those of the same configuration.
    draft.model.rotary_emb = target.model.rotary_emb
    return target, draft


def _config(size: Size, num_layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        max_position_embeddings=4096,
        initializer_range=size.weight_spread,
        bos_token_id=None,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=None,
        tie_word_embeddings=False,
    )


@torch.no_grad()
def scale_further_layers(target: LlamaForCausalLM, num_draft_layers: int, factor: float) -> None:
    """Multiply what the further layers add to the residual stream."""
    for layer in target.model.layers[num_draft_layers:]:
        layer.self_attn.o_proj.weight.mul_(factor)
        layer.mlp.down_proj.weight.mul_(factor)


@torch.inference_mode()
def measure_agreement(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, num_tokens: int = _NUM_AGREEMENT_TOKENS
) -> float:
    """Share of positions of a random text at which both choose the same token."""
    generator = torch.Generator().manual_seed(5)
    token_ids = torch.randint(3, VOCAB_SIZE, (1, num_tokens), generator=generator)
    token_ids = token_ids.to(target.device)
    choices = [model(token_ids, use_cache=False).logits.argmax(-1) for model in (target, draft)]
    return float((choices[0] == choices[1]).float().mean())


def reach_agreement(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, num_draft_layers: int, wanted: float
) -> Agreement:
    """Search epsilon between 1e-4 and 1, on a logarithmic scale, and leave the target with it."""
    low, high = -4.0, 0.0
    exponent = 0.0
    share = measure_agreement(target, draft)
    for _ in range(_NUM_SEARCH_STEPS):
        if share >= wanted and exponent == 0.0:
            break
        middle = (low + high) / 2
        scale_further_layers(target, num_draft_layers, 10 ** (middle - exponent))
        exponent = middle
        share = measure_agreement(target, draft)
        low, high = (middle, high) if share >= wanted else (low, middle)
    return Agreement(10**exponent, share)


def make_engine(
    size: Size,
    device: torch.device,
    dtype: str,
    wanted_agreement: float,
    *,
    layout: LayoutName = "ragged",
    audit_share: float = 0.0,
    cost_table_folder: str | None = None,
) -> tuple[Engine, Agreement]:
    """An engine over a fresh pair; rows for the largest batch."""
    target, draft = build_pair(size, device, getattr(torch, dtype))
    agreement = reach_agreement(target, draft, size.num_draft_layers, wanted_agreement)
    num_rows = max(size.batch_sizes)
    config = EngineConfig(
        target="synthetic",
        device=str(device),
        max_num_rows=num_rows,
        max_step_tokens=max(512, 8 * num_rows),
        max_model_tokens=size.context + 128,
        kv_cache_memory=0.5 if device.type == "cuda" else 2e8,
        layout=layout,
        cost_table_folder=cost_table_folder,
        speculation=SpeculationConfig(drafters=("draft_model",), draft_model="synthetic draft"),
        audit=AuditConfig(share=audit_share, max_jobs=256),
    )
    tokenizer = tiny_tokenizer()
    engine = Engine.from_models(
        config,
        describe_model("synthetic", target, tokenizer),
        describe_model("synthetic draft", draft, tokenizer),
    )
    return engine, agreement


def random_requests(
    name: str, num_rows: int, mode: str, num_tokens: int, *, longest_prompt: int = 32
) -> list[GenerationRequest]:
    """Prompts of different lengths, the same ones for every name and mode."""
    generator = random.Random(num_rows)
    prompts = [
        [generator.randrange(3, VOCAB_SIZE) for _ in range(longest_prompt - n % 7)]
        for n in range(num_rows)
    ]
    return [
        greedy_request(f"{name}-{n}", prompt, num_tokens, mode, ignore_eos=True)
        for n, prompt in enumerate(prompts)
    ]


def timed_run(engine: Engine, num_rows: int, mode: str, num_tokens: int) -> TimedRun:
    """num_rows requests together; the clock stops when the last is done."""
    requests = random_requests(f"{mode}-{time.monotonic_ns()}", num_rows, mode, num_tokens)
    outputs, finished, _, seconds = run_all(engine, requests)
    _check_complete(list(finished.values()), num_rows)
    return TimedRun(
        tokens_per_second=sum(map(len, outputs.values())) / seconds,
        acceptance_length=acceptance_length(list(finished.values())),
    )


def acceptance_length(finished: Sequence[RequestStats]) -> float:
    """Tokens per verification, the target's own included; 1 where nothing was drafted."""
    accepted = sum(stats.num_accepted_tokens for stats in finished)
    rounds = sum(stats.num_verify_steps for stats in finished)
    return 1 + accepted / max(1, rounds)


def _check_complete(finished: Sequence[RequestStats], num_rows: int) -> None:
    errors = [stats.error for stats in finished if stats.error]
    if errors or len(finished) != num_rows:
        raise RuntimeError(f"{len(finished)} of {num_rows} requests ended; errors: {errors[:3]}")
