"""The way out: whether a host may be reached, and the connection to it. Policy by name first, then by address, then connecting.

A name is resolved out here, once, after it was allowed, and its addresses are judged before one of them is connected to. Behind
the host's own proxy the name is passed on instead; addresses in place of names are judged all the same.
"""

import asyncio
import socket
from collections.abc import Callable

import h11

from elsewhere.network import addresses, answers, heads, names
from elsewhere.network.answers import Answer, Denied
from elsewhere.network.dialling import Resolver, Unreachable, connect
from elsewhere.network.names import Address
from elsewhere.network.relay import CHUNK
from elsewhere.network.rules import Verdict
from elsewhere.network.upstream import Server, Upstream
from elsewhere.values import dataclass

__all__ = ["Decide", "Far", "Outward"]

Decide = Callable[[str, int], Verdict]


@dataclass(slots=True)
class Far:
    """A connection to a server: `via` the host's proxy, or to an `address` that was judged. `first` was read from it already."""

    sock: socket.socket
    host: str
    port: int
    via: Server | None
    address: Address | None
    first: bytes = b""

    @property
    def speaker(self) -> str:
        """Whose words come out of it."""
        return names.authority(self.host, self.port) if self.via is None else "the host's own proxy"


class Outward:
    """`sandbox` stands in what to type, and `resolver` is its share. Every refusal is told to `observe`, and raised as the answer
    that it is."""

    def __init__(
        self,
        decide: Decide,
        resolver: Resolver,
        upstream: Upstream | None,
        observe: Callable[[Denied], None],
        *,
        seconds: float,
        sandbox: str,
    ) -> None:
        self._decide = decide
        self._resolver = resolver
        self._upstream = upstream
        self._observe = observe
        self._seconds = seconds
        self._sandbox = sandbox

    def check(self, host: str, port: int, address: Address | None = None) -> Verdict:
        """Raises the answer if it is not allowed (any more) to reach this host, or it by this address."""
        verdict = self._decide(host, port)
        if not verdict.allowed:
            raise self._denied(host, port, verdict)
        refused = None if address is None else self._why_refused(address, port, verdict, host)
        if refused:
            raise self._denied(host, port, refused, address)
        return verdict

    def is_allowed(self, host: str, port: int, address: Address | None = None) -> bool:
        """Of what was reached already. Nobody is told of a refusal: nobody was refused what they asked for."""
        verdict = self._decide(host, port)
        return verdict.allowed and (address is None or self._why_refused(address, port, verdict, host) is None)

    async def reach(self, host: str, port: int, *, tunnel: bool) -> Far:
        """`tunnel`: for whatever is spoken through it, instead of for requests."""
        literal = names.address(host)
        verdict = self.check(host, port, literal)
        via = self._upstream.server(host, port, tunnel=tunnel) if self._upstream else None
        try:
            if via is not None:
                return await self._through(via, host, port, tunnel=tunnel)
            found = [literal] if literal is not None else await self._resolver.addresses(host, port)
            sock, address = await connect(self._allowed(found, verdict, host, port), port, self._seconds)
        except Unreachable as error:
            raise _unreachable(names.authority(host, port), error) from None
        try:
            self.check(host, port, address)  # by the rules of now: it took its time
        except BaseException:
            sock.close()
            raise
        return Far(sock, host, port, None, address)

    def _denied(self, host: str, port: int, verdict: Verdict, address: Address | None = None) -> Answer:
        by_address = address is not None and not verdict.denied
        answer, denied = answers.denial(host, port, verdict, str(address) if by_address else "")
        self._observe(denied)
        return answer

    def _allowed(self, found: list[Address], verdict: Verdict, host: str, port: int) -> list[Address]:
        refusals = {address: self._why_refused(address, port, verdict, host) for address in found}
        allowed = [address for address, refused in refusals.items() if refused is None]
        if not allowed:
            first = refusals[found[0]]
            assert first is not None
            raise self._denied(host, port, first, found[0])
        return allowed

    def _why_refused(self, address: Address, port: int, verdict: Verdict, host: str) -> Verdict | None:
        """A refusal of the address that a name leads to, or that stands in its place; None if it may be connected to."""
        literal = names.address(host) is not None
        by_address = verdict if literal else self._decide(str(address), port)
        if by_address.denied:
            return by_address
        if by_address.allowed and by_address.named == "address":
            return None
        if not addresses.why_refused(address, named=verdict.named):
            return None
        return Verdict(False, *addresses.refusal(host, port, address, self._sandbox))

    # -- the host's own proxy ---------------------------------------------------------------------------------------------------

    async def _through(self, via: Server, host: str, port: int, *, tunnel: bool) -> Far:
        """The host was told of that proxy, so its address is not judged. Its own words never come inside: they may be about
        credentials."""
        try:
            literal = names.address(via.host)
            found = [literal] if literal is not None else await self._resolver.addresses(via.host, via.port)
            sock, _ = await connect(found, via.port, self._seconds)
        except Unreachable as error:
            raise _unreachable("the host's own proxy", error) from None
        far = Far(sock, host, port, via, names.address(host))
        try:
            if tunnel:
                await self._ask_for_tunnel(far, via)
        except BaseException:
            sock.close()
            raise
        return far

    async def _ask_for_tunnel(self, far: Far, via: Server) -> None:
        where = names.authority(far.host, far.port)
        headers = [("Host", where)]
        if via.authorization:
            headers.append(("Proxy-Authorization", via.authorization))
        speaker = h11.Connection(h11.CLIENT, max_incomplete_event_size=heads.LARGEST)
        request = speaker.send(h11.Request(method="CONNECT", target=where, headers=headers)) or b""
        speaker.send(h11.EndOfMessage())
        try:
            async with asyncio.timeout(self._seconds):
                await asyncio.get_running_loop().sock_sendall(far.sock, request)
                status = await _status(far.sock, speaker)
        except TimeoutError:
            raise answers.plain(504, f"the host's own proxy did not reach {where} in time") from None
        except (OSError, h11.RemoteProtocolError):
            raise answers.plain(502, "the host's own proxy broke off, or gave an answer that cannot be understood") from None
        if not 200 <= status < 300:
            raise answers.plain(502, f"the host's own proxy answered with status {status} when asked for {where}")
        far.first = speaker.trailing_data[0]


async def _status(sock: socket.socket, speaker: h11.Connection) -> int:
    while True:
        event = speaker.next_event()
        if isinstance(event, h11.Response):
            return event.status_code
        if event is h11.NEED_DATA:
            speaker.receive_data(await asyncio.get_running_loop().sock_recv(sock, CHUNK))
        elif not isinstance(event, h11.InformationalResponse):
            raise ConnectionResetError


def _unreachable(what: str, error: Unreachable) -> Answer:
    return answers.plain(504 if error.slow else 503 if error.busy else 502, f"{what} {error}")
