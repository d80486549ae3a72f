"""Sends probes to the router of a running cluster, and watches its clients meanwhile."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from splitserve.orchestrator.tuner.probing import Answer, BusyError, ProbeError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from splitserve.orchestrator.tuner.live_watch import LiveWatch

STATUS_TIMEOUT_S = 10.0
BUSY = 429
READ_LIMIT_BYTES = 2**24
"""Of one event; the first repeats its prompt."""
EVENT = b"data: {"


class ProbeClient:
    """The router as ``probing.Cluster``; use it as a context manager."""

    def __init__(
        self,
        url: str,
        token: str,
        watch: LiveWatch,
        *,
        answer_limit_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """``answer_limit_s``: a probe that takes longer ends the measuring. ``tls`` is how an
        ``https`` router is verified.
        """
        self._tls = tls
        self._url = url
        self._headers = {"Authorization": f"Bearer {token}"}
        self._watch = watch
        self._answer_limit_s = answer_limit_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ProbeClient:
        """Connections are opened as they are needed."""
        connector = aiohttp.TCPConnector(limit=0, ssl=self._tls if self._tls is not None else True)
        timeout = aiohttp.ClientTimeout(total=self._answer_limit_s)
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=connector,
            timeout=timeout,
            read_bufsize=READ_LIMIT_BYTES,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """All are closed, upon which the router ends what it still does for them."""
        if self._session is not None:
            await self._session.close()

    async def status(self) -> dict[str, Any]:
        """What the router says of itself. Raises ``ProbeError``."""
        assert self._session is not None
        limit = aiohttp.ClientTimeout(total=STATUS_TIMEOUT_S)
        try:
            async with self._session.get(f"{self._url}/internal/status", timeout=limit) as answer:
                answer.raise_for_status()
                found: dict[str, Any] = await answer.json()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ProbeError(f"the router on {self._url} does not answer: {error!r}") from error
        return found

    async def placed_legs(self) -> dict[str, int]:
        """How many legs each node has had. Raises ``ProbeError`` when clients suffer."""
        status = await self.status()
        problem = self._watch.look(status["timelines"])
        if problem:
            raise ProbeError(
                f"stopped: {problem}; nothing was written. Measure again when there is less to do"
            )
        return {name: node["placed_legs"] for name, node in status["nodes"].items()}

    async def ask(
        self,
        prompt: Sequence[int],
        tokens: int,
        *,
        decode: str,
        prefill: str = "",
        begun: Callable[[], None] | None = None,
    ) -> Answer:
        """One probe's times; ``begun`` is called when its first token is there. Raises
        ``BusyError`` or ``ProbeError``.
        """
        assert self._session is not None
        body = {
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "nodes": {"decode": decode, "prefill": prefill},
        }
        data = orjson.dumps(body)
        headers = {"Content-Type": "application/json"}
        clock = asyncio.get_running_loop().time
        where = f"{prefill} and {decode}" if prefill else decode
        sent = clock()
        moments: list[float] = []
        try:
            url = f"{self._url}/internal/probe"
            async with self._session.post(url, data=data, headers=headers) as answer:
                if answer.status != 200:
                    raise _refusal(answer.status, await answer.text(), where)
                async for line in answer.content:
                    if line.startswith(EVENT):
                        moments += [clock()] * _tokens_in(line, where)
                        if begun is not None and moments:
                            begun()
                            begun = None
        except (aiohttp.ClientError, OSError) as error:
            raise ProbeError(f"a probe of {where} broke off: {error!r}") from error
        except TimeoutError:
            raise ProbeError(
                f"a probe of {where} has no answer after {self._answer_limit_s:g} s"
            ) from None
        if len(moments) < tokens:
            raise ProbeError(f"{where} answered a probe with {len(moments)} of {tokens} tokens")
        return Answer(sent, tuple(moments))


def _refusal(status: int, text: str, where: str) -> Exception:
    try:
        message = str(orjson.loads(text)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = text[:300]
    if status == BUSY:
        return BusyError(message)
    return ProbeError(f"a probe of {where} was refused with status {status}: {message}")


def _tokens_in(line: bytes, where: str) -> int:
    """How many tokens an event brings."""
    event = orjson.loads(line.removeprefix(b"data: "))
    if "error" in event:
        raise ProbeError(f"a probe of {where} failed: {event['error'].get('message', event)}")
    return sum(len(choice.get("token_ids") or ()) for choice in event.get("choices", ()))
