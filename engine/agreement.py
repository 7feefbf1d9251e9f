"""Whether two computations of the same logits differ by more than rounding."""

import torch

# Of a token's logits, in root mean square, relative to their spread. Measured on sound runners:
# below 1e-4 in float32, 0.03 in bfloat16; a window wrong by one token: above 0.12.
_TOLERANCE = 1e-3
_HALF_TOLERANCE = 0.08
_NUM_LAST = 16


def disagreement(logits: torch.Tensor, others: torch.Tensor) -> tuple[float, float]:
    """How far two [T, V] of the same tokens differ, in the spread of logits, and how far rounding
    may move them."""
    spread = max(logits.float().std().item(), 1e-6)
    errors = (others.float() - logits.float()).square().mean(dim=1).sqrt() / spread  # [T]
    if logits.dtype == torch.float32:
        return errors.max().item(), _TOLERANCE
    # Rounding may send single tokens to another expert; a wrong window shows at the end.
    error = max(errors.median().item(), errors[-_NUM_LAST:].median().item())
    return error, _HALF_TOLERANCE


def agrees(logits: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether both are those of the same model over the same tokens, up to rounding."""
    error, tolerance = disagreement(logits, others)
    return error <= tolerance
