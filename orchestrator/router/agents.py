"""The agents' end of the router: one WebSocket per node, JSON frames, authenticated by the cluster
secret.

Frames to an agent go through a bounded outbox, so that a slow agent never holds the router; one
that lets its outbox fill is disconnected and comes back with a hello.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from time import monotonic
from typing import TYPE_CHECKING

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from splitserve.kv_transfer.prefix_marks import split_digests
from splitserve.kv_transfer.process_identity import boot_id
from splitserve.orchestrator.agent import messages as msg
from splitserve.orchestrator.agent.auth import is_agent_token
from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.engines.versions import own_version
from splitserve.orchestrator.router.engine_client import EngineAddress
from splitserve.orchestrator.router.errors import ApiError
from splitserve.orchestrator.router.transfer_facts import TransferBook

if TYPE_CHECKING:
    from splitserve.orchestrator.core import effects as ef
    from splitserve.orchestrator.router.core_driver import CoreDriver
    from splitserve.orchestrator.router.incidents import Incidents
    from splitserve.orchestrator.router.transfer_facts import RequestFacts

_log = logging.getLogger(__name__)

OUTBOX_LIMIT_FRAMES = 4096
FRAME_LIMIT_BYTES = 2**20
HEARTBEAT_S = 5.0
SEND_TIMEOUT_S = 5.0
CLOCK_SKEW_LIMIT_S = 2.0
"""Seconds by which a machine's clock may differ from the router's before it is told."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(msg.FromAgent).decode


class AgentConnection:
    """One agent's socket and what waits to be sent on it."""

    def __init__(self, socket: web.WebSocketResponse) -> None:
        self.description: msg.NodeDescription | None = None
        self._socket = socket
        self._outbox: asyncio.Queue[msg.ToAgent] = asyncio.Queue(OUTBOX_LIMIT_FRAMES)
        self._closing: asyncio.Task[bool] | None = None

    def send(self, frame: msg.ToAgent) -> None:
        """The frame is on its way, or the connection is being closed because too many are."""
        try:
            self._outbox.put_nowait(frame)
        except asyncio.QueueFull:
            self.close("too many frames wait")

    def close(self, reason: str) -> None:
        """The agent is told to come again."""
        if self._closing is None:
            close = self._socket.close(
                code=WSCloseCode.TRY_AGAIN_LATER, message=reason.encode()[:120]
            )
            self._closing = asyncio.get_running_loop().create_task(close)

    async def send_all(self) -> None:
        """Send what comes into the outbox; ends by cancellation or with the connection."""
        while True:
            frame = await self._outbox.get()
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await self._socket.send_str(_encode(frame).decode())
            except (ConnectionError, TimeoutError) as error:
                _log.warning("an agent does not take its frames: %r", error)
                self.close("frames are not taken")
                return


