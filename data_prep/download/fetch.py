"""HTTP as far as a long download needs it: what may pass is told from what will not, and tried again with patience."""

from __future__ import annotations

import http.client
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from protperf import __version__

_PIECE_BYTES = 1 << 18
_PROGRESS_BYTES = 16 << 20
"""An attempt that brings this much more than all before it was no failure: tries are counted anew."""
_STRONG_ETAG = re.compile(r'"[!#-~]*"')
_DATE = re.compile(r"[A-Za-z0-9,: ]+")
_BUSY_STATUS = (408, 429)


@dataclass(frozen=True)
class Patience:
    """How long to wait for what.

    Attributes:
        tries: attempts in a row without progress before giving up.
        first_delay_s: seconds before the second attempt; doubled for each one after it.
        longest_delay_s: the most seconds between two attempts.
        timeout_s: seconds without a byte after which a connection counts as dropped.
        report_s: seconds between two lines of progress where stderr is no terminal.
    """

    tries: int = 8
    first_delay_s: float = 1.0
    longest_delay_s: float = 60.0
    timeout_s: float = 60.0
    report_s: float = 30.0


PATIENCE = Patience()


class Dropped(Exception):
    """The connection or the server failed in a way that may pass."""


class BadRange(Dropped):
    """The server has nothing that could follow the part."""


class Tries:
    """Counts failures in a row, waits longer after each, and ends when there were too many."""

    def __init__(self, place: str, *, say: Callable[[str], None], patience: Patience) -> None:
        self._place = place
        self._say = say
        self._patience = patience
        self._best = 0
        self._failures = 0

    def count_failure(self, reason: str, position: int = 0) -> None:
        """Wait after a failure; `position` is the number of bytes that have come so far.

        Raises:
            ConnectionError: it was one too many.
        """
        if position >= self._best + _PROGRESS_BYTES:
            self._best, self._failures = position, 0
        self._failures += 1
        patience = self._patience
        if self._failures >= patience.tries:
            raise ConnectionError(
                f"{self._place}: {reason}; gave up after {self._failures} tries: the same command continues later"
            )
        delay = min(patience.first_delay_s * 2 ** (self._failures - 1), patience.longest_delay_s)
        self._say(
            f"{self._place}: {reason}; try {self._failures + 1} of {patience.tries} follows in {delay:g} s"
        )
        time.sleep(delay)


def open_address(url: str, headers: dict[str, str], timeout_s: float) -> http.client.HTTPResponse:
    """Ask for `url` over http or https, redirections included.

    Raises:
        ValueError: the server answers that there is nothing to fetch.
        ConnectionError: its certificate is not to be trusted.
        Dropped: it is worth another try.
    """
    opener = urllib.request.OpenerDirector()  # build_opener's also follows to ftp:
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.UnknownHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
    ):
        opener.add_handler(handler())
    request = urllib.request.Request(url, headers={"User-Agent": f"protperf/{__version__}", **headers})
    try:
        return opener.open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        with error:
            raise _explain_status(url, error.code, error.reason) from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise ConnectionError(
                f"{url}: the server's certificate is not trusted ({error.reason.verify_message}); "
                "SSL_CERT_FILE names a file of further certificates"
            ) from None
        if not isinstance(error.reason, OSError):
            raise ValueError(f"{url}: cannot be fetched: {error.reason}; allowed: http and https") from None
        raise Dropped(_one_line(error.reason)) from None
    except (OSError, http.client.HTTPException) as error:
        raise Dropped(_one_line(error)) from None


def _explain_status(url: str, status: int, reason: str) -> Exception:
    """Return the error that an HTTP status stands for."""
    reason = " ".join(reason.split())  # of an endless redirection it has lines
    if status == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
        return BadRange("the server's file is shorter than the part: starts anew")
    if status >= http.client.INTERNAL_SERVER_ERROR or status in _BUSY_STATUS:
        return Dropped(f"HTTP {status} {reason}")
    return ValueError(f"{url}: HTTP {status} {reason}; is the base address right?")


def read_pieces(response: http.client.HTTPResponse, limit: int) -> Iterator[bytes]:
    """Yield the bytes of an answer as they come, `limit` at most.

    Raises:
        Dropped: the connection broke, or ended before what it had announced.
    """
    length = response.headers.get("Content-Length", "").strip()
    if announced := length.isdecimal():
        limit = min(limit, int(length))
    while limit:
        try:
            piece = response.read1(min(_PIECE_BYTES, limit))
        except (OSError, http.client.HTTPException) as error:
            raise Dropped(_one_line(error)) from None
        if not piece and announced:
            raise Dropped("the connection was dropped")
        if not piece:
            return
        limit -= len(piece)
        yield piece


def validator_of(response: http.client.HTTPResponse) -> str:
    """Return what `If-Range` may compare: a strong ETag, else the date of the last change, else nothing."""
    etag, date = response.headers.get("ETag", ""), response.headers.get("Last-Modified", "")
    return etag if _STRONG_ETAG.fullmatch(etag) else date if _DATE.fullmatch(date) else ""


def _one_line(error: BaseException) -> str:
    """Return what a connection died of, without its number."""
    text = error.strerror if isinstance(error, OSError) else None
    return " ".join((text or str(error)).split()) or type(error).__name__
