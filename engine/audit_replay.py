"""Decodes a divergence again, with speculation and without, and audits what comes."""

from dataclasses import dataclass, replace

from engine.audit import AuditFinding, AuditJob
from engine.audit_case import AuditCase, AuditCaseError
from engine.audit_ending import Ending
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
        speculation=replace(
            job.request.speculation, mode=SpeculationMode.OFF, drafter=None, drafters=None
        ),
    )
    again = replace(_decode(engine, job.request), drafter=job.drafter)
    plainly = _decode(engine, plain)
    return AuditReplay(
        recorded=engine.audit(job),
        speculative_token_ids=again.output_token_ids,
        speculative=engine.audit(again),
        plain_token_ids=plainly.output_token_ids,
        plain=engine.audit(plainly),
    )


def _decode(engine: Engine, request: GenerationRequest) -> AuditJob:
    """As it is decoded now. A tenant of its own: nothing that another request left in a cache may
    take part."""
    tenant = f"audit replay {id(request)}"
    stopping = replace(request.stopping, time_limit_seconds=None)
    engine.submit(replace(request, tenant=tenant, stopping=stopping))
    token_ids: list[int] = []
    ending: Ending | None = None
    while engine.has_work():
        for delta in engine.step().deltas:
            token_ids.extend(delta.token_ids)
            if delta.finish_reason is not None:
                ending = Ending(delta.finish_reason, delta.stop_token_id, delta.stop_string)
            if delta.finish_reason is FinishReason.ERROR:
                raise AuditCaseError(f"the request failed when decoded again: {delta.error}")
    return AuditJob(request, tuple(token_ids), ending)
