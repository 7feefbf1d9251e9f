"""CTranslate2's generator over static batches; runs in its own environment.

It takes tokens by their names, keeps no prefixes, and has no speculation.
"""

import json
import time
from pathlib import Path

import ctranslate2

from tests.benchmarks.peers_jobs import Job, RefusedError, Served
from tests.benchmarks.peers_loop import serve_batches


class CTranslate2:
    """One converted folder; a row leaves its batch when it has the tokens it asked for."""

    def __init__(self, folder: str, dtype: str, max_num_rows: int, num_threads: int) -> None:
        self._generator = ctranslate2.Generator(
            folder, device="cpu", inter_threads=1, intra_threads=num_threads
        )
        self._names = json.loads((Path(folder) / "vocabulary.json").read_text())

    def versions(self) -> dict[str, str]:
        return {
            "ctranslate2": ctranslate2.__version__,
            "compute_type": self._generator.compute_type,
        }

    def run(self, job: Job) -> list[Served]:
        if job.mode == "speculative":
            raise RefusedError("CTranslate2's generator has no speculation")

        def run_batch(batch: list[int], started: float) -> list[Served]:
            now = time.perf_counter() - started
            tokens: list[list[int]] = [[] for _ in batch]
            instants: list[list[float]] = [[] for _ in batch]

            def note(step: ctranslate2.GenerationStepResult) -> bool:
                row = step.batch_id
                tokens[row].append(step.token_id)
                instants[row].append(time.perf_counter() - started)
                is_last: bool = len(tokens[row]) >= job.max_tokens[batch[row]]
                return is_last

            most_tokens = max(job.max_tokens[index] for index in batch)
            self._generator.generate_batch(
                [[self._names[token] for token in job.prompts[index]] for index in batch],
                max_batch_size=0,
                max_length=most_tokens,
                min_length=most_tokens,
                end_token=[],
                include_prompt_in_result=False,
                sampling_topk=1,
                callback=note,
            )
            sent = [job.arrived_at(i) if job.arrivals is not None else now for i in batch]
            return [
                Served(tuple(tokens[row]), sent[row], instants[row][0], instants[row][-1])
                for row in range(len(batch))
            ]

        return serve_batches(job, run_batch)
