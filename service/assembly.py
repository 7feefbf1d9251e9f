"""The one place that puts a server together out of its settings."""

import logging
import os
import sys
import time
from pathlib import Path
from uuid import uuid4

from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from engine.audit import AuditVerdict
from engine.drafter.registry import RegistryError
from engine.engine import Engine
from engine.loader import load_tokenizer
from engine.request import GenerationRequest, SamplingParams, StoppingParams
from service.app import Parts, Server
from service.calls import CallTraceFilter
from service.capture import PromptCapture
from service.experiments.assembly import open_experiments, open_watch, registered_heads
from service.models import ModelError, resolve_model
from service.recording import open_recording, open_telemetry, reload_prices
from service.redaction import RedactionError, open_redaction
from service.security import AccessFileError, ListedAccess, OpenAccess, SubjectFinder
from service.settings import ServiceSettings
from telemetry.logs import configure_logging

_WARM_UP_TOKENS = 8
_log = logging.getLogger(__name__)


class SetUpError(RuntimeError):
    """The server cannot be put together; the message says what to do."""


def set_up_logs(settings: ServiceSettings) -> None:
    """Logs to standard error, without the progress bars of libraries."""
    disable_progress_bar()
    as_json = settings.log_format == "json" or (
        settings.log_format == "auto" and not sys.stderr.isatty()
    )
    configure_logging(settings.log_level, as_json=as_json, filters=[CallTraceFilter()])


def assemble(settings: ServiceSettings) -> Server:
    """A server that has not begun to listen. Raises SetUpError; call it on the event loop."""
    home = settings.home.expanduser()
    try:
        target = resolve_model(settings.target, home)
        draft = None if settings.draft is None else resolve_model(settings.draft, home)
    except ModelError as error:
        raise SetUpError(str(error)) from error
    try:
        config = settings.engine_config(target, draft)
        heads = registered_heads(settings)
    except RegistryError as error:
        raise SetUpError(str(error)) from error
    experiments = open_experiments(settings)

    def build_engine() -> Engine:
        engine = Engine.from_config(config)
        warm_up(engine)
        return engine

    def tokenizer() -> PreTrainedTokenizerBase:
        return load_tokenizer(target)

    name = settings.model_name or public_name(settings.target)
    authenticator = open_access(settings)
    instance_id = uuid4().hex
    telemetry = open_telemetry(settings, instance_id)
    return Server(
        settings,
        Parts(
            build_engine=build_engine,
            load_tokenizer=tokenizer,
            open_recording=lambda info: open_recording(
                settings, info, name, telemetry, instance_id
            ),
            close_telemetry=telemetry.close,
            authenticator=authenticator,
            reloads={
                "access": lambda _: authenticator.reload(),
                "prices": lambda recording: reload_prices(settings, recording),
            },
            heads=heads,
            capture=open_capture(settings),
            experiments=experiments,
            watch=open_watch(settings, experiments),
        ),
        name,
    )


def open_access(settings: ServiceSettings) -> OpenAccess | ListedAccess:
    """Raises SetUpError when the access file or the extra for JWTs is missing or wrong."""
    if settings.access_file is None:
        return OpenAccess()
    subjects: SubjectFinder | None = None
    if settings.jwt_issuer is not None:
        try:
            from service.jwt import JwtSubjects
        except ImportError as error:
            raise SetUpError("jwt_issuer needs: pip install 'tandem[oidc]'") from error
        issuer = settings.jwt_issuer
        jwks_url = settings.jwt_jwks_url or f"{issuer.rstrip('/')}/.well-known/jwks.json"
        subjects = JwtSubjects(issuer, settings.jwt_audience, jwks_url)
    try:
        return ListedAccess(
            settings.access_file, health_is_open=settings.health_without_token, subjects=subjects
        )
    except (AccessFileError, OSError) as error:
        raise SetUpError(str(error)) from error


def open_capture(settings: ServiceSettings) -> PromptCapture | None:
    """None unless prompts shall be kept. Raises SetUpError."""
    if settings.capture_folder is None:
        return None
    folder = settings.capture_folder.expanduser()
    try:
        redaction = settings.capture_redaction
        redact = None if redaction is None else open_redaction(redaction)
        capture = PromptCapture(
            folder,
            share=settings.capture_share,
            retention_days=settings.capture_retention_days,
            redact=redact,
        )
    except (RedactionError, OSError) as error:
        raise SetUpError(str(error)) from error
    how = "without redaction" if redact is None else "redacted"
    _log.warning("%.3g of the prompts are kept in %s, %s", settings.capture_share, folder, how)
    return capture


def public_name(target: str) -> str:
    """What clients call a model: a folder's last part, anything else as it is."""
    return Path(target).name if os.path.sep in target and Path(target).is_dir() else target


def warm_up(engine: Engine) -> None:
    """Run one small request, so that the first client does not pay for lazy initialisation.

    Raises SetUpError with the reason: a server that cannot generate must not start.
    """
    try:
        _warm_up(engine)
    except SetUpError:
        raise
    except Exception as error:
        raise SetUpError(f"the warm-up request failed: {error}") from error


def _warm_up(engine: Engine) -> None:
    token_id = next(t for t in range(engine.info.vocab_size) if t not in engine.info.eos_token_ids)
    engine.submit(
        GenerationRequest(
            request_id="warm-up",
            prompt_token_ids=(token_id,) * _WARM_UP_TOKENS,
            sampling=SamplingParams(temperature=0),
            stopping=StoppingParams(max_tokens=_WARM_UP_TOKENS, ignore_eos=True),
            arrived_at=time.monotonic(),
        )
    )
    while engine.has_work():
        for stats in engine.step().finished:
            if stats.error is not None:
                raise SetUpError(f"the warm-up request failed: {stats.error}")
    while (finding := engine.audit_next()) is not None:
        if finding.verdict is AuditVerdict.DIVERGENCE:
            raise SetUpError("the warm-up request diverged from the target alone")