class AgentHub:
    """All agents; performs the core's orders to nodes."""

    def __init__(self, secret: bytes, incidents: Incidents, *, scheme: str = "http") -> None:
        """``scheme`` is what the router and its engines speak."""
        self._scheme = scheme
        self.driver: CoreDriver | None = None
        self.loading: dict[str, msg.LoadingProgress] = {}
        """What nodes that are not ready yet are doing, for people to read."""
        self.refused: dict[str, str] = {}
        """Why nodes were refused by what their agents said; the core refuses some itself."""
        self.last_death: dict[str, msg.EngineDied] = {}
        self.deaths: Counter[str] = Counter()
        """Of engines that nobody had asked to end, by node."""
        self._secret = secret
        self.transfers = TransferBook(boot_id())
        """What nodes have told of transfers."""
        self._incidents = incidents
        self._connections: dict[str, AgentConnection] = {}
        self._sockets: set[AgentConnection] = set()

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """One agent's connection from its hand-shake to its end."""
        if not is_agent_token(request.headers.get("Authorization"), self._secret):
            error = ApiError(401, "this is for agents that know the cluster secret")
            return web.Response(
                status=401, body=error.body(), headers={"Content-Type": "application/json"}
            )
        socket = web.WebSocketResponse(heartbeat=HEARTBEAT_S, max_msg_size=FRAME_LIMIT_BYTES)
        await socket.prepare(request)
        connection = AgentConnection(socket)
        self._sockets.add(connection)
        sender = asyncio.get_running_loop().create_task(connection.send_all())
        try:
            async for message in socket:
                if message.type is not WSMsgType.TEXT:
                    break
                try:
                    frame = _decode(message.data)
                except msgspec.DecodeError as error:
                    _log.warning("an agent sent a frame that cannot be read: %s", error)
                    break
                self._receive(connection, frame)
        finally:
            sender.cancel()
            self._sockets.discard(connection)
            self._lost(connection)
            if not socket.closed:
                connection.close("goodbye")
        return socket

    def facts_of(self, timeline: ef.Timeline) -> RequestFacts | None:
        """What nodes tell of the request's transfer, now or soon; None when nothing will come."""
        if timeline.decision != "split":
            return None
        connection = self._connections.get(timeline.decode_node)
        node = connection.description if connection is not None else None
        if node is None or not node.reports_transfers:
            return self.transfers.find(timeline.request_id)
        return self.transfers.of(timeline.request_id)

    def forget(self, node: str) -> None:
        """The node is no part of the cluster: nothing is told of it any more."""
        for told in (self.loading, self.refused, self.last_death, self.deaths):
            told.pop(node, None)

    def close(self) -> None:
        """Tell all agents to come again (to the router that follows)."""
        for connection in self._sockets:
            connection.close("the router is stopping")

    # Orders of the core

    def accept(self, order: ef.AcceptNode) -> None:
        assert self.driver is not None
        node = self.driver.core.membership.nodes[order.node]
        self._incidents.note("joined", order.node, f"takes part as a {node.role} node")
        self._send(
            order.node, msg.Welcome(router=self.driver.name, index=self.driver.core.peers.index)
        )

    def refuse(self, order: ef.RefuseNode) -> None:
        _log.error("node %s is refused: %s", order.node, order.reason)
        self._incidents.note("refused", order.node, order.reason)
        self._send(order.node, msg.RefuseNode(reason=order.reason))

    def fail_transfer(self, order: ef.FailTransfer) -> None:
        self._send(order.node, msg.FailTransfer(transfer_id=order.transfer_id, reason=order.reason))

    def retarget_transfer(self, order: ef.RetargetTransfer) -> None:
        self._send(
            order.node,
            msg.RetargetTransfer(
                transfer_id=order.transfer_id,
                attempt=order.attempt,
                peer_incarnation=order.prefill.incarnation,
                peer_addresses=order.prefill.control_addresses,
                reason=order.reason,
            ),
        )

    def drain(self, order: ef.DrainNode) -> None:
        self._send(order.node, msg.Drain(incarnation=order.incarnation, restarts=order.restarts))

    def dismiss(self, order: ef.DismissNode) -> None:
        self._send(order.node, msg.Dismiss(incarnation=order.incarnation, at_once=order.at_once))

    def set_role(self, order: ef.SetRole) -> None:
        self._send(order.node, msg.SetRole(role=order.role, epoch=order.epoch))

    def learn_role(self, order: ef.LearnRole) -> None:
        message = f"another router has made it a {order.role} node"
        _log.info("%s: %s", order.node, message)
        self._incidents.note("flipped", order.node, message)

    def tell_load(self, order: ef.TellLoad) -> None:
        self._send(order.node, msg.TellLoad(incarnation=order.incarnation, load=order.load))

    def announce_death(self, order: ef.AnnounceDeath) -> None:
        for name, connection in self._connections.items():
            if order.node in ("", name):
                connection.send(msg.PeerDied(incarnation=order.incarnation))

    def end_engine(self, order: ef.EndEngine) -> None:
        _log.error("the engine %s of %s is to end: %s", order.incarnation, order.node, order.reason)
        self._incidents.note("engine_ended", order.node, order.reason)
        self._send(order.node, msg.EndEngine(incarnation=order.incarnation, reason=order.reason))

    def _send(self, node: str, frame: msg.ToAgent) -> None:
        connection = self._connections.get(node)
        if connection is not None:
            connection.send(frame)

    # Facts from agents

    def _receive(self, connection: AgentConnection, frame: msg.FromAgent) -> None:
        assert self.driver is not None
        match frame:
            case msg.AgentHello(description=description, role=role):
                self._compare_clocks(frame)
                problem = self._version_problem(description) or self._address_problem(description)
                if problem:
                    self._refuse_hello(connection, description, problem)
                    return
                self.refused.pop(description.node, None)
                older = self._connections.get(description.node)
                if older is not None and older is not connection:
                    older.description = None
                    older.close("another connection speaks for this node")
                connection.description = description
                self._connections[description.node] = connection
                self.loading.pop(description.node, None)
                self.driver.tell(ev.NodeJoined(description, role, frame.role_epoch))
            case msg.NodeState():
                self.driver.tell(ev.NodeReported(frame))
            case msg.OtherRouters():
                self.driver.tell(ev.OtherRoutersReported(frame))
            case msg.NodePrefixes():
                self.driver.tell(_prefixes_reported(frame))
            case msg.NodeTransfers():
                self.transfers.take(frame, monotonic())
            case msg.LoadingProgress(node=node):
                self.loading[node] = frame
            case msg.EngineDied(node=node, incarnation=incarnation, likely_cause=cause):
                level = logging.INFO if frame.was_ordered else logging.ERROR
                _log.log(level, "the engine of %s died: %s", node, cause)
                self.last_death[node] = frame
                self.deaths[node] += not frame.was_ordered
                self._incidents.note("left" if frame.was_ordered else "died", node, cause)
                self.driver.tell(ev.NodeDied(node, incarnation, cause, frame.owed_nothing))

    def _refuse_hello(
        self, connection: AgentConnection, description: msg.NodeDescription, problem: str
    ) -> None:
        """The node takes no part; what it says next is of one that nobody knows."""
        if self.refused.get(description.node) != problem:
            _log.error("node %s is refused: %s", description.node, problem)
            self._incidents.note("refused", description.node, problem)
        self.refused[description.node] = problem
        self.loading.pop(description.node, None)
        connection.send(msg.RefuseNode(reason=problem))

    def _compare_clocks(self, hello: msg.AgentHello) -> None:
        """Times of two machines are compared in logs, by the cache's stores and in certificates."""
        ahead_s = hello.unix_s - time.time()
        if not hello.unix_s or abs(ahead_s) <= CLOCK_SKEW_LIMIT_S:
            return
        node = hello.description
        what = (
            f"the clock of {node.host} is {abs(ahead_s):.1f} s "
            f"{'ahead of' if ahead_s > 0 else 'behind'} the router's; run NTP (chrony) on both"
        )
        _log.warning("%s: %s", node.node, what)
        self._incidents.note("clock_skew", node.node, what)

    def _version_problem(self, description: msg.NodeDescription) -> str:
        """Why the two would not understand each other."""
        ours = own_version()
        if not description.version or description.version == ours:
            return ""
        return (
            f"{description.host} has splitserve {description.version}, the router has {ours}; "
            f"install {ours} there and start the node again"
        )

    def _address_problem(self, description: msg.NodeDescription) -> str:
        """Why the router could not use the engine's address."""
        try:
            address = EngineAddress.of(description.engine_url)
        except ValueError as error:
            return str(error)
        if address.is_tls != (self._scheme == "https"):
            return (
                f"its engine on {description.host} serves {description.engine_url}, but the router "
                f"speaks {self._scheme}; give both the same security.tls and start the node again"
            )
        return ""

    def _lost(self, connection: AgentConnection) -> None:
        description = connection.description
        if description is None or self._connections.get(description.node) is not connection:
            return
        assert self.driver is not None
        del self._connections[description.node]
        self._incidents.note("disconnected", description.node, "the connection to its agent ended")
        self.driver.tell(ev.NodeDisconnected(description.node, description.incarnation))


def _prefixes_reported(frame: msg.NodePrefixes) -> ev.NodePrefixesReported:
    return ev.NodePrefixesReported(
        frame.node,
        frame.incarnation,
        frame.is_first,
        tuple(zip(split_digests(frame.added), frame.tokens, strict=True)),
        tuple(split_digests(frame.removed)),
    )
