"""Who takes part: processes, and the modes in which they decode.

All run the same weights: bf16 and f16 hold the numbers that we serve, int8 and q4_1 are quantised
(q4_1 is the file that those numbers were made of) and are compared apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.peers_environments import EnvironmentRefusedError, python_of
from tests.benchmarks.peers_process import PeerProcess

_TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")


@dataclass(frozen=True, slots=True)
class Kind:
    """One process. source is what it reads: the safetensors folder, or FORMAT:TYPE made of it."""

    worker_class: str
    environment: str | None = None  # None: ours
    source: str = "safetensors"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to decode with a process.

    group: contenders of one group are measured in the same rounds, beside our plain decoding.
    is_torch_peer: runs our weights in our dtype on torch, without speculation.
    plain: of a contender that speculates, the one that is the same without.
    """

    name: str
    kind: str
    mode: str
    group: str
    is_torch_peer: bool = False
    plain: str | None = None


REFERENCE = "tandem_plain"
KINDS: Mapping[str, Kind] = {
    "tandem": Kind("tandem"),
    "tandem_int8": Kind("tandem", options={"quantization": "int8"}),
    "transformers_generate": Kind("transformers_generate"),
    "transformers_batching": Kind("transformers_batching"),
    "vllm": Kind("vllm", "vllm", options={"eager": False}),
    "vllm_eager": Kind("vllm", "vllm", options={"eager": True}),
    "vllm_ngram": Kind("vllm", "vllm", options={"eager": False, "ngram": True}),
    **{
        f"openvino_{name}{'_lookup' if lookup else ''}": Kind(
            "openvino", "openvino", f"openvino:{source}", {"lookup": lookup}
        )
        for name, source in (("f16", "f16"), ("int8", "q8_0"), ("q4_1", "q4_1"))
        for lookup in (False, True)
    },
    **{
        f"llama_cpp_{name}{'_ngram' if ngram else ''}": Kind(
            "llama_cpp", "llama_cpp", f"gguf:{name}", {"ngram": ngram}
        )
        for name in ("bf16", "q8_0", "q4_1")
        for ngram in (False, True)
    },
    "ctranslate2_bf16": Kind("ctranslate2", "ctranslate2", "ctranslate2:bfloat16"),
    "ctranslate2_int8": Kind("ctranslate2", "ctranslate2", "ctranslate2:int8"),
}


def _others() -> tuple[Contender, ...]:
    found = []
    for name, kind in KINDS.items():
        if kind.source == "safetensors":
            continue
        speculates = any(kind.options.values())
        plain = name.rpartition("_")[0] if speculates else None
        mode = "speculative" if speculates else "plain"
        found.append(Contender(name, name, mode, kind.environment or "", plain=plain))
    return tuple(found)


CONTENDERS: tuple[Contender, ...] = (
    Contender(REFERENCE, "tandem", "plain", "torch"),
    Contender("tandem_speculative", "tandem", "speculative", "torch", plain=REFERENCE),
    Contender("transformers_generate", "transformers_generate", "plain", "torch", True),
    Contender(
        "transformers_assisted",
        "transformers_generate",
        "speculative",
        "torch",
        plain="transformers_generate",
    ),
    Contender("transformers_batching", "transformers_batching", "plain", "torch", True),
    Contender("vllm", "vllm", "plain", "torch", True),
    Contender("vllm_eager", "vllm_eager", "plain", "torch", True),
    # Beside CTranslate2's int8, so that the two are compared in the same rounds.
    Contender("tandem_int8", "tandem_int8", "plain", "ctranslate2"),
    Contender("vllm_ngram", "vllm_ngram", "speculative", "torch", plain="vllm"),
    *_others(),
)


def model_of(source: str, folder: str) -> str:
    """What a process reads, converted when it is not there yet.

    Raises EnvironmentRefusedError.
    """
    if source == "safetensors":
        return folder
    # Conversions need packages that not everyone who reads this table has.
    from tests.benchmarks import peers_models

    kind, _, name = source.partition(":")
    if kind == "ctranslate2":
        return str(peers_models.ctranslate2_folder(folder, name))
    if not peers_models.is_demo_model(folder):
        raise EnvironmentRefusedError(f"no GGUF file is known of {Path(folder).name}")
    if kind == "openvino":
        return str(peers_models.openvino_folder(name))
    return str(peers_models.gguf_file(name))


def variables_of(environment: str | None, num_threads: int) -> dict[str, str]:
    """Environment variables with which a peer's documentation tells users to run it."""
    if environment != "vllm":
        return {}
    openmp = Path(python_of("vllm")).parents[1] / "lib" / "libiomp5.so"
    preloaded = [str(path) for path in (openmp, _TCMALLOC) if path.exists()]
    return {
        "LD_PRELOAD": ":".join(preloaded),
        "KMP_AFFINITY": "granularity=fine,explicit,proclist="
        f"[{','.join(map(str, range(num_threads)))}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
    }


def start(name: str, folder: str, dtype: str, max_num_rows: int, num_threads: int) -> PeerProcess:
    """The process of that kind, its environment and model made on first use.

    Raises EnvironmentRefusedError when either cannot be had here.
    """
    kind = KINDS[name]
    options: dict[str, Any] = {}
    if kind.environment is not None:
        options["python"] = python_of(kind.environment)
    return PeerProcess(
        kind.worker_class,
        model_of(kind.source, folder),
        dtype,
        max_num_rows,
        num_threads,
        name=name,
        options=kind.options,
        environment=variables_of(kind.environment, num_threads),
        **options,
    )
