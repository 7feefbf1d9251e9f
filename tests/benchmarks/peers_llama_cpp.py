"""llama.cpp's server as xllamacpp ships it, over loopback; runs in its own environment.

A slot keeps the prompt that it computed last. A tenant that is seen for the first time takes any
slot and nothing that is cached; one that comes back takes its own slot, prefix and all.
"""

import http.client
import json
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import xllamacpp

from tests.benchmarks.peers_jobs import Job, RefusedError, Served
from tests.benchmarks.peers_loop import serve_steps

_NUM_LOOKUP_TOKENS, _NGRAM = 4, 3
_MAX_MODEL_TOKENS, _MAX_STEP_TOKENS = 2560, 512
_WAIT_SECONDS = 200.0
_HEADERS = {"Content-Type": "application/json"}
_DATA = b"data: "
_NGRAM_SIMPLE = xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE


class LlamaCpp:
    """One GGUF file; whether it drafts from n-grams is decided when the server is made."""

    def __init__(
        self, path: str, dtype: str, max_num_rows: int, num_threads: int, *, ngram: bool
    ) -> None:
        self._ngram = ngram
        parameters = xllamacpp.CommonParams()
        parameters.model.path = path
        parameters.n_parallel = max_num_rows
        parameters.n_ctx = max_num_rows * _MAX_MODEL_TOKENS
        parameters.n_batch = _MAX_STEP_TOKENS
        parameters.cont_batching = True
        parameters.n_gpu_layers = 0
        parameters.cache_ram_mib = 0
        parameters.slot_prompt_similarity = 0.0
        parameters.cpuparams.n_threads = num_threads
        parameters.cpuparams_batch.n_threads = num_threads
        parameters.verbosity = 0
        parameters.endpoint_slots = False
        parameters.port = 0
        if ngram:
            parameters.speculative.types = [_NGRAM_SIMPLE]
            parameters.speculative.ngram_simple.size_n = _NGRAM
            parameters.speculative.ngram_simple.size_m = _NUM_LOOKUP_TOKENS
        self._server = xllamacpp.Server(parameters)
        self._address = self._server.listening_address.removeprefix("http://")
        self._slots: dict[str, int] = {}

    @staticmethod
    def versions() -> dict[str, str]:
        return {"xllamacpp": xllamacpp.__version__}

    def run(self, job: Job) -> list[Served]:
        if (job.mode == "speculative") != self._ngram:
            raise RefusedError("speculation is chosen when the server is made")
        come_back = self._slots.keys() & set(job.tenants)
        if not come_back:
            self._slots = {}
        events: queue.Queue[tuple[int, Sequence[int] | str]] = queue.Queue()

        def submit(index: int) -> None:
            body: dict[str, Any] = {
                "prompt": list(job.prompts[index]),
                "n_predict": job.max_tokens[index],
                "temperature": 0,
                "top_k": 1,
                "ignore_eos": True,
                "stream": True,
                "return_tokens": True,
                "cache_prompt": job.tenants[index] in come_back,
            }
            if job.tenants[index] in come_back:
                body["id_slot"] = self._slots[job.tenants[index]]
            threading.Thread(
                target=self._complete, args=(index, job.tenants[index], body, events)
            ).start()

        def step() -> Iterator[tuple[int, Sequence[int]]]:
            found = [events.get(timeout=_WAIT_SECONDS)]
            while not events.empty():
                found.append(events.get_nowait())
            for index, tokens in found:
                if isinstance(tokens, str):
                    raise RefusedError(tokens)
                yield index, tokens

        return serve_steps(job, submit, step)

    def _complete(
        self,
        index: int,
        tenant: str,
        body: dict[str, Any],
        events: "queue.Queue[tuple[int, Sequence[int] | str]]",
    ) -> None:
        """Blocks until the request is over; every message goes to events."""
        connection = http.client.HTTPConnection(self._address, timeout=_WAIT_SECONDS)
        try:
            connection.request("POST", "/completion", json.dumps(body), _HEADERS)
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                events.put((index, f"HTTP {response.status}: {response.read(200)!r}"))
                return
            for line in response:
                if line.startswith(_DATA):
                    found = json.loads(line.removeprefix(_DATA))
                    if "error" in found:
                        events.put((index, str(found["error"])))
                        return
                    if found.get("stop"):
                        continue  # statistics: its tokens have been sent
                    self._slots[tenant] = found["id_slot"]
                    events.put((index, found["tokens"]))
        except OSError as error:
            events.put((index, f"the server went away: {error}"))
        finally:
            connection.close()
