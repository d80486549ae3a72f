"""Errors as an OpenAI client expects them.

ApiError    an answer that the router gives itself: HTTP status, and the JSON body or SSE event with
vLLM's fields
"""

from __future__ import annotations

import orjson

from splitserve.orchestrator.router.endpoints import MESSAGES, RESPONSES

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    431: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}


class ApiError(Exception):
    """The request ends with this status and message; ``param`` names the field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
        allow: str = "",
        kind: str = "",
    ) -> None:
        """``allow`` names the methods that a path takes, with a 405; ``kind`` is the error's type
        where it does not follow from the status.
        """
        super().__init__(message)
        self.kind = kind or _TYPES.get(status, "InternalServerError")
        self.status = status
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.allow = allow
        self.endpoint = ""
        """Whose clients are told, when it is known: they expect it in their form."""

    def body(self) -> bytes:
        """The JSON body."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.status,
        }
        if self.endpoint == MESSAGES:
            return orjson.dumps({"type": "error", "error": error})
        return orjson.dumps({"error": error})

    def headers(self, request_id: str) -> list[tuple[bytes, bytes]]:
        """The headers that go with the body."""
        headers = [(b"content-type", b"application/json")]
        if request_id:
            headers.append((b"x-request-id", request_id.encode()))
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % self.retry_after_s))
        if self.allow:
            headers.append((b"allow", self.allow.encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers

    def event(self) -> bytes:
        """The same as a server-sent event."""
        if self.endpoint == MESSAGES:
            return b"event: error\ndata: " + self.body() + b"\n\n"
        if self.endpoint == RESPONSES:
            # Clients of OpenAI's read `error`, the documentation has the rest
            told = {"type": "error", "code": str(self.status), "message": self.message}
            data = orjson.dumps(told)[:-1] + b"," + self.body()[1:]
            return b"event: error\ndata: " + data + b"\n\n"
        return b"data: " + self.body() + b"\n\n"
