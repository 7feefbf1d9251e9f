"""Puts an engine together from its configuration and loaded models: sizes, checks, parts."""

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.aligned_runner import AlignedRunner
from engine.attention_guarantee import attention_keeps_bits
from engine.attention_probe import measure_attention
from engine.audit import Auditor
from engine.audit_ending import EndingRules
from engine.cache_sizes import ExaminedModel, make_cache, make_caches
from engine.config import AuditConfig, EngineConfig, LayoutName
from engine.cost_probe import measure_costs
from engine.cost_table import CostTable, load_or_measure
from engine.drafter.base import Drafter
from engine.drafter.chain import DrafterChain
from engine.drafter.draft_model import DraftModelDrafter
from engine.drafter.head.assembly import MadeHead, load_heads, make_head_drafter
from engine.drafter.head.hot_loading import HeadLoader
from engine.drafter.prompt_lookup import PromptLookupDrafter
from engine.drafter.roster import DrafterRoster
from engine.drafter.suffix import SuffixDrafter
from engine.goodput import StepCosts
from engine.grammar import GrammarCompiler
from engine.graphs import use_graphs
from engine.int8_linear import quantize_linears
from engine.kv_cache import KVCache
from engine.layout.plan import INVARIANT_PADDING, NO_PADDING, PACKED_PADDING, Padding
from engine.lean_layers import can_be_lean, make_lean
from engine.loader import LoadedModel, check_same_vocabulary
from engine.model_runner import ModelRunner
from engine.packed_linear import can_pack, is_all_packed, pack_linears
from engine.probe import check_agreement, probe_guarantee
from engine.row_cache import RowCache
from engine.sampler import Sampler
from engine.scheduler import Scheduler
from engine.speculation import DraftLengths
from engine.stats import ModelInfo
from engine.suitability import (
    agreement_length,
    attention_shape,
    check_configuration,
    plain_cache_shape,
)
from engine.target_runner import TargetRunner
from engine.verifier import Verifier

_LOOKUP_SECONDS = 2e-5  # per row and step
_PROBE_ROWS = 4
_SHARED_WIDTH = 16  # wider rows of an aligned forward run alone
_PROBE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine consists of."""

    info: ModelInfo
    tokenizer: PreTrainedTokenizerBase
    scheduler: Scheduler
    drafters: DrafterChain
    verifier: Verifier
    lengths: DraftLengths
    roster: DrafterRoster
    sampler: Sampler
    grammars: GrammarCompiler
    auditor: Auditor
    audit_config: AuditConfig


def assemble(config: EngineConfig, target: LoadedModel, draft: LoadedModel | None) -> Parts:
    """Raises UnsupportedModelError for a model that cannot be served as asked, ValueError for
    a configuration that does not fit the machine."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    max_tokens = min(
        config.max_model_tokens or target.max_context_tokens, target.max_context_tokens
    )
    if config.quantization == "int8":
        for loaded in filter(None, (target, draft)):
            quantize_linears(loaded.name, loaded.model)
    examined = [_examine(target, max_tokens, config.layout)]
    # Before the target's weights are packed: a head may be completed from them.
    heads = [] if target.shards else load_heads(config.speculation, target, config.layout)
    if draft is not None:
        check_same_vocabulary(target.tokenizer, draft.tokenizer)
        examined.append(_examine(draft, min(max_tokens, draft.max_context_tokens)))
    caches = make_caches(config, examined, max_tokens)
    ready = [
        _make_runner(model, cache, config) for model, cache in zip(examined, caches, strict=True)
    ]
    runners = [made.runner for made in ready]
    guarantee, measured = ready[0].guarantee, ready[0].costs
    numerics = config.numerics
    if numerics == "auto":
        numerics = "invariant" if guarantee == "bit_exact" else "fast"
    vocab_size = examined[0].logits.shape[-1]
    sampler = Sampler(vocab_size, target.model.device)
    made_heads = [
        make_head_drafter(
            plan,
            target.model,
            caches[0],
            sampler,
            is_by_name_only=plan.name not in config.speculation.drafters,
        )
        for plan in heads
    ]
    drafters = _make_drafters(config, sampler, runners, made_heads)
    info = ModelInfo(
        name=target.name,
        fingerprint=target.fingerprint,
        dtype=str(target.model.dtype).removeprefix("torch."),
        device=str(target.model.device),
        num_parameters=target.num_parameters,
        vocab_size=vocab_size,
        max_model_tokens=max_tokens,
        numerics=numerics,
        guarantee=guarantee,
        layout=config.layout,
        drafters=drafters.names,
        eos_token_ids=target.eos_token_ids,
        quantization=config.quantization,
        plain_step_seconds=tuple(zip(measured.num_tokens, measured.seconds, strict=True)),
    )
    scheduler = Scheduler(
        caches[0],
        max_step_tokens=config.max_step_tokens,
        max_model_tokens=max_tokens,
        group_rows=_group_rows(config),
    )
    grammars = GrammarCompiler(target.tokenizer, vocab_size, target.eos_token_ids)
    rules = EndingRules(target.tokenizer, target.eos_token_ids, max_tokens)
    is_bit_exact = guarantee == "bit_exact" and numerics == "invariant"
    costs = StepCosts(target=ready[0].costs, row_seconds=_LOOKUP_SECONDS)
    lengths = DraftLengths(0, costs, drafters.foresee)
    is_ragged = config.layout == "ragged"
    roster = DrafterRoster(
        drafters,
        lengths,
        HeadLoader(target, caches[0], sampler) if is_ragged and not target.shards else None,
        made_heads,
        [made.costs for made in ready[1:]],
        config.speculation.max_draft_tokens,
    )
    return Parts(
        info=info,
        tokenizer=target.tokenizer,
        scheduler=scheduler,
        drafters=drafters,
        verifier=Verifier(runners[0], sampler, drafters.after_forward),
        lengths=lengths,
        roster=roster,
        sampler=sampler,
        grammars=grammars,
        auditor=Auditor(runners[0], sampler, grammars, rules, is_bit_exact=is_bit_exact),
        audit_config=config.audit,
    )


