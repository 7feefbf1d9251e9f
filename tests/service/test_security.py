"""Who may call, and who is told nothing."""

import hashlib
import logging
import time
from pathlib import Path
from typing import Any

import grpc
import jwt
import pytest
import trustme
from cryptography.hazmat.primitives.asymmetric import ec
from google.rpc import error_details_pb2
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from service.async_client import AsyncClient
from service.client_calls import Credentials, TandemError
from service.jwt import JwtSubjects
from service.pb import generation_pb2 as pb
from service.pb import generation_pb2_grpc as pb_grpc
from service.security import AccessFileError, ListedAccess, read_access_file
from tests.fakes import FakeEngine
from tests.service.serving import MODEL_NAME, running_server
from tests.service.test_generate import text_request, wait_until
from tests.service.test_status_table import detail, failure_of

TOKEN = "correct horse battery staple"


def access_file(folder: Path, extra: str = "") -> Path:
    path = folder / "access.toml"
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    path.write_text(f'[tenants.acme]\ntoken_sha256 = ["{digest}"]\n{extra}')
    return path


def listed(path: Path, **options: Any) -> ListedAccess:
    return ListedAccess(path, **{"health_is_open": False, **options})


async def code_of(call: Any) -> grpc.StatusCode:
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def every_call(channel: aio.Channel, metadata: Any) -> dict[str, Any]:
    stub: Any = pb_grpc.GenerationServiceStub(channel)
    calls = {
        "Generate": stub.Generate(text_request(), metadata=metadata),
        "GenerateUnary": stub.GenerateUnary(
            pb.GenerateUnaryRequest(request=text_request()), metadata=metadata
        ),
        "Tokenize": stub.Tokenize(pb.TokenizeRequest(text="x"), metadata=metadata),
        "Detokenize": stub.Detokenize(pb.DetokenizeRequest(token_ids=[5]), metadata=metadata),
        "GetModel": stub.GetModel(pb.GetModelRequest(), metadata=metadata),
        "GetLoad": stub.GetLoad(pb.GetLoadRequest(), metadata=metadata),
        "Check": health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), metadata=metadata
        ),
        "Watch": health_pb2_grpc.HealthStub(channel)
        .Watch(health_pb2.HealthCheckRequest(), metadata=metadata)
        .read(),
        "Reflection": reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), metadata=metadata
        ),
    }
    methods = pb.DESCRIPTOR.services_by_name["GenerationService"].methods_by_name
    assert calls.keys() >= set(methods)
    return calls


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x", TOKEN[:-1]])
async def test_no_method_answers_without_the_right_token(tmp_path: Path, token: str | None) -> None:
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    async with running_server(
        authenticator=listed(access_file(tmp_path)), reflection=True
    ) as running:
        for name, call in every_call(running.channel, metadata).items():
            assert await code_of(call) is grpc.StatusCode.UNAUTHENTICATED, name


async def test_every_method_answers_with_the_right_token(tmp_path: Path) -> None:
    metadata = (("authorization", f"Bearer {TOKEN}"),)
    async with running_server(
        authenticator=listed(access_file(tmp_path)), reflection=True
    ) as running:
        for name, call in every_call(running.channel, metadata).items():
            assert await code_of(call) is grpc.StatusCode.OK, name


async def test_health_is_open_to_probes_only_when_asked(tmp_path: Path) -> None:
    access = listed(access_file(tmp_path), health_is_open=True)
    async with running_server(authenticator=access) as running:
        stub = health_pb2_grpc.HealthStub(running.channel)
        assert await code_of(stub.Check(health_pb2.HealthCheckRequest())) is grpc.StatusCode.OK
        assert (
            await code_of(running.stub.GetLoad(pb.GetLoadRequest()))
            is grpc.StatusCode.UNAUTHENTICATED
        )


