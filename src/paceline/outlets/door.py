"""Who may see the live page of a run. Pure: a request comes in, an answer goes out.

Any program and any user of this machine can connect to the page's port, and so can every page that is open in the
user's browser. The door lets in who has the token:

- The address that the terminal shows contains the token. The door moves it to a cookie that no script can read and
  that no other site can send, and redirects to the address without it, so that it does not stay in sight.
- The header `Host` must name this machine. Otherwise, a page of another site could give its own name the address
  127.0.0.1, and would then count as the same site (DNS rebinding). If the page is served to other machines, any IP
  address will do as well, because such an attack needs a name.
- Requests that a page of another site has caused are refused, even with the token.
- Nothing can be changed: only GET and HEAD are answered.

Cookies do not tell ports apart, so the name of the cookie contains the port.
"""

from __future__ import annotations

import gzip
import hmac
import ipaddress
from collections.abc import Mapping
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

import msgspec

__all__ = ["HARDENING", "Answer", "Door", "Request", "hosts_of"]

HARDENING = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""Headers of every answer: nothing is kept, framed, or told to other sites."""

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
ANY_ADDRESS = "*"
GZIP_LEVEL = 1  # higher levels save little with JSON, and take much longer


class Request(msgspec.Struct, frozen=True):
    """The head of an HTTP request.

    Attributes:
        method: such as "GET".
        path: the path without the query.
        query: what follows "?"; "" if nothing does.
        headers: names in lower case -> values.
    """

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = {}


class Answer(msgspec.Struct, frozen=True):
    """An answer to a request.

    Attributes:
        status: the status.
        body: the content.
        headers: further headers; those of `HARDENING` are in every answer.
    """

    status: HTTPStatus
    body: bytes = b""
    headers: Mapping[str, str] = {}

    @classmethod
    def text(cls, status: HTTPStatus, text: str, **headers: str) -> Answer:
        """Return an answer that consists of a sentence."""
        return cls(status, f"{text}\n".encode(), {"Content-Type": "text/plain; charset=utf-8", **headers})

    def compressed(self) -> Answer:
        """Return the same answer for those who accept gzip."""
        headers = {**self.headers, "Content-Encoding": "gzip"}
        return Answer(self.status, gzip.compress(self.body, GZIP_LEVEL), headers)


class Door(msgspec.Struct, frozen=True):
    """The conditions under which a request is answered.

    Attributes:
        port: the port that is listened on.
        hosts: the hosts that a request may name, in lower case; see `hosts_of`.
        token: the secret of the page; "" if everybody may see it who can connect.
    """

    port: int
    hosts: frozenset[str]
    token: str = ""

    @property
    def cookie(self) -> str:
        """The name of the cookie."""
        return f"paceline-{self.port}"

    def answer(self, request: Request) -> Answer | None:
        """Return the answer to a request that is not let in; None if it is."""
        if request.method not in ("GET", "HEAD"):
            return Answer.text(
                HTTPStatus.METHOD_NOT_ALLOWED, "This page can only be read.", Allow="GET, HEAD"
            )
        host = request.headers.get("host", "").lower()
        if not self._is_known(host):
            return Answer.text(
                HTTPStatus.MISDIRECTED_REQUEST,
                "This address is not one under which the page is served. Open the address that the terminal shows; "
                "if the run is on another machine, forward the same port: ssh -L PORT:127.0.0.1:PORT MACHINE",
            )
        site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
        if site not in (None, "none", "same-origin") or origin not in (None, f"http://{host}"):
            return Answer.text(
                HTTPStatus.FORBIDDEN,
                "A page of another site has sent you here. Paste the address that the terminal shows into the "
                "address line of the browser.",
            )
        if not self.token:
            return None
        given = parse_qs(request.query).get("token", [])
        if given:
            return self._exchange(request.path, given[-1])
        if not self._has_cookie(request.headers.get("cookie", "")):
            return Answer.text(
                HTTPStatus.FORBIDDEN, "Open the address that the terminal shows. It contains a token."
            )
        return None

    def _is_known(self, host: str) -> bool:
        """Return True if the value of the header `Host` is allowed."""
        name, _, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
        if not name:
            name, port = host, "80"
        if port != str(self.port):
            return False
        return name in self.hosts or (ANY_ADDRESS in self.hosts and _is_address(name))

    def _exchange(self, path: str, token: str) -> Answer:
        """Return a redirection to the address without the token, with the cookie, if the token is right."""
        if not self._is_token(token):
            return Answer.text(
                HTTPStatus.FORBIDDEN,
                "The token is wrong. Each run has a token of its own: open the address that its terminal shows.",
            )
        cookie = f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"
        return Answer(HTTPStatus.SEE_OTHER, headers={"Location": _local(path), "Set-Cookie": cookie})

    def _has_cookie(self, header: str) -> bool:
        try:
            cookies = SimpleCookie(header)
        except CookieError:
            return False
        return self.cookie in cookies and self._is_token(cookies[self.cookie].value)

    def _is_token(self, given: str) -> bool:
        """Compare in a time that does not depend on how much of the token is right."""
        return hmac.compare_digest(given.encode(errors="replace"), self.token.encode())


def hosts_of(host: str, own_names: tuple[str, ...] = ()) -> frozenset[str]:
    """Return the hosts that a request may name, for a page that listens on an address.

    Args:
        host: the address, or the name, on which the page listens.
        own_names: the names of this machine.

    >>> sorted(hosts_of("127.0.0.1"))
    ['127.0.0.1', '[::1]', 'localhost']
    >>> "*" in hosts_of("0.0.0.0"), "node7" in hosts_of("0.0.0.0", ("Node7",))
    (True, True)
    """
    name = f"[{host}]" if ":" in host else host
    if name.lower() in LOOPBACK_NAMES or name.startswith("127."):
        return LOOPBACK_NAMES | {name.lower()}
    names = {each.lower() for each in (name, *own_names) if each}
    return LOOPBACK_NAMES | names | {ANY_ADDRESS}


def _is_address(name: str) -> bool:
    """Return True for an IP address, as it is written in an address line."""
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _local(path: str) -> str:
    """Return a path to which a redirection stays on this site: "//other.example" would be another one."""
    return "/" + path.lstrip("/\\")
