"""The start-up probes: a planted breach is found, and a machine's kernels are never trusted.

Machines are simulated: products in float64, rounded once, so that their bits depend on
nothing but what a test adds.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel

from engine.kv_cache import KVCache
from engine.layout.plan import INVARIANT_PADDING, ForwardRow, Padding
from engine.loader import UnsupportedModelError
from engine.model_runner import ModelRunner
from engine.packed_linear import PackedLinear
from engine.planned_attention import PlannedAttention
from engine.probe import check_agreement, probe_guarantee
from engine.suitability import agreement_length, attention_shape
from tests.engine.driver import tiny_engine
from tests.engine.test_models import SERVED, build
from tests.tiny import VOCAB_SIZE, tiny_llama

FP32, BF16 = torch.float32, torch.bfloat16
MAX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Machine:
    """Kernels whose last bits change with the shape unless it is a multiple of these."""

    tokens: int = 8
    query_rows: int = 4
    keys: int = 128

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None):  # type: ignore[no-untyped-def]
        result = x.double() @ weight.double().T
        if bias is not None:
            result = result + bias.double()
        num_tokens = x.numel() // x.shape[-1]
        return _rounded(result, x.dtype, num_tokens % self.tokens)

    def attention(  # type: ignore[no-untyped-def]
        self, query, key, value, attn_mask=None, scale=None, is_causal=False, **options
    ) -> torch.Tensor:
        fold = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(fold, 1), value.repeat_interleave(fold, 1)
        scores = query.double() @ key.double().transpose(2, 3) * (scale or query.shape[-1] ** -0.5)
        if is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[2:]).triu(1).bool(), -torch.inf)
        if attn_mask is not None:
            scores = scores + attn_mask.double()
        result = scores.softmax(dim=-1) @ value.double()
        remainder = query.shape[2] % self.query_rows + key.shape[2] % self.keys
        return _rounded(result, query.dtype, remainder + (attn_mask is None))


def _rounded(result: torch.Tensor, dtype: torch.dtype, remainder: int) -> torch.Tensor:
    return (result * (1 + remainder * 1e-6)).to(dtype)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Machine], None]]:
    def install(machine: Machine) -> None:
        monkeypatch.setattr(F, "linear", machine.linear)
        monkeypatch.setattr(F, "scaled_dot_product_attention", machine.attention)

    return install  # type: ignore[return-value]


def runner_of(
    model: PreTrainedModel, padding: Padding = INVARIANT_PADDING
) -> tuple[ModelRunner, torch.Tensor, list[int]]:
    """A runner, and the model's own logits of some tokens."""
    shape, logits, token_ids = attention_shape("tiny", model, agreement_length(model, MAX_TOKENS))
    cache = KVCache(shape, max_num_rows=4, max_tokens=MAX_TOKENS, num_blocks=4)
    return ModelRunner(model, cache, padding), logits, token_ids


def replace_attention(
    runner: ModelRunner, change: Callable[[torch.nn.Module, dict[str, object]], None]
) -> None:
    """Let `change` edit what the layers hand to their attention."""

    def attention(module, query, key, value, mask, **options):  # type: ignore[no-untyped-def]
        options.setdefault("scaling", query.shape[-1] ** -0.5)
        change(module, options)
        return runner._attend(module, query, key, value, mask, **options)

    AttentionInterface.register("tandem_test", attention)
    runner.model.set_attn_implementation("tandem_test")


# ---- the guarantee --------------------------------------------------------------------


def test_on_a_machine_with_the_property_the_sound_runner_is_bit_exact(use) -> None:  # type: ignore[no-untyped-def]
    use(Machine())
    assert probe_guarantee(runner_of(tiny_llama())[0]) == "bit_exact"


@pytest.mark.parametrize(
    "padding",
    [
        pytest.param(Padding(tokens=1, query_rows=4, keys=128), id="tokens"),
        pytest.param(Padding(tokens=8, query_rows=1, keys=128), id="query-rows"),
        pytest.param(Padding(tokens=8, query_rows=4, keys=1), id="keys"),
        pytest.param(Padding(tokens=8, query_rows=4, keys=64), id="keys-to-half-the-multiple"),
    ],
)
def test_what_is_not_padded_is_found(use, padding: Padding) -> None:  # type: ignore[no-untyped-def]
    use(Machine())
    assert probe_guarantee(runner_of(tiny_llama(), padding)[0]) == "rounding"


