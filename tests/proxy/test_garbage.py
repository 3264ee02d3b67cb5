"""What a request made is gone with its answer: nothing is left for the collector of cycles to find."""

import gc

import pytest

from kvctl.control.gatekeeper import LeaseHandle
from kvctl.proxy.exchange import Exchange
from kvctl.proxy.flow import Metered
from kvctl.proxy.response import Response
from tests.proxy.harness import (
    CHAT_STREAM,
    LAST,
    PLAIN,
    STREAM,
    STREAM_HEAD,
    answering,
    chunk,
    plain,
    post,
    rig,
)

ODD = plain(PLAIN, "200 OK", b"x-odd:  1")  # of a form that only the parser reads


@pytest.mark.parametrize(
    ("answer", "end"), [(plain(PLAIN), PLAIN), (ODD, PLAIN), (STREAM_HEAD + chunk(STREAM) + LAST, LAST)]
)
async def test_an_answered_request_leaves_no_cycle(answer: bytes, end: bytes) -> None:
    async with rig(answering(answer)) as it:
        wire = await it.client()
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                await wire.send(post(CHAT_STREAM))
                await wire.reader.readuntil(end)
            await it.quiet()
            left = [each for each in gc.get_objects() if isinstance(each, Exchange | Metered | Response)]
            leases = [each for each in gc.get_objects() if isinstance(each, LeaseHandle)]
        finally:
            gc.enable()
        assert (left, leases) == ([], [])
        wire.close()
