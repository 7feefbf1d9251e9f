"""The Azure LLM inference trace of 2023: an hour of a production service's requests."""

import csv
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from exports.errors import SourceError

FILES = {"conversation": "azure_llm_trace_conv.csv", "code": "azure_llm_trace_code.csv"}


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests of one kind in order of arrival: seconds since the first, and tokens."""

    kind: str
    arrival_seconds: np.ndarray
    num_prompt_tokens: np.ndarray
    num_output_tokens: np.ndarray


def read_traces(folder: Path) -> tuple[Trace, ...]:
    """Both files of the trace. Raises SourceError that says which file is missing or wrong."""
    return tuple(_read(kind, folder / name) for kind, name in FILES.items())


def _read(kind: str, path: Path) -> Trace:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [
                (_seconds(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
                for row in csv.DictReader(file)
            ]
        arrivals, prompts, outputs = (np.array(values) for values in zip(*rows, strict=True))
    except FileNotFoundError as error:
        raise SourceError(
            f"{path} is missing: put the Azure LLM inference trace 2023 "
            "(github.com/Azure/AzurePublicDataset) there"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{path} is not the Azure trace: {error!r}") from error
    return Trace(kind, arrivals - arrivals[0], prompts, outputs)


def _seconds(text: str) -> float:
    # Seven digits of a second; Python reads six.
    return datetime.fromisoformat(text[:26]).timestamp()
