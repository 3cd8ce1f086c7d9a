"""From pydantic's list of errors to one answer that names the field."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

from cluster.api_types import UNION_TAGS
from cluster.errors import ApiError


def validation_error(errors: Sequence[dict[str, Any]]) -> ApiError:
    """The 400 for a body that does not fit. The first error is told, and how many more there are.

    errors: as pydantic lists them, with "body" first in each location.
    """
    error = errors[0]
    kind = error["type"]
    if kind == "json_invalid":
        reason = error.get("ctx", {}).get("error", "it can not be parsed")
        return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")
    path = [str(part) for part in error["loc"][1:] if part not in UNION_TAGS]
    param = ".".join(path) or None
    if param is None:
        message = "send a JSON object as the body, with Content-Type: application/json"
    elif kind == "extra_forbidden":
        message = f"unknown field: {param}"
    elif kind == "missing":
        message = f"missing field: {param}"
    else:
        message = f"{param}: {error['msg'].removeprefix('Value error, ')}"
    if len(errors) > 1:
        message += f" (and {len(errors) - 1} more errors)"
    return ApiError(400, message, code=kind, param=param)


def slo_header(value: str) -> float:
    """The milliseconds of `x-slo-ttft-ms`."""
    try:
        ttft_ms = float(value)
    except ValueError:
        ttft_ms = 0.0
    if not isfinite(ttft_ms) or ttft_ms <= 0:
        raise ApiError(
            400,
            f"header x-slo-ttft-ms must be a number of milliseconds more than 0, got {value!r}",
            code="invalid_header",
            param="x-slo-ttft-ms",
        )
    return ttft_ms
