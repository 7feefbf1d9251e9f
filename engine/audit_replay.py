"""Decodes a divergence again, with speculation and without, and audits what comes."""

from dataclasses import dataclass, replace

from engine.audit import AuditFinding, AuditJob
from engine.audit_case import AuditCase, AuditCaseError
from engine.engine import Engine
from engine.request import FinishReason, GenerationRequest, SpeculationMode


@dataclass(frozen=True, slots=True)
class AuditReplay:
    """recorded: the audit of the tokens as they were served. speculative and plain: the request
    decoded again, with its own speculation and with none, and the audit of each."""

    recorded: AuditFinding
    speculative_token_ids: tuple[int, ...]
    speculative: AuditFinding
    plain_token_ids: tuple[int, ...]
    plain: AuditFinding


def replay(engine: Engine, case: AuditCase) -> AuditReplay:
    """The engine must be idle. Raises AuditCaseError for a case of another model, and for a
    request that does not decode at all."""
    if case.fingerprint != engine.info.fingerprint:
        raise AuditCaseError(
            f"the case is of a model {case.fingerprint}, this one is {engine.info.fingerprint}"
        )
    job = case.job
    plain = replace(
        job.request,
        speculation=replace(job.request.speculation, mode=SpeculationMode.OFF, drafter=None),
    )
    speculative_token_ids = _decode(engine, job.request)
    plain_token_ids = _decode(engine, plain)
    return AuditReplay(
        recorded=engine.audit(job),
        speculative_token_ids=speculative_token_ids,
        speculative=engine.audit(replace(job, output_token_ids=speculative_token_ids)),
        plain_token_ids=plain_token_ids,
        plain=engine.audit(AuditJob(plain, plain_token_ids, job.guarded_token_ids)),
    )


def _decode(engine: Engine, request: GenerationRequest) -> tuple[int, ...]:
    """A tenant of its own: nothing that another request left in a cache may take part."""
    tenant = f"audit replay {id(request)}"
    stopping = replace(request.stopping, time_limit_seconds=None)
    engine.submit(replace(request, tenant=tenant, stopping=stopping))
    token_ids: list[int] = []
    while engine.has_work():
        for delta in engine.step().deltas:
            token_ids.extend(delta.token_ids)
            if delta.finish_reason is FinishReason.ERROR:
                raise AuditCaseError(f"the request failed when decoded again: {delta.error}")
    return tuple(token_ids)