def test_one_token_alone_is_found(use) -> None:  # type: ignore[no-untyped-def]
    machine = Machine()

    class OnlyTheLoneTokenDiffers(Machine):
        def linear(self, x, weight, bias=None):  # type: ignore[no-untyped-def]
            result = Machine(tokens=1).linear(x, weight, bias)
            return result * (1 + 1e-6) if x.numel() == x.shape[-1] else result

    use(OnlyTheLoneTokenDiffers(machine.tokens, machine.query_rows, machine.keys))
    alone, together = Padding(1, 4, 128), Padding(2, 4, 128)
    assert probe_guarantee(runner_of(tiny_llama(), alone)[0]) == "rounding"
    assert probe_guarantee(runner_of(tiny_llama(), together)[0]) == "bit_exact"


@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(Machine(tokens=1 << 20), id="linear-by-tokens"),
        pytest.param(Machine(query_rows=1 << 20), id="attention-by-rows"),
        pytest.param(Machine(keys=1 << 20), id="attention-by-keys"),
    ],
)
def test_a_machine_that_no_padding_helps_is_only_promised_rounding(use, machine: Machine) -> None:  # type: ignore[no-untyped-def]
    use(machine)
    assert probe_guarantee(runner_of(tiny_llama())[0]) == "rounding"