def _group_rows(config: EngineConfig) -> int | None:
    if config.layout != "grouped":
        return None
    return config.group_rows or max(1, config.max_num_rows // 2)


@dataclass(frozen=True, slots=True)
class _Ready:
    """A runner and what was measured of it."""

    runner: TargetRunner
    guarantee: str
    costs: CostTable


def _examine(loaded: LoadedModel, max_tokens: int, layout: LayoutName = "ragged") -> ExaminedModel:
    check_configuration(loaded.name, loaded.model.config, max_tokens)
    num_tokens = agreement_length(loaded.model, max_tokens)
    examine = attention_shape if layout == "ragged" else plain_cache_shape
    shape, logits, token_ids = examine(loaded.name, loaded.model, num_tokens)
    shape = replace(shape, shards=loaded.shards)
    return ExaminedModel(loaded, shape, logits, token_ids, layout == "ragged")


def _make_runner(examined: ExaminedModel, cache: RowCache, config: EngineConfig) -> _Ready:
    """A runner over `cache`, with its measured guarantee and costs; the probes use a cache of
    their own."""
    size = cache.block_size
    most_tokens = min(cache.max_tokens, max(_PROBE_TOKENS, len(examined.token_ids) + 1))
    block_size = None if cache.is_contiguous else size
    scratch = make_cache(
        examined,
        max_num_rows=_PROBE_ROWS,
        max_tokens=most_tokens,
        num_blocks=_PROBE_ROWS * -(-most_tokens // size),
        block_size=block_size,
    )
    loaded = examined.loaded
    if can_be_lean(loaded.model):
        make_lean(loaded.model, loaded.max_context_tokens)
    if can_pack(loaded.model) and (examined.is_ragged or loaded.model._supports_attention_backend):
        pack_linears(loaded.model)
    runner: ModelRunner | AlignedRunner
    if isinstance(scratch, KVCache):
        is_fast = config.numerics == "fast"
        padding = NO_PADDING if is_fast else _invariant_padding(loaded.model)
        runner = ModelRunner(loaded.model, scratch, padding)
    else:
        widest = config.speculation.max_draft_tokens + 1
        runner = AlignedRunner(loaded.model, scratch, max_shared_width=max(_SHARED_WIDTH, widest))
    use_graphs(runner, config.graphs)
    known = (examined.logits, examined.token_ids)
    check_agreement(loaded.name, runner, *known, is_padded=not examined.is_ragged)
    guarantee = probe_guarantee(runner)
    if isinstance(runner, ModelRunner) and guarantee == "bit_exact":
        keeps_bits = attention_keeps_bits(runner, block_size, cache.max_tokens)
        guarantee = guarantee if keeps_bits else "rounding"
    if config.numerics == "auto" and guarantee != "bit_exact":
        runner.padding = NO_PADDING
    if isinstance(runner, ModelRunner):
        runner.attention_costs = measure_attention(
            loaded.model, scratch.shape, runner.padding, block_size
        )
    path = None
    if config.cost_table_folder is not None:
        path = Path(config.cost_table_folder) / f"{_cost_key(examined, runner)}.json"
    costs = load_or_measure(path, lambda: measure_costs(runner))
    runner.cache = cache  # type: ignore[assignment] # of the same kind as the scratch cache
    use_graphs(runner, config.graphs)
    return _Ready(runner, guarantee, costs)


def _cost_key(examined: ExaminedModel, runner: TargetRunner) -> str:
    """Names what a cost table depends on: model and the modules that compute it, dtype, layout,
    padding, processor, threads."""
    loaded = examined.loaded
    device = loaded.model.device
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    parts = (
        loaded.fingerprint,
        sorted({type(module).__name__ for module in loaded.model.modules()}),
        loaded.model.dtype,
        runner.padding,
        _memory_layout(examined, runner.cache),
        name,
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
        torch.__version__,
        loaded.shards.num_shards if loaded.shards else 1,
        *(["buckets"] if isinstance(runner, ModelRunner) and runner.buckets else []),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _memory_layout(examined: ExaminedModel, cache: RowCache) -> str | int:
    if not examined.is_ragged:
        return "rectangles"
    return "rows" if cache.is_contiguous else cache.block_size


def _invariant_padding(model: PreTrainedModel) -> Padding:
    return PACKED_PADDING if is_all_packed(model) else INVARIANT_PADDING


def _make_drafters(
    config: EngineConfig,
    sampler: Sampler,
    runners: list[TargetRunner],
    heads: Sequence[MadeHead],
) -> DrafterChain:
    speculation = config.speculation
    drafters: list[Drafter] = []
    for name in speculation.drafters:
        if name == "prompt_lookup":
            drafters.append(
                PromptLookupDrafter(
                    min_ngram=speculation.lookup_min_ngram,
                    max_ngram=speculation.lookup_max_ngram,
                )
            )
        elif name == "suffix":
            drafters.append(SuffixDrafter(min_match=speculation.lookup_min_ngram))
        elif name == "draft_model":
            drafters.append(
                DraftModelDrafter(runners[1], sampler, max_step_tokens=config.max_step_tokens)
            )
        else:
            drafters.extend(made.drafter for made in heads if made.drafter.name == name)
    by_name_only = [made.drafter for made in heads if made.drafter.name not in speculation.drafters]
    return DrafterChain(drafters, by_name_only)
