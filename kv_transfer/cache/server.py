"""The cache server's shell: sockets, tiers' threads and the clock around ``CacheBook``.

One thread owns everything that the book knows. It waits for packets, for results of the tiers'
threads and for the book's next deadline, and carries out what the book says. A client that says
what cannot be is cut off: its connection's end is the proof that it does not touch the arena.
"""

from __future__ import annotations

import itertools
import logging
import os
import selectors
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec

from splitserve.kv_transfer.cache import messages, packets
from splitserve.kv_transfer.cache import tier_workers as jobs
from splitserve.kv_transfer.cache.arena import Arena
from splitserve.kv_transfer.cache.book_effects import (
    AskTier,
    Effect,
    ListTier,
    ProbeTier,
    ReadChunk,
    RemoveChunks,
    Send,
    WriteChunk,
)
from splitserve.kv_transfer.cache.cache_book import CacheBook
from splitserve.kv_transfer.cache.control import Control
from splitserve.kv_transfer.cache.messages import (
    CloseChunks,
    Commit,
    FromClient,
    Hello,
    Lookup,
    Manage,
    OpenChunks,
    Reserve,
    Watch,
)
from splitserve.kv_transfer.cache.settings import tier_names
from splitserve.kv_transfer.cache.tier_book import TierBook

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.kv_transfer.cache.chunk_codec import ChunkCodec
    from splitserve.kv_transfer.cache.settings import CacheSettings, TierSettings
    from splitserve.kv_transfer.cache.tiers.base import Tier

logger = logging.getLogger(__name__)

CLIENT_LIMIT = 256
PACKETS_PER_TURN = 64
UNREAD_LIMIT_MESSAGES = 4_096
"""Messages kept for a client that does not read; one that reads even less is cut off."""
DISK_READERS, REMOTE_READERS = 2, 1
WRITING_SHARE = 2
"""One in so many bytes of the arena may wait to be written: tiers that hang do not get all."""


@dataclass(eq=False)
class Client:
    """One connection."""

    number: int
    connection: socket.socket
    receiver: packets.Receiver[Any]
    unsent: list[object] = field(default_factory=list)
    is_rejected: bool = False
    """It has said what cannot be, or does not read: what it says is ignored until it closes."""


