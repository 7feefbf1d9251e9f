"""The dimensions of the sample ledger."""

from typing import Any

from exports.sample.costs import NANO_USD_PER_HOUR
from exports.sample.traffic import BEGIN, TENANT_SHARES
from telemetry.ledger.models import Drafter, Model, Price, Tenant, Variant

PROMPT_LOOKUP, HEAD = 1, 2

_MODELS = (
    ("smollm2-1.7b-instruct", 1_711_376_384),
    ("qwen2.5-coder-1.5b-instruct", 1_543_714_304),
)


def dimension_rows() -> dict[type[Any], list[dict[str, Any]]]:
    """Ledger table -> its rows."""
    seen = {"first_seen_at": BEGIN}
    return {
        Model: [
            {
                "model_key": key,
                "name": name,
                "fingerprint": f"sample-{key}",
                "dtype": "bfloat16",
                "device": "cpu",
                "num_parameters": num_parameters,
                "layout": "ragged",
                "numerics": "invariant",
                "guarantee": "bit_exact",
                **seen,
            }
            for key, (name, num_parameters) in enumerate(_MODELS, start=1)
        ],
        Drafter: [
            {"drafter_key": PROMPT_LOOKUP, "name": "prompt_lookup", "fingerprint": "", **seen},
            {"drafter_key": HEAD, "name": "head", "fingerprint": "sample-head", **seen},
        ],
        Variant: [
            {"variant_key": 1, "name": "default", **seen},
            {"variant_key": 2, "name": "candidate", **seen},
        ],
        Tenant: [
            {"tenant_key": key, "pseudonym": f"sample-{key:02}", "key_id": "sample", **seen}
            for key in range(1, len(TENANT_SHARES) + 1)
        ],
        Price: [
            {
                "price_key": 1,
                "book_version": "sample-1",
                "machine_type": "16 CPU cores",
                "purchase": "on_demand",
                "currency": "USD",
                "nano_usd_per_hour": NANO_USD_PER_HOUR,
                "embodied_nano_usd_per_hour": NANO_USD_PER_HOUR // 20,
                "valid_from": BEGIN,
                "valid_to": None,
            }
        ],
    }
