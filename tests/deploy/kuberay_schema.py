"""What of a RayService our manifest uses, as a JSON schema.

No Python package carries KubeRay's CRDs, so this one is written by hand after the types of KubeRay
1.6 (RayServiceSpec, RayClusterSpec and what they hold), as strict as the API server with
`--validate=strict`: a field that is not named here is refused, whether KubeRay has it or not. Pod
templates are Kubernetes' own published schema.
"""

from typing import Any

import kubernetes_validate
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

KUBERNETES_VERSION = "1.34.0"
_DEFINITIONS = f"kubernetes-json-schema/v{KUBERNETES_VERSION}-local-strict/_definitions.json"
_CORE = "https://kubernetes.io/api/_definitions.json#/$defs/io.k8s.api.core.v1."


def _closed(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}
_POD = {"$ref": f"{_CORE}PodTemplateSpec"}
_CREDENTIAL = _closed({"value": _TEXT, "valueFrom": {"$ref": f"{_CORE}EnvVarSource"}})

_GROUP = {"rayStartParams": _TEXTS, "template": _POD}
_HEAD = _closed({**_GROUP, "serviceType": _TEXT, "labels": _TEXTS}, *_GROUP)
_WORKERS = _closed(
    {
        **_GROUP,
        "groupName": _TEXT,
        "replicas": _COUNT,
        "minReplicas": _COUNT,
        "maxReplicas": _COUNT,
        "idleTimeoutSeconds": _COUNT,
        "labels": _TEXTS,
    },
    "groupName",
    "minReplicas",
    "maxReplicas",
    *_GROUP,
)

_CLUSTER = _closed(
    {
        "rayVersion": _TEXT,
        "authOptions": _closed({"mode": {"enum": ["disabled", "token"]}, "secretName": _TEXT}),
        "gcsFaultToleranceOptions": _closed(
            {
                "redisAddress": _TEXT,
                "redisUsername": _CREDENTIAL,
                "redisPassword": _CREDENTIAL,
                "externalStorageNamespace": _TEXT,
            },
            "redisAddress",
        ),
        "enableInTreeAutoscaling": {"type": "boolean"},
        "autoscalerOptions": _closed(
            {
                "version": {"enum": ["v1", "v2"]},
                "idleTimeoutSeconds": _COUNT,
                "upscalingMode": {"enum": ["Default", "Aggressive", "Conservative"]},
                "resources": {"$ref": f"{_CORE}ResourceRequirements"},
            }
        ),
        "headGroupSpec": _HEAD,
        "workerGroupSpecs": {"type": "array", "items": _WORKERS},
    },
    "headGroupSpec",
)

RAY_SERVICE = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    **_closed(
        {
            "apiVersion": {"const": "ray.io/v1"},
            "kind": {"const": "RayService"},
            "metadata": _closed({"name": _TEXT, "namespace": _TEXT, "labels": _TEXTS}, "name"),
            "spec": _closed(
                {
                    "serveConfigV2": _TEXT,
                    "rayClusterConfig": _CLUSTER,
                    "rayClusterDeletionDelaySeconds": _COUNT,
                },
                "serveConfigV2",
                "rayClusterConfig",
            ),
        },
        "apiVersion",
        "kind",
        "metadata",
        "spec",
    ),
}


def ray_service_validator() -> Draft202012Validator:
    definitions = kubernetes_validate.utils.schema_contents(_DEFINITIONS, KUBERNETES_VERSION)
    registry = Resource.from_contents(definitions) @ Registry()
    return Draft202012Validator(RAY_SERVICE, registry=registry)
