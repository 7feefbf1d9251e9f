"""What custom resources look like whose schemas no package index has.

Written from the published API references, closed: a field that the API does not know is an error.

- GRPCRoute: gateway.networking.k8s.io/v1, without filters, which no manifest here uses
- SecretProviderClass: secrets-store.csi.x-k8s.io/v1
- LeaderWorkerSet: leaderworkerset.x-k8s.io/v1; its pod templates are Kubernetes' own
"""

from typing import Any

_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
_HOST = {
    "type": "string",
    "maxLength": 253,
    "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
}
_GROUP = {"type": "string", "maxLength": 253}
_NAME = {"type": "string", "minLength": 1, "maxLength": 253}


def _closed(required: list[str], /, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _list(items: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


def _resource(api_version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return _closed(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": api_version},
        kind={"const": kind},
        metadata={"type": "object", "required": ["name"]},
        spec=spec,
    )


_REFERENCE = {"group": _GROUP, "kind": _NAME, "namespace": _NAME, "name": _NAME, "port": _PORT}
_METHOD = _closed(
    [],
    type={"enum": ["Exact", "RegularExpression"]},
    service={"type": "string", "maxLength": 1024, "pattern": r"^[A-Za-z_][A-Za-z_0-9.]*$"},
    method={"type": "string", "maxLength": 1024, "pattern": r"^[A-Za-z_][A-Za-z_0-9]*$"},
) | {"minProperties": 1}  # fmt: skip
_HEADER = _closed(
    ["name", "value"],
    type={"enum": ["Exact", "RegularExpression"]},
    name={"type": "string", "minLength": 1, "maxLength": 256},
    value={"type": "string", "minLength": 1, "maxLength": 4096},
)
_ROUTE = _closed(
    [],
    parentRefs={
        "type": "array",
        "maxItems": 32,
        "items": _closed(["name"], **_REFERENCE, sectionName=_NAME),
    },
    hostnames=_list(_HOST, 16),
    rules=_list(
        _closed(
            [],
            name=_NAME,
            matches=_list(_closed([], method=_METHOD, headers=_list(_HEADER, 16)), 64),
            backendRefs=_list(
                _closed(["name", "port"], **_REFERENCE, weight={"type": "integer", "minimum": 0}),
                16,
            ),
        ),
        16,
    ),
)
_PROVIDER = _closed(
    ["provider"],
    provider={"type": "string"},
    parameters=_TEXTS,
    secretObjects={
        "type": "array",
        "items": _closed(
            ["secretName", "type", "data"],
            secretName=_NAME,
            type={"type": "string"},
            labels=_TEXTS,
            annotations=_TEXTS,
            data={
                "type": "array",
                "items": _closed(
                    ["objectName", "key"], objectName={"type": "string"}, key={"type": "string"}
                ),
            },
        ),
    },
)
_COUNT_OR_SHARE = {
    "oneOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": r"^\d+%$"}]
}
_GROUPS = _closed(
    ["leaderWorkerTemplate"],
    replicas={"type": "integer", "minimum": 0},
    startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
    networkConfig=_closed([], subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
    rolloutStrategy=_closed(
        ["type"],
        type={"const": "RollingUpdate"},
        rollingUpdateConfiguration=_closed(
            [],
            partition={"type": "integer", "minimum": 0},
            maxSurge=_COUNT_OR_SHARE,
            maxUnavailable=_COUNT_OR_SHARE,
        ),
    ),
    leaderWorkerTemplate=_closed(
        ["workerTemplate"],
        size={"type": "integer", "minimum": 1},
        restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
        leaderTemplate={"type": "object", "required": ["spec"]},
        workerTemplate={"type": "object", "required": ["spec"]},
    ),
)
SCHEMAS = {
    "LeaderWorkerSet": _resource("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", _GROUPS),
    "GRPCRoute": _resource("gateway.networking.k8s.io/v1", "GRPCRoute", _ROUTE),
    "SecretProviderClass": _resource(
        "secrets-store.csi.x-k8s.io/v1", "SecretProviderClass", _PROVIDER
    ),
}
