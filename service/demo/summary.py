"""The demo's result as one small file for scripts."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from service.demo.answers import Round, acceptance_length, exact_match


def write_summary(
    path: Path,
    on: Round,
    off: Round,
    references: Sequence[Sequence[int]],
    exported_tables: Mapping[str, int],
) -> None:
    """Write build/demo/summary.json.

    on, off: the same prompts with speculation and without. exact_match is the share of
    sequences of `on` that equal the target alone in every token. acceptance_length is null
    when nothing was verified. exported_tables maps a table's name to its rows.
    """
    length = acceptance_length(on.answers)
    summary = {
        "requests": len(on.answers),
        "tokens": on.num_tokens,
        "exact_match": exact_match(on.answers, references),
        "acceptance_length": None if length is None else round(length, 4),
        "tokens_per_second_on": round(on.tokens_per_second, 2),
        "tokens_per_second_off": round(off.tokens_per_second, 2),
        "exported_tables": dict(exported_tables),
    }
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
