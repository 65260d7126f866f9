"""Pages from other servers: what memory and disk lack of a prompt is asked of peers by its keys.

The pages that come wait in a tier of their own, from where a prompt takes them as it takes those of
the disk. A request waits for them at most as long as its prompt is expected to take here. So peers
decide when a prompt is there, and never what it is: the key of an entry stands for the weights,
the versions, the format and all tokens, and its checksum for its bytes.

The wire: `POST /v1/kv/held`, `/v1/kv/entries` and `/v1/kv/compute`, see server/apis/kv.py. An
entry travels as it lies on the disk. No mlx.
"""

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ..cache.disk import Entry, decode, entry_bytes
from ..config import PeerOptions
from ..errors import MlxinferError
from .batch import Sequence
from .kv_manager import KVManager
from .pagestore import MIN_PAGES, GroupPage, PageSearch, PageStore, Rate

if TYPE_CHECKING:
    import httpx2

API_KEY = "MLXINFER_API_KEY"  # environment variable: the key of all servers of a group
REQUESTS = 4  # at once to a peer
REQUESTS_PER_S = 50.0  # to a peer
BATCH_BYTES = 8 << 20  # of pages that one request asks for
LEAST_S = 0.5  # a prompt that takes no longer is computed here
UNMEASURED_S = 2.0  # that a request waits before it is known how long its prompt takes here
LOOK_SHARE = 2  # half of that time, for a peer to say what it has
POLL_S = 0.1  # between two looks at what a peer has computed so far
FIRST_PAUSE_S, MAX_PAUSE_S = 10.0, 300.0  # that a peer is left out after a failure, doubled by each
KEEP_S = 2.0  # that a connection stays open without a request: shorter than servers keep it
CLOSE_S = 2.0  # that the end of all requests to peers may take
MAX_SAID_CHARS = 200  # of a refusal, in the log
MAX_HEAD_BYTES = 1 << 16  # of an answer beside what was asked for

Post = Callable[[Callable[[], None]], None]
NOTHING_CAME = {"pages": 0, "bytes": 0, "failures": 0}

log = logging.getLogger("mlxinfer.engine")


class PeerError(MlxinferError):
    """A peer does not answer, refuses, or answers what was not asked for."""


class SlowPeerError(PeerError):
    """A peer has not answered in time."""


@dataclass(frozen=True, slots=True)
class Wait:
    """How long a prompt waits: since when, and until when a request has to end.

    Both on the clock of the event loop.
    """

    since_s: float
    until_s: float


