"""The server's settings: environment variables with the prefix TANDEM_, or arguments.

Durations are in seconds and sizes in bytes unless the name says otherwise.
"""

import ipaddress
from decimal import Decimal
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from engine.config import (
    SHIPPED_HEAD,
    AuditConfig,
    Dtype,
    EngineConfig,
    Graphs,
    LayoutName,
    Numerics,
    Quantization,
    SpeculationConfig,
)


class ServiceSettings(BaseSettings):
    """Everything that `tandem serve` needs. Wrong values are refused at start, by name."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_", frozen=True, extra="forbid")

    # Model
    target: str = "smollm2-135m-instruct"
    model_name: str = ""  # what clients call it; empty: as the target was named
    draft: str | None = None
    dtype: Dtype = "auto"
    device: str = "auto"
    num_threads: int | None = Field(default=None, ge=1)
    max_model_tokens: int | None = Field(default=None, ge=8)
    max_num_rows: int = Field(default=16, ge=1)
    max_step_tokens: int = Field(default=512, ge=8)
    numerics: Numerics = "auto"
    quantization: Quantization = "none"  # int8: weights of 8 bits, on a CPU
    kv_cache_memory: float = Field(default=0.5, gt=0)
    layout: LayoutName = "ragged"
    graphs: Graphs = "auto"  # CUDA graphs on CUDA; off; bucketed: their shapes alone
    tensor_parallel: int = Field(default=1, ge=1)  # processes of torchrun that share the target
    drafters: tuple[str, ...] = ("prompt_lookup", "head")  # or "head:NAME" of the registry
    head: str = SHIPPED_HEAD  # or a folder; used by the drafter "head"
    max_draft_tokens: int = Field(default=4, ge=0, le=64)
    audit_share: float = Field(default=0.01, ge=0, le=1)  # of finished requests, in idle time
    audit_cases: Path | None = None  # a folder that keeps what diverged, prompts included
    heads: tuple[str, ...] = ()  # of the registry, NAME or NAME@VERSION: drafters "head:NAME"
    registry: Path | None = None  # None: under `home`
    experiment_file: Path | None = None  # read again on SIGHUP and when it changes
    experiment_check_seconds: float = Field(default=30, gt=0)  # how often guard rails look

    # Keeping prompts to train drafters with: off, see SECURITY.md
    capture_folder: Path | None = None
    capture_share: float = Field(default=0, ge=0, le=1)  # of the requests
    capture_retention_days: int = Field(default=30, ge=1)
    capture_redaction: str | None = None  # "module:function", or a file of regular expressions

    # Listening
    host: str = "127.0.0.1"
    port: int = Field(default=50051, ge=0, le=65535)  # 0: a free one
    reflection: bool = False
    allow_insecure: bool = False  # plain text beyond loopback
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None  # given: clients must show a certificate

    # Access: without an access file everybody who reaches the port may call
    access_file: Path | None = None
    health_without_token: bool = False
    jwt_issuer: str | None = None
    jwt_audience: str = "tandem"
    jwt_jwks_url: str | None = None  # None: ISSUER/.well-known/jwks.json

    # Bounds of a request
    max_request_bytes: int = Field(default=4 * 2**20, ge=1024)
    max_metadata_bytes: int = Field(default=16 * 1024, ge=1024)
    max_prompt_bytes: int = Field(default=2 * 2**20, ge=1)
    default_max_tokens: int = Field(default=256, ge=1)
    max_tokens: int = Field(default=1_000_000, ge=1)
    max_completions: int = Field(default=8, ge=1, le=64)
    max_deadline_seconds: float = Field(default=3600, gt=0)

    # Admission
    max_waiting_requests: int = Field(default=256, ge=0)
    max_waiting_tokens: int = Field(default=2_000_000, ge=0)
    max_unread_messages: int = Field(default=1024, ge=1)

    # Hiding accepted counts from who watches the network: see SECURITY.md
    coalesce_tokens: int = Field(default=0, ge=0)  # 0: one message per step
    coalesce_seconds: float = Field(default=0, ge=0)

    # Transport
    max_connection_age_seconds: float | None = Field(default=None, gt=0)  # None: for ever
    max_connection_age_grace_seconds: float = Field(default=600, gt=0)  # for its live streams
    max_concurrent_streams: int = Field(default=1000, ge=1)
    keepalive_seconds: float = Field(default=30, gt=0)
    keepalive_timeout_seconds: float = Field(default=10, gt=0)

    # Lifecycle
    grace_seconds: float = Field(default=30, ge=0)
    stall_seconds: float = Field(default=30, gt=0)  # a step that takes longer is a hang

    # Telemetry
    ledger_url: str | None = None  # None: SQLite under `home`
    finish_when_recorded: bool = False  # `finished` waits until its ledger row is on disk
    otlp_endpoint: str | None = None
    prometheus_host: str = "127.0.0.1"
    prometheus_port: int | None = Field(default=None, ge=0, le=65535)
    trace_sample_ratio: float = Field(default=1.0, ge=0, le=1)
    step_span_every: int = Field(default=100, ge=0)  # a span for every n-th engine step; 0: none
    price_per_hour_usd: Decimal = Field(default=Decimal("1.00"), ge=0)  # without a price book
    price_book: Path | None = None  # read again on SIGHUP and when it changes
    machine_type: str = "default"
    purchase: str = "on_demand"
    home: Path = Path("~/.cache/tandem")
    reload_seconds: float = Field(default=0, ge=0)  # looks for changed files; 0: SIGHUP alone

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = "INFO"
    log_format: Literal["auto", "json", "text"] = "auto"  # auto: text on a terminal, else JSON

    @model_validator(mode="after")
    def _check_listening(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("tls_client_ca needs tls_certificate and tls_key")
        if self.jwt_issuer is not None and self.access_file is None:
            raise ValueError("jwt_issuer needs access_file, which says who the subjects are")
        if (self.capture_folder is None) != (self.capture_share == 0):
            raise ValueError("capture_folder and a capture_share above 0 go together")
        if self.capture_redaction is not None and self.capture_folder is None:
            raise ValueError("capture_redaction needs capture_folder")
        for name in ("jwt_issuer", "jwt_jwks_url"):
            _check_issuer_url(name, getattr(self, name))
        if self.tls_certificate is None and not (self.allow_insecure or is_loopback(self.host)):
            raise ValueError(
                f"host: {self.host} is not loopback, and without tls_certificate everything "
                "would travel in plain text; set allow_insecure to do it all the same"
            )
        return self

    @property
    def address(self) -> str:
        """host:port as gRPC writes it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def engine_config(self, target: str, draft: str | None) -> EngineConfig:
        """The engine's part; target and draft are folders or hub ids, already resolved. Heads of
        the registry come later, and go."""
        drafters = tuple(name for name in self.drafters if not name.startswith("head:"))
        if draft is not None and "draft_model" not in drafters:
            drafters = (*drafters, "draft_model")
        return EngineConfig(
            target=target,
            dtype=self.dtype,
            device=self.device,
            num_threads=self.num_threads,
            max_model_tokens=self.max_model_tokens,
            max_num_rows=self.max_num_rows,
            max_step_tokens=self.max_step_tokens,
            numerics=self.numerics,
            quantization=self.quantization,
            kv_cache_memory=self.kv_cache_memory,
            layout=self.layout,
            graphs=self.graphs,
            tensor_parallel=self.tensor_parallel,
            audit=AuditConfig(share=self.audit_share),
            cost_table_folder=str(self.home.expanduser() / "cost-tables"),
            speculation=SpeculationConfig(
                drafters=drafters,
                draft_model=draft,
                head=self.head,
                max_draft_tokens=self.max_draft_tokens,
            ),
        )


def _check_issuer_url(name: str, url: str | None) -> None:
    """Whoever can change keys on their way can make every token."""
    if url is None or url.startswith("https://"):
        return
    parts = urlsplit(url)
    if parts.scheme != "http" or not is_loopback(parts.hostname or ""):
        raise ValueError(f"{name}: {url} must begin with https://")


def is_loopback(host: str) -> bool:
    """Whether a socket bound to host can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
