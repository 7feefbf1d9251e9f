"""Puts a head beside a loaded target: checks, cache, padding, measured costs."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.config import SHIPPED_HEAD, LayoutName, SpeculationConfig
from engine.cost_table import NUM_TOKENS_MEASURED, CostTable
from engine.drafter.head.calibration import Calibration
from engine.drafter.head.config import HeadFormatError
from engine.drafter.head.drafter import HeadDrafter
from engine.drafter.head.file_names import CARD
from engine.drafter.head.files import load_head, read_card
from engine.drafter.head.model import Eagle3Head
from engine.drafter.head.runner import HeadRunner
from engine.drafter.head.tap import HiddenStateTap
from engine.key_padding import padded_keys
from engine.kv_cache import KVCache
from engine.kv_storage import KVCacheShape
from engine.layout.plan import INVARIANT_PADDING, PACKED_PADDING, ForwardRow
from engine.loader import LoadedModel, embedding_weight
from engine.packed_linear import can_pack, is_all_packed, pack_linears
from engine.row_cache import RowCache
from engine.sampler import Sampler

DEFAULT_WINDOW = 512
_PRETRAINED = Path(__file__).parents[1] / "pretrained"
_NUM_REPEATS = 3
_CONTEXT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """A loaded head and the name of its drafter: "head", or "head:NAME" of a further one."""

    name: str
    folder: str
    head: Eagle3Head


@dataclass(frozen=True, slots=True)
class ReadyHead:
    """A head with its cache, which does not listen to the target yet. costs: of one draft step,
    by rows."""

    plan: HeadPlan
    runner: HeadRunner
    calibration: Calibration
    window: int
    costs: CostTable


@dataclass(frozen=True, slots=True)
class MadeHead:
    """A head ready to draft; costs are of one draft step, by rows."""

    drafter: HeadDrafter
    costs: CostTable


def shipped_head(target_fingerprint: str) -> str | None:
    """The folder of the head that Tandem ships, if it was made for this target."""
    if not (_PRETRAINED / CARD).exists():
        return None
    made_for = read_card(_PRETRAINED).get("target_fingerprint")
    return str(_PRETRAINED) if made_for == target_fingerprint else None


def load_heads(
    speculation: SpeculationConfig, target: LoadedModel, layout: LayoutName
) -> list[HeadPlan]:
    """All heads of a configuration, in the target's dtype and on its device.

    Called before the target's weights are packed, since a slim head is completed from them.
    Raises HeadFormatError.
    """
    default = speculation.head
    if default == SHIPPED_HEAD:
        default = shipped_head(target.fingerprint) if layout == "ragged" else None
    folders = [("head", default)] if default else []
    folders += [(f"head:{source.name}", source.folder) for source in speculation.more_heads]
    return [plan_head(name, str(folder), target) for name, folder in folders]


def plan_head(name: str, folder: str, target: LoadedModel) -> HeadPlan:
    """The head of a folder, in the target's dtype and on its device. Raises HeadFormatError."""
    return HeadPlan(name, folder, _load(folder, target))


def _load(folder: str, target: LoadedModel) -> Eagle3Head:
    model = target.model
    head = load_head(Path(folder), model, target_fingerprint=target.fingerprint)
    head.to(device=model.device, dtype=model.dtype)
    weight = embedding_weight(model)
    if torch.equal(head.embed_tokens.weight, weight):
        head.embed_tokens.weight.data = weight  # one copy in memory
    return head


def cache_shape(head: Eagle3Head) -> KVCacheShape:
    config = head.config
    size = config.head_size
    return KVCacheShape(1, config.num_kv_heads, size, size, head.dtype, head.device)


def make_head_drafter(
    plan: HeadPlan,
    target: PreTrainedModel,
    like: RowCache,
    sampler: Sampler,
    *,
    is_by_name_only: bool = False,
) -> MadeHead:
    """A drafter with as many rows as the target's cache `like`."""
    ready = prepare_head(plan, like)
    return attach_head(ready, target, sampler, is_by_name_only=is_by_name_only)


def prepare_head(plan: HeadPlan, like: RowCache) -> ReadyHead:
    """All of a drafter that does not touch the target, which may run meanwhile."""
    head, folder = plan.head, plan.folder
    card = read_card(Path(folder))
    window, calibration = _window(card, folder), _calibration(card, folder)
    if can_pack(head):
        pack_linears(head)
    padding = PACKED_PADDING if is_all_packed(head) else INVARIANT_PADDING
    block_size = None if like.is_contiguous else like.block_size
    cache = KVCache(
        cache_shape(head),
        max_num_rows=like.max_num_rows,
        max_tokens=like.max_tokens,
        num_blocks=like.max_num_rows * -(-like.max_tokens // tokens_per_block(like)),
        block_size=block_size,
    )
    runner = HeadRunner(head, cache, padding, window=window)
    return ReadyHead(plan, runner, calibration, window, measure_step_costs(runner))


def attach_head(
    ready: ReadyHead, target: PreTrainedModel, sampler: Sampler, *, is_by_name_only: bool
) -> MadeHead:
    """Let the head listen to the target, which must not run meanwhile."""
    drafter = HeadDrafter(
        ready.plan.name,
        ready.runner,
        HiddenStateTap(target, ready.runner.head.config.captured_layers),
        sampler,
        ready.calibration,
        window=ready.window,
        is_by_name_only=is_by_name_only,
    )
    return MadeHead(drafter, ready.costs)


def tokens_per_block(like: RowCache) -> int:
    """Tokens that a head's cache keeps together: a block, or a whole row."""
    return padded_keys(like.max_tokens) if like.is_contiguous else like.block_size


def measure_step_costs(runner: HeadRunner) -> CostTable:
    """Seconds of one draft step by the number of rows."""
    cache = runner.cache
    rows = [cache.allocate_row([0], f"cost probe {i}")[0] for i in range(cache.num_free_rows)]
    device = runner.head.device
    context = min(_CONTEXT_TOKENS, cache.max_tokens - 1)
    samples = []
    try:
        for row in rows:
            cache.reserve(row, context + 1)
        for num_rows in NUM_TOKENS_MEASURED:
            if num_rows > len(rows):
                break
            forward = [ForwardRow(row, [0], context, 1) for row in rows[:num_rows]]
            states = torch.zeros(
                num_rows, runner.hidden_size, dtype=runner.head.dtype, device=device
            )
            times = []
            for _ in range(1 + _NUM_REPEATS):
                started = time.perf_counter()
                runner.forward(forward, states)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                times.append(time.perf_counter() - started)
            samples.append((num_rows, min(times[1:])))
    finally:
        for row in rows:
            cache.free_row(row, keep=False)
    return CostTable.from_samples(samples)


def _window(card: Mapping[str, Any], folder: str) -> int:
    """How far back the head looks: no further than it was trained to."""
    window = card.get("window", DEFAULT_WINDOW)
    if not isinstance(window, int) or window < 1:
        raise HeadFormatError(f"{folder}: drafter_card.json: window: {window!r} is no length")
    return window


def _calibration(card: Mapping[str, Any], folder: str) -> Calibration:
    content = card.get("calibration")
    if content is None:
        return Calibration()
    try:
        return Calibration(tuple(content["confidence"]), tuple(content["acceptance"]))
    except (KeyError, TypeError, ValueError) as error:
        raise HeadFormatError(f"{folder}: drafter_card.json: calibration: {error}") from error
