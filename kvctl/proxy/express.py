"""The usual reads of a stream, straight from the engine's transport to the client's.

While a stream runs, nearly every read is one whole chunk with one event like those before. An ``Express``
then stands at the transport, passes such a chunk on as it came and counts its token, all in one call: most of
what an event costs is calls and what lies between them. Anything else is handed to the connection behind it,
which takes the general way (``tests/proxy/test_cut_anywhere.py`` plays both).
"""

from kvctl import logs
from kvctl.control.gatekeeper import LeaseHandle
from kvctl.proxy.alike import Alike
from kvctl.proxy.answer_ends import Swift
from kvctl.proxy.relay import ClientStream
from kvctl.proxy.response import Response

log = logs.get("proxy")


class Express(Swift):
    """The short way of one metered stream. ``like``: the look of events that it takes; None: it takes none.

    ``taken``: how many of them it took that the sniffer was not told of yet.
    """

    __slots__ = ("_client", "_lease", "_response", "_stream", "like", "taken")

    def __init__(self, response: Response, stream: ClientStream, lease: LeaseHandle) -> None:
        super().__init__()
        self._response = response
        self._stream = stream
        self._client = stream.client
        self._lease = lease
        self.like: Alike | None = None
        self.taken = 0

    def data_received(self, data: bytes) -> None:
        """Bytes came from the engine. This is ``ClientStream.put`` and ``LeaseHandle.progress`` in one."""
        like = self.like
        if like is None or not (self._response.between and like.fits_framed(data)):
            super().data_received(data)
            return
        if self.noted is not None:
            self.noted()
        transport = self._client.transport
        if transport is not None and not transport.is_closing():
            transport.write(data)
            self._stream.stirred = True
        if self._client.writing_paused:
            self._stream.hold_back()
        self.taken += 1
        lease = self._lease
        if lease.untold:
            lease.untold += 1
            lease.moved_at = lease.clock()
        else:
            self._progress()

    def _progress(self) -> None:
        try:
            self._lease.progress(1)
        except Exception:  # an error in the accounting must not break the relay
            self.like = None
            log.exception("an event is relayed without being counted")
