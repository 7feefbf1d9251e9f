"""Counts the prompts that a server keeps for training, and those that it lost on the way."""

from opentelemetry import metrics

from telemetry import names
from telemetry.instruments import create_instrument

_prompts = create_instrument(metrics.get_meter(names.SCOPE), names.CAPTURED_PROMPTS)


def count_captured(result: str, number: int) -> None:
    """result is written, dropped (the writer was behind), left_out (redaction) or failed (the
    disk). Thread-safe."""
    _prompts.add(number, {names.ATTR_CAPTURE_RESULT: result})
