"""The engine's configuration: frozen, checked on construction, independent of the environment."""

from dataclasses import dataclass, field
from typing import Literal

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Numerics = Literal["auto", "invariant", "fast"]
Quantization = Literal["none", "int8"]
Graphs = Literal["auto", "off", "bucketed"]
LayoutName = Literal["ragged", "aligned", "grouped"]


def _require(condition: bool, name: str, reason: str) -> None:
    if not condition:
        raise ValueError(f"{name}: {reason}")


SHIPPED_HEAD = "shipped"


@dataclass(frozen=True, slots=True)
class HeadSource:
    """A further head beside the default one: its drafter is "head:NAME"."""

    name: str
    folder: str

    def __post_init__(self) -> None:
        _require(bool(self.name), "speculation.more_heads", "a head needs a name")
        _require(bool(self.folder), f"speculation.more_heads.{self.name}", "needs a folder")


@dataclass(frozen=True, slots=True)
class ShadowPlan:
    """Heads, by their drafters' names, that are measured on a share of the requests."""

    drafters: tuple[str, ...]
    share: float


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How tokens are drafted.

    drafters: names in the order of preference; the first that has a proposal for a row
      wins. "prompt_lookup", "suffix", "head", "draft_model".
    draft_model: folder or hub id of the draft model; needed by "draft_model".
    head: folder of the head; needed by "head". SHIPPED_HEAD takes the one that Tandem ships, if
      it was made for the target and the layout has states for it, and else none. more_heads are
      loaded beside it and draft only for requests that name them.
    max_draft_tokens: K, the most tokens drafted per row and step.
    lookup_max_ngram, lookup_min_ngram: lengths of the suffix that prompt lookup matches; "suffix"
      matches any length from lookup_min_ngram on.
    """

    drafters: tuple[str, ...] = ("prompt_lookup",)
    draft_model: str | None = None
    head: str | None = None
    more_heads: tuple[HeadSource, ...] = ()
    max_draft_tokens: int = 4
    lookup_max_ngram: int = 4
    lookup_min_ngram: int = 2

    def __post_init__(self) -> None:
        known = ("prompt_lookup", "suffix", "head", "draft_model")
        for name in self.drafters:
            _require(name in known, "speculation.drafters", f"unknown drafter {name!r}; {known}")
        _require(
            len(set(self.drafters)) == len(self.drafters),
            "speculation.drafters",
            "names a drafter twice",
        )
        _require(
            "draft_model" not in self.drafters or bool(self.draft_model),
            "speculation.draft_model",
            "the drafter 'draft_model' needs a model",
        )
        _require(
            "head" not in self.drafters or bool(self.head),
            "speculation.head",
            "the drafter 'head' needs the folder of a head",
        )
        names = [source.name for source in self.more_heads]
        _require(len(set(names)) == len(names), "speculation.more_heads", "names a head twice")
        _require(
            0 <= self.max_draft_tokens <= 64,
            "speculation.max_draft_tokens",
            f"must be between 0 and 64, got {self.max_draft_tokens}",
        )
        _require(
            1 <= self.lookup_min_ngram <= self.lookup_max_ngram <= 16,
            "speculation.lookup_min_ngram",
            "needs 1 <= lookup_min_ngram <= lookup_max_ngram <= 16",
        )


@dataclass(frozen=True, slots=True)
class AuditConfig:
    """Which finished requests are checked against the target alone, in idle time.

    share: of the finished requests, 0 to 1. max_jobs: requests that may wait to be audited.
    """

    share: float = 0.0
    max_jobs: int = 64

    def __post_init__(self) -> None:
        _require(0 <= self.share <= 1, "audit.share", f"must be in [0, 1], got {self.share}")
        _require(self.max_jobs >= 1, "audit.max_jobs", "must be at least 1")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that decides what the engine does.

    target: folder or hub id of the target model (safetensors only).
    max_model_tokens: most tokens of prompt plus output; None takes the model's own context.
    max_num_rows: requests that run at the same time.
    max_step_tokens: token budget of a step; longer prompts are computed in chunks.
    numerics: "invariant" pins what a token's bits depend on; "fast" does not; "auto" is
      invariant where the start-up probe holds.
    quantization: "int8" keeps the weights of linear layers, the draft model's too, in 8 bits, on a
      CPU; what is guaranteed is then the output of that model.
    kv_cache_memory: bytes, or a share (0 to 1) of the memory that is free after loading.
    kv_block_size: tokens per cache block; None gives one contiguous block per row on a CPU and
      blocks of 16 on CUDA.
    layout: how rows of different lengths share a forward, with the same tokens from all.
      "ragged" moves no keys; "aligned" pads rows on the left over a plain transformers cache and
      serves models whose attention cannot be replaced; "grouped" is aligned, with group_rows of a
      larger pool at a time, of equal length where that pays. Only "ragged" reuses prefixes, has
      blocks and can pin bits.
    group_rows: decoding rows per step of the layout "grouped", whose pool is max_num_rows; None
      is half of the pool.
    graphs: "auto" replays decode steps as CUDA graphs on CUDA; "bucketed" gives forwards the few
      shapes that graphs need and computes them without, on any device with small blocks.
    cost_table_folder: where measured costs are kept between starts; None measures every time.
    tensor_parallel: processes, started by torchrun, that share the target: each computes a part of
      every layer. The engine runs in the first one. Heads are refused.
    """

    target: str
    dtype: Dtype = "auto"
    device: str = "auto"
    num_threads: int | None = None
    max_model_tokens: int | None = None
    max_num_rows: int = 16
    max_step_tokens: int = 512
    numerics: Numerics = "auto"
    quantization: Quantization = "none"
    kv_cache_memory: float = 0.5
    kv_block_size: int | None = None
    cost_table_folder: str | None = None
    layout: LayoutName = "ragged"
    graphs: Graphs = "auto"
    group_rows: int | None = None
    tensor_parallel: int = 1
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)

    def __post_init__(self) -> None:
        _require(bool(self.target), "target", "must name a model")
        _require(
            self.layout == "ragged"
            or (self.speculation.head in (None, SHIPPED_HEAD) and not self.speculation.more_heads),
            "layout",
            f"{self.layout!r} gives a head no hidden states; heads need 'ragged'",
        )
        _require(self.max_num_rows >= 1, "max_num_rows", "must be at least 1")
        self._check_tensor_parallel()
        _require(self.max_step_tokens >= 8, "max_step_tokens", "must be at least 8")
        _require(
            self.max_model_tokens is None or self.max_model_tokens >= 8,
            "max_model_tokens",
            "must be at least 8",
        )
        _require(
            self.num_threads is None or self.num_threads >= 1, "num_threads", "must be positive"
        )
        _require(
            self.kv_block_size is None or self.kv_block_size >= 1,
            "kv_block_size",
            "must be positive",
        )
        _require(self.kv_cache_memory > 0, "kv_cache_memory", "must be positive")
        if self.group_rows is not None:
            _require(self.layout == "grouped", "group_rows", "needs the layout 'grouped'")
            _require(
                1 <= self.group_rows <= self.max_num_rows,
                "group_rows",
                f"must be between 1 and max_num_rows, got {self.group_rows}",
            )
        is_ragged = self.layout == "ragged"
        _require(
            is_ragged or self.kv_block_size is None,
            "kv_block_size",
            f"the layout {self.layout!r} has no blocks",
        )
        _require(
            self.graphs != "bucketed" or (is_ragged and self.tensor_parallel == 1),
            "graphs",
            "'bucketed' needs the layout 'ragged' and a target in one process",
        )
        _require(
            is_ragged or self.numerics != "invariant",
            "numerics",
            f"'invariant' needs the layout 'ragged': in {self.layout!r} a row's padding, and with "
            "it the order of its sums, depends on its neighbours",
        )

    def _check_tensor_parallel(self) -> None:
        _require(self.tensor_parallel >= 1, "tensor_parallel", "must be at least 1")
        if self.tensor_parallel > 1:
            _require(self.layout == "ragged", "tensor_parallel", "needs the layout 'ragged'")
            is_quantized = self.quantization != "none"
            _require(not is_quantized, "tensor_parallel", "needs quantization 'none'")
            _require(
                self.speculation.head in (None, SHIPPED_HEAD) and not self.speculation.more_heads,
                "tensor_parallel",
                "heads need the whole target in one process; draft with prompt_lookup, suffix or "
                "a draft model",
            )
