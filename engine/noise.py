"""Counter-based noise: a number depends on its key alone, never on what was drawn before.

The key is (seed, position, stream, token). So a request draws the same tokens alone, in a
batch, after preemption, with speculation on or off; and a drafter that uses the target's
stream makes the same choice wherever its logits are close (arXiv 2408.07978).
"""

from collections.abc import Sequence
from enum import IntEnum

import torch

from engine.upload import upload

_RESOLUTION_BITS = 31
_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1


class Stream(IntEnum):
    """Independent noise for each use at one position."""

    TARGET = 0  # what the target draws with; a coupled drafter shares it
    ACCEPT = 1  # the uniform number of the rejection rule
    RECOVER = 2  # the draw from the residual, or of the bonus token, of the rejection rule
    DRAFT = 3  # a drafter's own draw under the rejection rule: independent of the target's


def _mix64(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    value &= _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def noise_key(seed: int, position: int, stream: Stream) -> int:
    """64 bits for one position of one request."""
    return _mix64(_mix64(_mix64(seed + _GOLDEN) + position) + stream)


def _signed32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _mix32(value: torch.Tensor) -> torch.Tensor:
    """The finaliser of MurmurHash3 on int32, in place; multiplication wraps around."""
    value ^= (value >> 16) & 0xFFFF
    value *= _signed32(0x85EBCA6B)
    value ^= (value >> 13) & 0x7FFFF
    value *= _signed32(0xC2B2AE35)
    value ^= (value >> 16) & 0xFFFF
    return value


def uniform_noise(keys: Sequence[int], token_ids: torch.Tensor) -> torch.Tensor:
    """[P, T] float32 in (0, 1) for P keys and the T tokens token_ids [T], 31 bits of resolution.

    Small values keep their relative precision, which is what the tail of Gumbel noise needs.
    """
    device = token_ids.device
    halves = [(_signed32(key), _signed32(key >> 32)) for key in keys]
    low, high = torch.split(upload(halves, device, torch.int32).view(-1, 2), 1, dim=1)  # [P, 1]
    value = (token_ids.to(torch.int32) * _signed32(0x9E3779B1)).unsqueeze(0) ^ low
    value = _mix32(value)
    value ^= high
    value = _mix32(value)
    value &= 0x7FFFFFFF
    uniform = (value.to(torch.float32) + 0.5) * 2.0**-_RESOLUTION_BITS
    return uniform.clamp_(max=1.0 - 2.0**-24)


def gumbel_noise(keys: Sequence[int], token_ids: torch.Tensor) -> torch.Tensor:
    """[P, T] float32 standard Gumbel noise: argmax(logits + noise) draws from softmax(logits)."""
    uniform = uniform_noise(keys, token_ids)
    return uniform.neg_().log1p_().neg_().log_().neg_()
