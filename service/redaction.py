"""What is taken out of captured prompts: by a function of the operator's, or by patterns.

A setting of the form "module:function" names a function from a text to the text that may be kept,
or to None where nothing of the prompt may. Anything else is a file of regular expressions, one a
line, "#" begins a comment; what they match becomes "[redacted]".
"""

import importlib
import re
from collections.abc import Callable
from pathlib import Path

Redact = Callable[[str], str | None]
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
REPLACEMENT = "[redacted]"


class RedactionError(ValueError):
    """A redaction that cannot be used; the message names the setting."""


def open_redaction(setting: str) -> Redact:
    """Raises RedactionError."""
    if _FUNCTION.fullmatch(setting):
        return _function(setting)
    return _patterns(Path(setting).expanduser())


def _function(setting: str) -> Redact:
    module, _, name = setting.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RedactionError(f"capture_redaction: {setting}: {error}") from error
    if not callable(found):
        raise RedactionError(f"capture_redaction: {setting}: is no function")
    redact: Redact = found
    return redact


def _patterns(path: Path) -> Redact:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RedactionError(f"capture_redaction: {error}") from error
    patterns = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            patterns.append(re.compile(line))
        except re.error as error:
            raise RedactionError(f"capture_redaction: {path}:{number}: {error}") from error
    if not patterns:
        raise RedactionError(f"capture_redaction: {path}: has no pattern")

    def redact(text: str) -> str:
        for pattern in patterns:
            text = pattern.sub(REPLACEMENT, text)
        return text

    return redact
