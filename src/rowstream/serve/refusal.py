"""What a client is told when a request fails: one shape for every error, and no inside of it.

Logs what is hidden, counts every refusal and tells `Health` of failed reads.
"""

from __future__ import annotations

import logging
import uuid

from rowstream.errors import ReadError, UnavailableError
from rowstream.runtime.engine import EngineClosedError, QueueFullError
from rowstream.serve.checks import RequestError
from rowstream.serve.health import Health
from rowstream.serve.metrics import Metrics

logger = logging.getLogger("rowstream.serve")


class Refusals:
    """Turn exceptions into the errors that clients see."""

    def __init__(self, metrics: Metrics, health: Health) -> None:
        self._metrics = metrics
        self._health = health

    def of(self, error: Exception) -> RequestError:
        """Return the answer to an exception, which counts from now on."""
        if isinstance(error, ReadError):
            self._health.read_failed()
        refusal = _refusal(error)
        self._metrics.error(refusal.code or refusal.kind)
        return refusal


def _refusal(error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, QueueFullError):
        return RequestError(
            str(error),
            code="queue_full",
            status=429,
            kind="rate_limit_error",
            headers={"retry-after": "1"},
        )
    if isinstance(error, EngineClosedError):
        return RequestError(
            "the server is shutting down",
            code="shutting_down",
            status=503,
            kind="server_error",
            headers={"retry-after": "1"},
        )
    # the cause stays in the log: a message can hold paths of the machine
    error_id = f"err-{uuid.uuid4().hex[:12]}"
    if isinstance(error, ReadError):
        # the message says it all, and a failing disk makes many
        logger.error("%s: %s", error_id, error)
        code, status, failed = "read_error", 500, "to read its table"
    else:
        logger.error("%s: %s", error_id, error, exc_info=error)
        unavailable = isinstance(error, UnavailableError)
        code, status = ("unavailable", 503) if unavailable else ("internal_error", 500)
        failed = "to answer"
    return RequestError(
        f"the server failed {failed}, error id {error_id}",
        code=code,
        status=status,
        kind="server_error",
    )