class CacheServer:
    """The cache of one host. ``run`` returns when ``stop`` was called, from any thread."""

    def __init__(
        self,
        settings: CacheSettings,
        tiers: Sequence[Tier],
        codec: ChunkCodec,
    ) -> None:
        """Raises ``OSError`` when the arena or the socket cannot be had."""
        self._settings = settings
        self._wakeup, self._wake = jobs.waker()
        cpu = next((tier for tier in settings.tiers if tier.type == "cpu"), None)
        size = cpu.capacity_bytes if cpu is not None else settings.staging_bytes
        assert size is not None
        self.arena = Arena(size)
        for tier in tiers:
            tier.use_memory(self.arena.shared)
        self._write_limit_bytes = min(
            settings.write_queue_limit_bytes,
            size // (WRITING_SHARE * max(1, len(tiers))),
        )
        names = tier_names(tier.type for tier in settings.tiers)
        lower = [
            (name, tier)
            for name, tier in zip(names, settings.tiers, strict=True)
            if tier.type != "cpu"
        ]
        books = [
            self._tier_book(number, name, of_tier, tier)
            for number, ((name, of_tier), tier) in enumerate(zip(lower, tiers, strict=True), 1)
        ]
        self.book = CacheBook(settings, self.arena, books, uuid4().hex)
        self._control = Control(self.book, started=monotonic())
        self._codec = codec
        self._workers = {
            book.number: jobs.TierWorkers(
                book.number, tier, codec, wake=self._wake,
                readers=REMOTE_READERS if tier.capabilities.is_remote else DISK_READERS,
            )
            for book, tier in zip(books, tiers, strict=True)
        }  # fmt: skip
        now = monotonic()
        fills = [
            effect
            for book, tier in zip(books, tiers, strict=True)
            if book.index is not None
            for effect in book.filled(codec.stored(tier), now)
        ]
        self._clients: dict[int, Client] = {}
        self._arrivals = itertools.count(1)
        self._selector = selectors.DefaultSelector()
        self._listener = packets.listen(settings.socket_path)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wakeup, selectors.EVENT_READ, None)
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromClient)
        self._stopping = False
        self._arena_has_failed = False
        self._carry_out(fills)

    def _tier_book(self, number: int, name: str, settings: TierSettings, tier: Tier) -> TierBook:
        return TierBook(
            number,
            settings,
            name=name,
            is_exclusive=tier.capabilities.is_exclusive,
            write_limit_bytes=self._write_limit_bytes,
            quotas=lambda tenant: self.book.quota(name, tenant),
        )

    def run(self) -> None:
        """Serve until ``stop``; afterwards nothing of the server is left but what waited for lower
        tiers, which is there. Raises when a thread of it has died.
        """
        self.arena.start()
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._close()

    def stop(self) -> None:
        """Ask ``run`` to return."""
        self._stopping = True
        self._wake()

    # -- one turn ------------------------------------------------------------------------------

    def _turn(self) -> None:
        now = monotonic()
        deadline = min(self.book.next_deadline(now), self._control.next_deadline())
        wait_s = max(0.0, deadline - now)
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fd == self._wakeup:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wakeup)
            else:
                self._serve(key.data)
        for worker in self._workers.values():
            for result in worker.take_results():
                self._carry_out(self._take_up(worker.number, result, monotonic()))
        self._carry_out(self.book.tick(monotonic()))
        self._carry_out(self._control.tick(monotonic()))
        self._look_at_arena()

    def _look_at_arena(self) -> None:
        failure = self.arena.failure
        if failure is not None and not self._arena_has_failed:
            self._arena_has_failed = True
            logger.error(
                "only %d of the arena's %d bytes can be had: %s; lower the cpu tier's "
                "capacity_bytes", self.arena.touched_bytes, self.arena.size_bytes, failure,
            )  # fmt: skip

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            try:
                packets.check_user(connection)
                if len(self._clients) >= CLIENT_LIMIT:
                    raise PermissionError(f"{CLIENT_LIMIT} clients are connected already")
            except OSError as error:
                logger.warning("turned a client away: %s", error)
                connection.close()
                return
            # Never the number of an earlier one, which a tier's answer may still be meant for.
            number = next(self._arrivals)
            client = Client(number, connection, packets.Receiver(connection, self._decoder))
            self._clients[number] = client
            self._selector.register(connection, selectors.EVENT_READ, client)

    def _serve(self, client: Client) -> None:
        try:
            if client.unsent:
                self._flush(client)
            for message in client.receiver.messages(PACKETS_PER_TURN):
                if not client.is_rejected:
                    self._carry_out(self._handle(client, message, monotonic()))
        except packets.PeerGoneError as error:
            logger.debug("client %d: %s", client.number, error)
            self._drop(client)
        except (ValueError, msgspec.DecodeError) as error:
            self._reject(client, str(error))

    def _handle(self, client: Client, message: Any, now: float) -> list[Effect]:
        number, book = client.number, self.book
        match message:
            case Lookup():
                return book.lookup(number, message, now)
            case OpenChunks():
                return book.open(number, message, now)
            case CloseChunks():
                return book.close(number, message, now)
            case Reserve():
                return book.reserve(number, message, now)
            case Commit():
                return book.commit(number, message, now)
            case Hello():
                answer = book.hello(number, message)
                if answer.refusal:
                    logger.warning("an engine cannot use the cache: %s", answer.refusal)
                self._greet(client, answer)
                return []
            case Manage():
                return self._control.handle(number, message, now)
            case Watch():
                return book.watch(number)
        raise AssertionError(f"no such message: {message}")

    def _take_up(self, tier: int, result: jobs.Result, now: float) -> list[Effect]:
        book = self.book
        match result:
            case jobs.Asked():
                has_failed = result.found is None
                self._control.asked(result.ask_id, result.found, result.elapsed_s)
                return book.asked(
                    result.ask_id, result.present, result.elapsed_s, now, has_failed=has_failed
                )
            case jobs.WasRead():
                if result.was_broken:
                    book.was_broken(tier)
                return book.was_read(
                    tier, result.key, result.chunk, result.elapsed_s, now,
                    has_failed=result.has_failed, size_bytes=result.size_bytes,
                )  # fmt: skip
            case jobs.WasWritten():
                return book.was_written(
                    tier, result.key, result.outcome, now, result.size_bytes, result.trials
                )
            case jobs.Failed():
                if book.tier_failed(tier, result.reason, now):
                    name = book.tiers[tier - 1].name
                    logger.warning("the %s tier is left alone: %s", name, result.reason)
            case jobs.Probed():
                book.probed(tier, result.elapsed_s)
                logger.info("the %s tier answers again", book.tiers[tier - 1].name)
            case jobs.Cleared():
                return self._control.cleared(result.clear_id, result.chunks, result.is_complete)
        return []

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    client = self._clients.get(effect.client)
                    if client is not None:
                        self._send(client, effect.message)
                case AskTier():
                    self._workers[effect.tier].ask(effect.ask_id, effect.keys)
                case ReadChunk():
                    body = self._slot(effect.offset, self.book.chunk_bytes)
                    self._workers[effect.tier].read(jobs.ReadJob(effect.key, effect.offset, body))
                case WriteChunk():
                    body = self._slot(effect.chunk.offset, self.book.chunk_bytes)
                    self._workers[effect.tier].write(
                        jobs.WriteJob(
                            effect.key, effect.parent, effect.chunk, body, effect.codec,
                            effect.trials,
                        )
                    )  # fmt: skip
                case RemoveChunks():
                    self._workers[effect.tier].remove(effect.keys, effect.clear_id)
                    self.book.unmark(effect.keys)
                    self._carry_out(self.book.take_effects())
                case ProbeTier():
                    self._workers[effect.tier].probe()
                case ListTier():
                    self._workers[effect.tier].clear(effect.clear_id, effect.prefix)

    def _slot(self, offset: int, size_bytes: int) -> memoryview:
        return self.arena.memory.view[offset : offset + size_bytes]

    # -- clients -------------------------------------------------------------------------------

    def _greet(self, client: Client, answer: messages.Arena) -> None:
        try:
            packets.send(client.connection, answer, self.arena.descriptor)
        except packets.PeerGoneError as error:
            self._reject(client, str(error))

    def _send(self, client: Client, message: object) -> None:
        if client.is_rejected:
            return
        try:
            if client.unsent or not packets.send(client.connection, message):
                client.unsent.append(message)
                if len(client.unsent) > UNREAD_LIMIT_MESSAGES:
                    self._reject(client, "it does not read what it is told")
                    return
                events = selectors.EVENT_READ | selectors.EVENT_WRITE
                self._selector.modify(client.connection, events, client)
        except packets.PeerGoneError as error:
            self._reject(client, str(error))

    def _flush(self, client: Client) -> None:
        try:
            while client.unsent and packets.send(client.connection, client.unsent[0]):
                client.unsent.pop(0)
        except packets.PeerGoneError as error:
            self._reject(client, str(error))
        if not client.unsent:
            self._selector.modify(client.connection, selectors.EVENT_READ, client)

    def _reject(self, client: Client, reason: str) -> None:
        """The client is told to go; its slots stay its own until its end is read to have closed.
        That a call has failed proves nothing: the process may be in the middle of a copy.
        """
        if not client.is_rejected:
            logger.warning("client %d is cut off: %s", client.number, reason)
            client.is_rejected = True
            client.unsent.clear()
            self._selector.modify(client.connection, selectors.EVENT_READ, client)
            with suppress(OSError):  # It has closed its end already.
                client.connection.shutdown(socket.SHUT_WR)

    def _drop(self, client: Client) -> None:
        """The client has closed its end: it does not touch the arena."""
        if self._clients.pop(client.number, None) is None:
            return
        self._selector.unregister(client.connection)
        client.connection.close()
        self._carry_out(self._control.client_gone(client.number, monotonic()))
        self._carry_out(self.book.client_gone(client.number, monotonic()))

    def _close(self) -> None:
        for worker in self._workers.values():
            worker.stop()
        for client in list(self._clients.values()):
            self._selector.unregister(client.connection)
            client.connection.close()
        self._selector.close()
        self._listener.close()
        with suppress(FileNotFoundError):
            os.unlink(self._settings.socket_path)
        ended = [worker.join() for worker in self._workers.values()]
        if all(ended):
            # One that hangs may wake the server and write into its memory later.
            os.close(self._wakeup)
            self.arena.close()
