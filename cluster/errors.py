"""What can go wrong between the HTTP front and a replica.

ClusterError
├── ApiError               a request gets this answer, in OpenAI's error shape
├── SchedulerGoneError     the scheduler actor has not answered for too long
├── ReplicaLostError       a replica ended before its answer was complete
└── ChatTemplateError      the model's chat template can not serve documents
"""

from typing import Any

from cluster.messages import Refusal


class ClusterError(Exception):
    """Base of every error of this package."""


class ApiError(ClusterError):
    """An answer other than 200. `param` is the path of the field that is wrong, if one is."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": _ERROR_TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, round(self.retry_after_s)))}


_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}


def error_of(refusal: Refusal) -> ApiError:
    return ApiError(
        refusal.status,
        refusal.message,
        code=refusal.code,
        param=refusal.param,
        retry_after_s=refusal.retry_after_s,
    )


class SchedulerGoneError(ClusterError):
    """The scheduler actor has not answered for longer than the bound."""


class ReplicaLostError(ClusterError):
    """A replica ended, or its call did, before the answer was complete."""


class ChatTemplateError(ClusterError):
    """The model has no chat template, or it does not keep the last user message's text."""
