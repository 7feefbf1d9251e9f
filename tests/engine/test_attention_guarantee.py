"""What attention over many keys promises is measured, and a wrong number of keys is found."""

import pytest
import torch

from engine.attention_guarantee import keeps_bits
from engine.key_padding import padded_keys
from engine.kv_storage import KVCacheShape
from engine.layout.plan import NO_PADDING, PACKED_PADDING
from tests.engine.driver import tiny_engine
from tests.engine.test_models import SERVED, build
from tests.marks import thorough

BLOCKS = pytest.mark.parametrize("block_size", [None, 16], ids=["rows", "blocks"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
MAX_TOKENS = 1200
NUM_HEADS = 9


def shape(dtype: torch.dtype) -> KVCacheShape:
    return KVCacheShape(4, 3, 64, 64, dtype, torch.device("cpu"))


def keeps(
    dtype: torch.dtype,
    block_size: int | None = None,
    max_tokens: int = MAX_TOKENS,
    by_hand: bool = False,
) -> bool:
    sizes = (NUM_HEADS, PACKED_PADDING, block_size, max_tokens)
    return keeps_bits(shape(dtype), *sizes, by_hand=by_hand)


@DTYPES
@BLOCKS
@pytest.mark.parametrize("by_hand", [False, thorough(True)], ids=["fused", "by-hand"])
def test_a_tokens_bits_do_not_depend_on_the_length_of_a_neighbour(
    dtype: torch.dtype, block_size: int | None, by_hand: bool
) -> None:
    assert keeps(dtype, block_size, by_hand=by_hand)


def in_the_dtype_of_the_values(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    scores = torch.matmul(query, keys.transpose(2, 3)).float() * scale + mask
    return torch.matmul(torch.softmax(scores, dim=-1).to(values.dtype), values)


def test_a_product_in_bfloat16_over_all_keys_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What softcapped attention did until it was probed as well."""
    monkeypatch.setattr("engine.planned_attention._attend_by_hand", in_the_dtype_of_the_values)
    assert keeps(torch.bfloat16)
    assert not keeps(torch.bfloat16, by_hand=True)


def rounded_up(count: int, multiple: int = 128) -> int:
    return -(-count // multiple) * multiple


@DTYPES
@BLOCKS
def test_256_keys_left_over_are_found(
    dtype: torch.dtype, block_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this project did until it compared long prompts: 1 of 10 sequences in bfloat16."""
    monkeypatch.setattr("engine.layout.ragged.padded_keys", rounded_up)
    assert not keeps(dtype, block_size)


def test_keys_that_are_not_padded_are_found() -> None:
    sizes = (NUM_HEADS, NO_PADDING, None, MAX_TOKENS)
    assert not keeps_bits(shape(torch.float32), *sizes)


def test_a_short_context_is_probed_as_far_as_it_goes() -> None:
    assert keeps(torch.float32, max_tokens=300)
    assert keeps(torch.float32, max_tokens=50)


def test_an_engine_whose_attention_does_not_keep_bits_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.assembly.attention_keeps_bits", lambda *arguments: False)
    assert tiny_engine(is_measured=True).info.guarantee == "rounding"


def test_the_number_of_keys_never_falls_and_leaves_no_256_over() -> None:
    found = [padded_keys(count) for count in range(1, 3000)]
    assert found == sorted(found)
    assert all(number >= count for count, number in enumerate(found, start=1))
    assert all(number % 128 == 0 and number % 512 != 256 for number in found)
    assert {padded_keys(count, 16) for count in (250, 256)} == {256}


@pytest.mark.parametrize(("name", "by_hand"), [("llama", False), ("gemma 2", True)])
def test_what_a_model_asks_of_its_attention_is_what_is_probed(
    name: str, by_hand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def record(*sizes: object, by_hand: bool = False) -> bool:
        asked.append(by_hand)
        return True

    monkeypatch.setattr("engine.attention_guarantee.keeps_bits", record)
    tiny_engine(target=build(*SERVED[name]), is_measured=True)
    assert asked == [False, True][: 1 + by_hand]