class Peer:
    """Another server, and the rates and failures seen so far. Lives on one event loop.

    A request that has to end raises SlowPeerError.

    Attributes:
        sending: bytes of pages, and the seconds that they took.
        computing: tokens of prompts, likewise.
        counts: pages and bytes that came, and failures.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.sending, self.computing = Rate(), Rate()
        self.counts = dict(NOTHING_CAME)
        self._slots = asyncio.Semaphore(REQUESTS)
        self._next_s = 0.0  # when another request may go
        self._page_s = 0.0  # when the last page came
        self._pause_s = FIRST_PAUSE_S
        self._out_until_s = 0.0
        self._client = _client(self.url)

    @property
    def is_asked(self) -> bool:
        return time.monotonic() >= self._out_until_s

    async def held(self, namespace: bytes, keys: Seq[bytes], wait: Wait) -> set[bytes]:
        async with self._asked("held", _named(namespace, keys), wait) as response:
            answer = b"".join([chunk async for chunk in _chunks(response, len(keys))])
            if len(answer) != len(keys):
                raise PeerError(f"It said {len(answer)} of {len(keys)} pages.")
            return {key for key, has in zip(keys, answer, strict=True) if has == ord("1")}

    async def entries(
        self, namespace: bytes, sizes: dict[bytes, int], wait: Wait
    ) -> AsyncIterator[Entry]:
        """Entries of given sizes in bytes by key, up to the first one that it has no longer."""
        async with self._asked("entries", _named(namespace, list(sizes)), wait) as response:
            buffer, left = bytearray(), iter(sizes.items())
            key, size = next(left)
            async for chunk in _chunks(response, sum(sizes.values())):
                buffer += chunk
                while size and len(buffer) >= size:
                    entry = decode(bytes(buffer[:size]), key)
                    if entry is None:
                        raise PeerError("It sent a page that is damaged, or another one.")
                    del buffer[:size]
                    self._page_s = asyncio.get_running_loop().time()
                    self.counts["pages"] += 1
                    self.counts["bytes"] += entry.payload.nbytes
                    yield entry
                    key, size = next(left, (b"", 0))
            if buffer:
                raise PeerError("It sent a part of a page.")
        self._pause_s = FIRST_PAUSE_S

    async def compute(
        self, namespace: bytes, token_ids: Seq[int], salt: str | None, wait: Wait
    ) -> None:
        began_s, times = time.monotonic(), 1
        body = {"namespace": namespace.hex(), "token_ids": token_ids, "cache_salt": salt}
        try:
            async with self._asked("compute", body, wait) as response:
                _ = [chunk async for chunk in _chunks(response, 0)]
        except SlowPeerError:
            times = 2  # it would have taken longer still
        except PeerError:
            return
        self.computing.add(len(token_ids), times * (time.monotonic() - began_s))

    @asynccontextmanager
    async def _asked(
        self, path: str, body: dict[str, Any], wait: Wait
    ) -> "AsyncIterator[httpx2.Response]":
        """One request. A peer that fails is left out, and so is a silent one: no page came from it
        while the prompt waited. A caller that is cancelled says nothing of the peer.
        """
        asked = False
        try:
            async with asyncio.timeout_at(wait.until_s), self._slots:
                await self._turn()
                asked = True
                request = self._client.stream("POST", f"/v1/kv/{path}", json=body)
                async with request as response:
                    if response.status_code != 200:
                        raise PeerError(await _refusal(response))
                    yield response
        except TimeoutError:
            if asked and self._page_s < wait.since_s:
                self._leave_out("It did not answer in time.")
            raise SlowPeerError(f"{self.url}: It did not answer in time.") from None
        except Exception as error:  # the fault boundary of a peer, which may answer anything
            self._leave_out(str(error) or type(error).__name__)
            raise PeerError(f"{self.url}: {error}") from error

    async def _turn(self) -> None:
        now_s = time.monotonic()
        self._next_s = max(self._next_s, now_s) + 1 / REQUESTS_PER_S
        await asyncio.sleep(self._next_s - 1 / REQUESTS_PER_S - now_s)

    async def close(self) -> None:
        await self._client.aclose()

    def _leave_out(self, reason: str) -> None:
        if not self.is_asked:  # another request of the same time has failed
            return
        log.warning("peer %s is left out for %d s: %s", self.url, self._pause_s, reason)
        self.counts["failures"] += 1
        self._out_until_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)


def _client(url: str) -> "httpx2.AsyncClient":
    import httpx2  # only where there are peers

    key = os.environ.get(API_KEY)
    return httpx2.AsyncClient(
        base_url=url,
        headers={"authorization": f"Bearer {key}"} if key else {},
        timeout=None,  # the caller's time limits it
        trust_env=False,  # no proxy: the key is for this server alone
        verify=httpx2.create_ssl_context(),
        follow_redirects=False,
        limits=httpx2.Limits(keepalive_expiry=KEEP_S),
    )


def _named(namespace: bytes, keys: Seq[bytes]) -> dict[str, Any]:
    return {"namespace": namespace.hex(), "keys": b"".join(keys).hex()}


async def _chunks(response: "httpx2.Response", num_bytes: int) -> AsyncIterator[bytes]:
    """The body, as it comes; PeerError where it is longer than it can be."""
    left = num_bytes + MAX_HEAD_BYTES
    async for chunk in response.aiter_raw():
        left -= len(chunk)
        if left < 0:
            raise PeerError("It sent more than it was asked for.")
        yield chunk


def pages_at_once(store: PageStore) -> int:
    """Pages that one request may ask for, and that one answer has at most."""
    return max(BATCH_BYTES // max(store.page_bytes), 1)


async def _refusal(response: "httpx2.Response") -> str:
    """The reason of a refusal. The peer may be another program, so any body may come."""
    body = b"".join([chunk async for chunk in _chunks(response, 0)])
    said = "no reason"
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        said = repr(str(json.loads(body)["error"]["message"])[:MAX_SAID_CHARS])
    return f"It refused with status {response.status_code}: {said}."


@dataclass(slots=True, eq=False)
class Fetch:
    """The search of one request for pages at peers."""

    search: PageSearch  # of the prompt's pages
    root: bytes  # the namespace of the model's entries
    own_s: float | None  # that the rest of the prompt takes here; None: not measured
    # the prompt is text for the model alone, with its usual frequencies: all that a peer is told
    is_plain: bool
    salt: str | None  # of the request's prefixes
    offers: dict[bytes, Peer] = field(default_factory=dict)  # keys, and a peer that has the entry
    wait: Wait = Wait(0.0, 0.0)  # of the prompt


class PeerFetches:
    """Brings pages of prompts from peers while their requests wait. A thread of its own asks.

    Args:
        options: the peers, at least one.
    """

    def __init__(self, store: PageStore, options: PeerOptions) -> None:
        self._store = store
        self._needed_by_all = [g for g, group in enumerate(store.groups) if not group.recycles]
        self._loop = asyncio.new_event_loop()
        self._peers = {url: Peer(url) for url in options.asked}
        self._elsewhere = self._peers.get(options.prefill_at or "")
        self._thread = threading.Thread(target=self._run, name="mlxinfer-peers", daemon=True)
        self._thread.start()

    def begin(self, kv_manager: KVManager, sequence: Sequence, post: Post) -> None:
        """Start to ask peers for a prompt's pages. If any is asked, the sequence has a `fetch`.

        `post`: runs a function on the engine's thread, which ends the wait.
        """
        root, num_ids, request = self._store.root, len(sequence.token_ids), sequence.request
        stop = (num_ids - 1) // self._store.page_size
        if root is None or request.prompt_logits or request.from_peer or not self._asked_now():
            return
        point = kv_manager.probe(sequence)
        own_s = self._store.computing_s(num_ids - point.num_tokens)
        if stop - point.num_pages < MIN_PAGES or (own_s is not None and own_s < LEAST_S):
            return
        point.names.name(stop - 1)  # all are named before the other thread reads names
        is_plain = sequence.pictures is None and not sequence.adapter
        search = PageSearch(self._store, point, stop)
        is_plain = is_plain and not sequence.rope_variant
        fetch = Fetch(search, root, own_s, is_plain, request.cache_salt)
        sequence.fetch = asyncio.run_coroutine_threadsafe(self._bring(fetch), self._loop)
        sequence.fetch.add_done_callback(lambda _: post(partial(setattr, sequence, "fetch", None)))

    def stats(self) -> dict[str, int]:
        peers = self._peers.values()
        return {name: sum(peer.counts[name] for peer in peers) for name in NOTHING_CAME}

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.gather(*(peer.close() for peer in self._peers.values()))
        self._loop.stop()

    def _asked_now(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.is_asked]

    async def _bring(self, fetch: Fetch) -> None:
        """Bring what peers have, or compute, in the time that computing it here would take."""
        search = fetch.search
        if self._num_bytes(search.wanted(search.stop)) > self._store.received.max_bytes:
            return
        limit_s = UNMEASURED_S if fetch.own_s is None else fetch.own_s
        now_s, peer = self._loop.time(), self._elsewhere
        fetch.wait = Wait(now_s, now_s + limit_s)
        await self._look(fetch, self._asked_now(), Wait(now_s, now_s + limit_s / LOOK_SHARE))
        if peer is not None and self._pays_elsewhere(peer, fetch):
            await self._compute_at(peer, fetch)
        await self._take_rest(fetch)

    async def _compute_at(self, peer: Peer, fetch: Fetch) -> None:
        search = fetch.search
        work = peer.compute(fetch.root, search.point.names.token_ids, fetch.salt, fetch.wait)
        computing, ended = asyncio.create_task(work), False
        try:
            while not ended:
                await asyncio.wait({computing}, timeout=POLL_S)
                ended = computing.done()  # before the last look
                await self._look(fetch, [peer], fetch.wait)
                await self._take(fetch, search.places(self._needed_by_all))
        finally:
            computing.cancel()

    async def _look(self, fetch: Fetch, peers: Seq[Peer], wait: Wait) -> None:
        """Ask peers which of the missing pages they have; the first that has a page sends it."""
        search = fetch.search
        every = search.places(range(len(self._store.page_bytes)))
        keys = [search.key(*place) for place in every if not search.has(*place)]

        async def held(peer: Peer) -> set[bytes]:
            with suppress(PeerError):
                return await peer.held(fetch.root, keys, wait)
            return set()

        for peer, has in zip(peers, await asyncio.gather(*map(held, peers)), strict=True):
            fetch.offers = {**dict.fromkeys(has, peer), **fetch.offers}
        search.offered = fetch.offers

    def _pays_elsewhere(self, peer: Peer, fetch: Fetch) -> bool:
        """Whether a peer is expected to compute and send what no peer has sooner than it is here.

        Both are measured. The first prompt is computed here, the next one there.
        """
        search, store = fetch.search, self._store
        num_tokens = (search.stop - search.reachable()) * store.page_size
        own_s = store.computing_s(num_tokens)
        if not fetch.is_plain or own_s is None or own_s < LEAST_S or not peer.is_asked:
            return False
        peer_s = peer.computing.seconds_for(num_tokens) or 0.0
        link_s = peer.sending.seconds_for(self._num_bytes(search.wanted(search.stop))) or 0.0
        return store.pays(num_tokens, max(peer_s, link_s))

    async def _take_rest(self, fetch: Fetch) -> None:
        search = fetch.search
        num_pages = search.reachable()
        num_new, places = num_pages - search.point.num_pages, search.wanted(num_pages)
        if num_new < MIN_PAGES:
            return
        link_s = max(
            (
                peer.sending.seconds_for(self._num_bytes(peer_places)) or 0.0
                for peer, peer_places in self._by_peer(fetch, places).items()
            ),
            default=0.0,
        )
        if self._store.pays(num_new * self._store.page_size, link_s):
            await self._take(fetch, places)

    def _by_peer(self, fetch: Fetch, places: Seq[GroupPage]) -> dict[Peer, list[GroupPage]]:
        places_by_peer: dict[Peer, list[GroupPage]] = {}
        for place in places:
            peer = fetch.offers.get(fetch.search.key(*place))
            if peer is not None and not fetch.search.known.get(place):
                places_by_peer.setdefault(peer, []).append(place)
        return places_by_peer

    async def _take(self, fetch: Fetch, places: Seq[GroupPage]) -> None:
        places_by_peer = self._by_peer(fetch, places)
        await asyncio.gather(
            *(self._take_from(fetch, *peer_places) for peer_places in places_by_peer.items())
        )

    async def _take_from(self, fetch: Fetch, peer: Peer, places: list[GroupPage]) -> None:
        most = pages_at_once(self._store)
        batches = [places[i : i + most] for i in range(0, len(places), most)]
        began_s, before = time.monotonic(), peer.counts["bytes"]
        try:
            await asyncio.gather(*(self._take_batch(fetch, peer, batch) for batch in batches))
        finally:
            peer.sending.add(peer.counts["bytes"] - before, time.monotonic() - began_s)

    async def _take_batch(self, fetch: Fetch, peer: Peer, places: list[GroupPage]) -> None:
        """Stage the pages of one request; pages that do not come are computed."""
        search, page = fetch.search, self._store.page_size
        by_key = {search.key(*place): place for place in places}
        sizes = {k: entry_bytes(page, self._num_bytes([place])) for k, place in by_key.items()}
        with suppress(PeerError):
            async for entry in peer.entries(fetch.root, sizes, fetch.wait):
                self._store.received.store(entry)
                search.known[by_key[entry.key]] = True

    def _num_bytes(self, places: Seq[GroupPage]) -> int:
        return sum(self._store.page_bytes[group] for _, group in places)