def test_attention_without_an_explicit_mask_is_found(
    use: Callable[[Machine], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask is left out where every key is visible anyway: same values, another kernel."""
    use(Machine())
    runner = runner_of(tiny_llama())[0]
    machine_attention = F.scaled_dot_product_attention

    def attention(query, key, value, attn_mask=None, scale=None):  # type: ignore[no-untyped-def]
        visible = int((attn_mask[0, 0, 0] == 0).sum())
        if query.shape[0] == 1 and bool((attn_mask[..., :visible] == 0).all()):
            key, value, attn_mask = key[:, :, :visible], value[:, :, :visible], None
        return machine_attention(query, key, value, attn_mask=attn_mask, scale=scale)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    assert probe_guarantee(runner) == "rounding"


def test_a_bias_that_depends_on_the_neighbours_is_found(use) -> None:  # type: ignore[no-untyped-def]
    use(Machine())
    runner = runner_of(tiny_llama())[0]
    layer = runner.model.model.layers[0].mlp

    def leak(module, inputs, output):  # type: ignore[no-untyped-def]
        return output + 1e-5 * output.mean(dim=1, keepdim=True)

    handle = layer.register_forward_hook(leak)
    assert probe_guarantee(runner) == "rounding"
    handle.remove()
    assert probe_guarantee(runner) == "bit_exact"


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_what_is_called_bit_exact_stays_so_in_company_that_the_probe_did_not_try(
    dtype: torch.dtype,
) -> None:
    runner = runner_of(tiny_llama(dtype=dtype))[0]
    if probe_guarantee(runner) != "bit_exact":
        pytest.skip("this machine's kernels do not keep bits")
    generator = random.Random(5)
    prompt = [generator.randrange(VOCAB_SIZE) for _ in range(60)]
    reference = forward_in_company(runner, prompt, [60], 0, generator)
    for _ in range(12):
        widths = []
        while sum(widths) < 60:
            widths.append(min(generator.choice([1, 1, 2, 3, 7, 20]), 60 - sum(widths)))
        company = generator.randrange(4)
        assert torch.equal(
            reference, forward_in_company(runner, prompt, widths, company, generator)
        ), (widths, company)


def forward_in_company(
    runner: ModelRunner,
    prompt: list[int],
    widths: list[int],
    num_neighbours: int,
    generator: random.Random,
) -> torch.Tensor:
    cache = runner.cache
    rows = [cache.allocate_row([0])[0] for _ in range(num_neighbours + 1)]
    found, done = [], 0
    fed = [0] * num_neighbours
    for row in rows:
        cache.reserve(row, MAX_TOKENS)
    for width in widths:
        forward_rows = [ForwardRow(rows[0], prompt[done : done + width], done, width)]
        for number, row in enumerate(rows[1:]):
            count = min(generator.choice([0, 1, 4, 30]), MAX_TOKENS - fed[number])
            tokens = [generator.randrange(VOCAB_SIZE) for _ in range(count)]
            if tokens:
                forward_rows.append(ForwardRow(row, tokens, fed[number], 0))
            fed[number] += count
        done += width
        found.append(runner.forward(forward_rows))
    for row in rows:
        cache.free_row(row, keep=False)
    return torch.cat(found)


# ---- agreement with the model's own attention -----------------------------------------

VARIANTS = ["llama", "mistral, window", "gemma 2", "gpt-2", "gpt-oss, sinks"]


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_sound_runner_agrees_with_the_model(name: str, dtype: torch.dtype) -> None:
    runner, logits, token_ids = runner_of(build(*SERVED[name], dtype))
    check_agreement("tiny", runner, logits, token_ids)


def ignore(option: str) -> Callable[[torch.nn.Module, dict[str, object]], None]:
    def change(module: torch.nn.Module, options: dict[str, object]) -> None:
        options[option] = None

    return change


def shift_window(by: int) -> Callable[[torch.nn.Module, dict[str, object]], None]:
    def change(module: torch.nn.Module, options: dict[str, object]) -> None:
        options["sliding_window"] += by  # type: ignore[operator]

    return change


def scale_by(factor: float) -> Callable[[torch.nn.Module, dict[str, object]], None]:
    def change(module: torch.nn.Module, options: dict[str, object]) -> None:
        options["scaling"] *= factor  # type: ignore[operator]

    return change


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param("mistral, window", ignore("sliding_window"), id="window-ignored"),
        pytest.param("mistral, window", shift_window(1), id="window-one-too-long"),
        pytest.param("mistral, window", shift_window(-1), id="window-one-too-short"),
        pytest.param("gemma 2", ignore("softcap"), id="softcap-ignored"),
        pytest.param("gpt-oss, sinks", ignore("s_aux"), id="sinks-ignored"),
        pytest.param("llama", scale_by(1.25), id="scale-wrong"),
    ],
)
def test_attention_that_is_not_the_models_own_is_refused(
    name: str,
    change: Callable[[torch.nn.Module, dict[str, object]], None],
    dtype: torch.dtype,
) -> None:
    runner, logits, token_ids = runner_of(build(*SERVED[name], dtype))
    replace_attention(runner, change)
    with pytest.raises(UnsupportedModelError, match="our logits differ"):
        check_agreement("tiny", runner, logits, token_ids)


def test_a_model_whose_logits_are_not_finite_is_refused_by_that_name() -> None:
    runner, logits, token_ids = runner_of(tiny_llama())
    with pytest.raises(UnsupportedModelError, match="tiny: its logits are not finite"):
        check_agreement("tiny", runner, logits * float("nan"), token_ids)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_a_dropped_mask_is_refused(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, logits, token_ids = runner_of(tiny_llama(dtype=dtype))
    mask = PlannedAttention._mask
    monkeypatch.setattr(PlannedAttention, "_mask", lambda *args: torch.zeros_like(mask(*args)))
    with pytest.raises(UnsupportedModelError, match="our logits differ"):
        check_agreement("tiny", runner, logits, token_ids)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_positions_that_restart_with_every_chunk_are_refused(dtype: torch.dtype) -> None:
    runner, logits, token_ids = runner_of(build(*SERVED["gpt-2"], dtype))
    forward = runner.model.forward

    def restart(*args, position_ids, **kwargs):  # type: ignore[no-untyped-def]
        return forward(
            *args, position_ids=(position_ids - position_ids[0, 0]).clamp(min=0), **kwargs
        )

    runner.model.forward = restart  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModelError, match="our logits differ"):
        check_agreement("tiny", runner, logits, token_ids)


# ---- what the engine states -----------------------------------------------------------


@pytest.mark.parametrize(
    ("numerics", "guarantee", "expected"),
    [
        ("auto", "bit_exact", "invariant"),
        ("auto", "rounding", "fast"),
        ("invariant", "rounding", "invariant"),
        ("fast", "rounding", "fast"),
    ],
)
def test_the_engine_states_what_was_measured_and_pins_only_where_it_helps(
    use: Callable[[Machine], None],
    monkeypatch: pytest.MonkeyPatch,
    numerics: str,
    guarantee: str,
    expected: str,
) -> None:
    helped = numerics == "fast" or guarantee == "bit_exact"
    machine = Machine() if helped else Machine(tokens=1 << 20)
    use(machine)
    monkeypatch.setattr("engine.assembly.can_pack", lambda model: False)
    engine = tiny_engine(numerics=numerics)
    assert (engine.info.guarantee, engine.info.numerics) == (guarantee, expected)


def test_packed_layers_are_probed_like_any_others(
    use: Callable[[Machine], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(Machine())
    packed = PackedLinear.forward

    def by_tokens(self: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        return packed(self, x) * (1 + x.numel() // x.shape[-1] * 1e-6)

    monkeypatch.setattr(PackedLinear, "forward", by_tokens)
    assert tiny_engine().info.guarantee == "rounding"
