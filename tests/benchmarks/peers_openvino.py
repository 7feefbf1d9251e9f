"""OpenVINO GenAI's continuous batching; runs in its own environment.

It keeps cached prefixes without asking whose they are. So that no run profits from the prompts
of one before it, prefixes are cached only for jobs whose tenants come back, by a pipeline that is
made anew, untimed, when others come; it is warmed with tokens that nobody asks for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import openvino
import openvino_genai

from tests.benchmarks.peers_jobs import Job, RefusedError, Served
from tests.benchmarks.peers_loop import serve_steps

_NUM_LOOKUP_TOKENS, _LONGEST_NGRAM = 4, 4
_CACHE_GIB = 2
_MAX_STEP_TOKENS = 512


class OpenVino:
    """One model folder in OpenVINO's format, decoded plainly or with prompt lookup."""

    def __init__(
        self, folder: str, dtype: str, max_num_rows: int, num_threads: int, *, lookup: bool
    ) -> None:
        if dtype not in ("bfloat16", "float32"):
            raise ValueError(f"dtype: {dtype} is unknown here")
        self._folder = folder
        self._lookup = lookup
        self._max_num_rows = max_num_rows
        self._properties = {
            "INFERENCE_NUM_THREADS": num_threads,
            "INFERENCE_PRECISION_HINT": "bf16" if dtype == "bfloat16" else "f32",
        }
        self._tenants: set[str] = set()
        self._num_requests = 0
        self._pipeline = self._load(caches=False)
        self._caching: Any = None

    def _load(self, *, caches: bool) -> Any:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = _CACHE_GIB
        scheduler.max_num_seqs = self._max_num_rows
        scheduler.max_num_batched_tokens = _MAX_STEP_TOKENS
        scheduler.enable_prefix_caching = caches
        lookup = {"prompt_lookup": True} if self._lookup else {}
        return openvino_genai.ContinuousBatchingPipeline(
            self._folder, scheduler, "CPU", {**self._properties, **lookup}
        )

    def versions(self) -> dict[str, str]:
        return {
            "openvino_genai": openvino_genai.__version__,
            "openvino": openvino.__version__,
            **{name.lower(): str(value) for name, value in self._properties.items()},
        }

    def run(self, job: Job) -> list[Served]:
        if (job.mode == "speculative") != self._lookup:
            raise RefusedError("prompt lookup is chosen when the pipeline is made")
        pipeline = self._pipeline
        if job.shares_prefixes:
            if self._caching is None or not self._tenants.issuperset(job.tenants):
                self._tenants = set(job.tenants)
                self._caching = None  # its memory first
                self._caching = self._load(caches=True)
                strange = tuple(tuple(reversed(prompt)) for prompt in job.prompts)
                self._serve(self._caching, replace(job, prompts=strange))
            pipeline = self._caching
        return self._serve(pipeline, job)

    def _serve(self, pipeline: Any, job: Job) -> list[Served]:
        handles: dict[int, Any] = {}

        def submit(index: int) -> None:
            self._num_requests += 1
            handles[index] = pipeline.add_request(
                self._num_requests,
                openvino.Tensor(np.array([job.prompts[index]], dtype=np.int64)),
                self._generation(job.max_tokens[index]),
            )

        def step() -> Iterator[tuple[int, Sequence[int]]]:
            pipeline.step()
            for index, handle in handles.items():
                while handle.can_read():
                    for output in handle.read().values():
                        yield index, output.generated_ids

        return serve_steps(job, submit, step)

    def _generation(self, max_tokens: int) -> openvino_genai.GenerationConfig:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.min_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        if self._lookup:
            config.num_assistant_tokens = _NUM_LOOKUP_TOKENS
            config.max_ngram_size = _LONGEST_NGRAM
        return config