async def test_tenants_use_only_their_models(tmp_path: Path) -> None:
    metadata = (("authorization", f"Bearer {TOKEN}"),)
    access = listed(access_file(tmp_path, 'models = ["another"]\n'))
    async with running_server(authenticator=access) as running:
        for request in (text_request(), text_request(model=MODEL_NAME)):
            error = await failure_of(running.stub.Generate(request, metadata=metadata))
            assert error.code() is grpc.StatusCode.PERMISSION_DENIED
            assert detail(error, error_details_pb2.ErrorInfo).reason == "NOT_ALLOWED"
        error = await failure_of(running.stub.Generate(text_request()))
        assert detail(error, error_details_pb2.ErrorInfo).reason == "CREDENTIALS_REQUIRED"
        model = running.stub.GetModel(pb.GetModelRequest(), metadata=metadata)
        assert await code_of(model) is grpc.StatusCode.PERMISSION_DENIED


async def test_tenants_keep_to_their_quota_and_get_unused_tokens_back(tmp_path: Path) -> None:
    extra = "tokens_per_second = 0.001\nburst_tokens = 40\nmax_live_requests = 1\n"
    metadata = (("authorization", f"Bearer {TOKEN}"),)
    engine = FakeEngine()
    async with running_server(
        engine, authenticator=listed(access_file(tmp_path, extra))
    ) as running:
        request = pb.GenerateRequest()
        request.tokens.ids.extend([5] * 10)
        request.stopping.max_tokens = 25
        engine.may_run.clear()  # so that the first one uses no more than a step's tokens
        first = running.stub.Generate(request, metadata=metadata)
        await first.read()
        second = await failure_of(running.stub.Generate(request, metadata=metadata))
        assert second.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # one at a time
        [violation] = detail(second, error_details_pb2.QuotaFailure).violations
        assert violation.subject == "tenant"
        assert detail(second, error_details_pb2.RetryInfo).retry_delay.ToNanoseconds() > 0
        first.cancel()
        await wait_until(lambda: running.server._engine._inbox)
        engine.may_run.set()
        await wait_until(lambda: running.server.num_live_requests == 0)
        request.stopping.max_tokens = 10
        third = running.stub.Generate(request, metadata=metadata)
        assert await code_of(third) is grpc.StatusCode.OK  # the first one's tokens came back
        fourth = running.stub.Generate(request, metadata=metadata)
        assert await code_of(fourth) is grpc.StatusCode.RESOURCE_EXHAUSTED  # but not these


