"""`tandem generate`: one generation in the terminal."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console

from service.cli_serve import read_settings
from service.client import Client, Credentials, GenerationResult
from service.client_calls import TandemError, build_request
from service.pb import generation_pb2 as pb

_PROBE_SECONDS = 0.5
_LOAD_SECONDS = 600.0


def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer, or to go on with (--raw).")],
    address: Annotated[
        str | None,
        typer.Option(
            help="Server to ask.",
            show_default="the local one, or a private one for this call",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=0)] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option(min=0)] = None,
    speculation: Annotated[
        bool | None, typer.Option(help="Draft always or never; the output is the same.")
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="Who may draft; several times: in this order. Default: the server's."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template.")] = False,
    target: Annotated[str | None, typer.Option(help="Model of a private server.")] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model of a private server.")] = None,
    token: Annotated[
        str, typer.Option(envvar="TANDEM_TOKEN", help="Bearer token of the server.")
    ] = "",
) -> None:
    """Generate, stream the text, and show what speculation did.

    The text goes to standard output, the figures to standard error.
    """
    try:
        with _connected(address, target, draft, token) as client:
            model = client.wait_until_ready(_LOAD_SECONDS)
            is_chat = model.has_chat_template and not raw
            request = build_request(
                [{"role": "user", "content": prompt}] if is_chat else prompt,
                max_tokens=max_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                speculation=speculation,
                drafters=drafter or (),
            )
            _show(client, request, model)
    except TandemError as error:
        typer.secho(f"\nerror: {error}", err=True, fg="red")
        raise typer.Exit(1) from error


@contextmanager
def _connected(
    address: str | None, target: str | None, draft: str | None, token: str
) -> Iterator[Client]:
    given = {name: value for name, value in (("target", target), ("draft", draft)) if value}
    settings = read_settings(given)
    credentials = Credentials(token=token)
    if address is None and not given and _is_listening(settings.address, credentials):
        address = settings.address
    if address is not None:
        with Client(address, credentials=credentials) as client:
            yield client
        return
    from service.assembly import SetUpError
    from service.private_server import private_server

    private = settings.model_copy(update={"host": "127.0.0.1", "port": 0, "log_level": "ERROR"})
    try:
        with private_server(private) as private_address, Client(private_address) as client:
            yield client
    except SetUpError as error:
        typer.secho(f"error: {error}", err=True, fg="red")
        raise typer.Exit(1) from error


def _is_listening(address: str, credentials: Credentials) -> bool:
    with Client(address, credentials=credentials) as client:
        return client.is_reachable(_PROBE_SECONDS)


def _show(client: Client, request: pb.GenerateRequest, model: pb.GetModelResponse) -> None:
    stream = client.generate(request)
    previous = signal.signal(signal.SIGINT, lambda *_: stream.cancel())
    began_at = time.monotonic()
    try:
        for text in stream:
            sys.stdout.write(text)
            sys.stdout.flush()
    finally:
        signal.signal(signal.SIGINT, previous)
    sys.stdout.write(os.linesep)
    wall_seconds = time.monotonic() - began_at
    _show_figures(stream.result(), model, wall_seconds, is_sampled=request.sampling.temperature > 0)


def _show_figures(
    result: GenerationResult,
    model: pb.GetModelResponse,
    wall_seconds: float,
    *,
    is_sampled: bool,
) -> None:
    outcome = result.outcome
    if outcome is None:
        return
    timing, speculation = outcome.timing, outcome.speculation
    parts = [
        f"{outcome.num_output_tokens} tokens ({result.finish_reason})",
        f"{outcome.num_output_tokens / wall_seconds:.1f} tokens/s",
    ]
    if timing.HasField("time_to_first_token"):
        parts.append(f"TTFT {timing.time_to_first_token.ToMilliseconds()} ms")
    if timing.HasField("time_per_output_token"):
        parts.append(f"TPOT {timing.time_per_output_token.ToNanoseconds() / 1e6:.1f} ms")
    if speculation.num_draft_tokens:
        rate = speculation.num_accepted_tokens / speculation.num_draft_tokens
        length = 1 + speculation.num_accepted_tokens / speculation.num_verify_steps
        parts.append(f"acceptance {rate:.0%}, length {length:.2f} ({speculation.drafter})")
    else:
        parts.append("nothing drafted")
    if outcome.cost.HasField("nano_usd"):
        parts.append(f"{outcome.cost.nano_usd / 1e9:.7f} USD")
    guarantee = pb.Guarantee.Name(model.guarantee).removeprefix("GUARANTEE_").lower()
    is_quantized = model.quantization not in ("", "none")  # empty: an older server
    weights = [f"{model.quantization} weights"] if is_quantized else []
    parts.append(", ".join([model.name, model.dtype, *weights, guarantee]))
    if is_sampled:
        parts.append(f"seed {result.seed}")
    Console(stderr=True).print(" | ".join(parts), style="dim", soft_wrap=True)