async def test_reload_takes_over_new_tokens_and_survives_a_broken_file(tmp_path: Path) -> None:
    path = access_file(tmp_path)
    access = listed(path)
    metadata = {"authorization": f"Bearer {TOKEN}"}
    assert (await access.authenticate("m", metadata, ())).tenant == "acme"
    path.write_text("[tenants.acme]\ntoken_sha256 = ['zz']\n")
    with pytest.raises(AccessFileError, match=r"tenants\.acme\.token_sha256"):
        access.reload()
    assert (await access.authenticate("m", metadata, ())).tenant == "acme"
    path.write_text(path.read_text().replace("zz", "00" * 32))
    access.reload()
    with pytest.raises(Exception, match="valid bearer token"):
        await access.authenticate("m", metadata, ())


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "at least one"),
        ("[tenants.a]\nrate = 1\n", "tenants.a: unknown keys"),
        ("[tenants.a]\ntokens_per_second = 0\nburst_tokens = 1\n", "tenants.a: tokens_per"),
        ("[tenants.a]\ncertificates=['x']\n[tenants.b]\ncertificates=['x']\n", "another tenant"),
    ],
)
def test_wrong_access_files_are_refused_by_name(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "access.toml"
    path.write_text(text)
    with pytest.raises(AccessFileError, match=where):
        read_access_file(path)


async def test_tokens_and_prompts_never_reach_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with running_server(authenticator=listed(access_file(tmp_path))) as running:
        for token in (TOKEN, "a wrong secret"):
            metadata = (("authorization", f"Bearer {token}"),)
            await code_of(running.stub.Generate(text_request("private words"), metadata=metadata))
    for secret in (TOKEN, "a wrong secret", "private words"):
        assert secret not in caplog.text


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


def _certificate(
    authority: trustme.CA, folder: Path, *names: str, **options: Any
) -> dict[str, Any]:
    issued = authority.issue_cert(*names, **options)
    certificate, key = folder / "server.pem", folder / "server.key"
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    return {"tls_certificate": certificate, "tls_key": key}


def _credentials(authority: trustme.CA, **options: Any) -> Credentials:
    return Credentials(root_certificates=authority.cert_pem.bytes(), **options)


async def _generate_over_tls(port: int, credentials: Credentials) -> str:
    async with AsyncClient(f"localhost:{port}", credentials=credentials) as client:
        stream = client.generate(text_request(), timeout_seconds=5)
        return (await stream.result()).text


async def test_tls_serves_who_trusts_the_certificate_and_takes_over_a_renewed_one(
    tmp_path: Path, authority: trustme.CA
) -> None:
    files = _certificate(authority, tmp_path, "localhost")
    async with running_server(**files) as running:
        port = running.server.port
        assert await _generate_over_tls(port, _credentials(authority))
        renewed = trustme.CA()
        with pytest.raises(TandemError):
            await _generate_over_tls(port, _credentials(renewed))
        _certificate(renewed, tmp_path, "localhost")
        assert await _generate_over_tls(port, _credentials(renewed))


async def test_mutual_tls_refuses_strangers_and_knows_tenants_by_certificate(
    tmp_path: Path, authority: trustme.CA
) -> None:
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca)
    files = _certificate(authority, tmp_path, "localhost")
    access = listed(access_file(tmp_path, 'certificates = ["backend.acme"]\n'))
    known = authority.issue_cert("backend.acme")
    unknown = authority.issue_cert("backend.other")

    def with_certificate(issued: trustme.LeafCert) -> Credentials:
        return _credentials(
            authority,
            certificate=issued.cert_chain_pems[0].bytes(),
            key=issued.private_key_pem.bytes(),
        )

    async with running_server(authenticator=access, tls_client_ca=ca, **files) as running:
        port = running.server.port
        assert await _generate_over_tls(port, with_certificate(known))
        with pytest.raises(TandemError) as stranger:
            await _generate_over_tls(port, with_certificate(unknown))
        with pytest.raises(TandemError) as nobody:
            await _generate_over_tls(port, _credentials(authority))
    assert stranger.value.code is grpc.StatusCode.UNAUTHENTICATED
    assert nobody.value.code in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )


async def test_jwts_of_the_issuer_are_taken_and_all_others_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, other_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    subjects = JwtSubjects("https://issuer", "tandem", "https://issuer/keys")
    jwk = jwt.PyJWK(
        {**jwt.algorithms.ECAlgorithm.to_jwk(key.public_key(), as_dict=True), "kid": "1"}
    )
    monkeypatch.setattr(subjects._keys, "get_signing_key_from_jwt", lambda token: jwk)
    good = {
        "iss": "https://issuer",
        "aud": "tandem",
        "sub": "robot",
        "exp": int(time.time()) + 60,
    }

    def signed(signing_key: Any = key, algorithm: str = "ES256", **changes: Any) -> str:
        claims = {k: v for k, v in {**good, **changes}.items() if v is not None}
        return jwt.encode(claims, signing_key, algorithm=algorithm)

    access = listed(access_file(tmp_path, 'jwt_subjects = ["robot"]\n'), subjects=subjects)

    async def tenant_of(token: str) -> str | None:
        try:
            metadata = {"authorization": f"Bearer {token}"}
            return (await access.authenticate("m", metadata, ())).tenant
        except Exception:
            return None

    assert await tenant_of(signed()) == "acme"
    for wrong in (
        signed(exp=int(time.time()) - 60),
        signed(exp=None),
        signed(aud="another"),
        signed(iss="https://another"),
        signed(sub="stranger"),
        signed(other_key),
        signed("public text" * 4, "HS256"),
        signed(None, "none"),
        "a.b.c",
    ):
        assert await tenant_of(wrong) is None, wrong
