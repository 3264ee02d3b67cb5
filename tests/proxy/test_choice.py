"""Several engines, and ranks of one, behind one data port: who gets a request, and what it gets."""

import asyncio
import json

import pytest

from kvctl.core.events import DrainChanged
from kvctl.core.outcomes import ChoiceReason, Policy
from kvctl.engines.tgi import TGI
from tests.proxy.harness import CHAT, PLAIN, eventually, get, plain, post
from tests.proxy.several import Crowd, Member, crowd

CHAT_PATH = "/v1/chat/completions"
CLOSE = b"Connection: close"


def chat(model: str = "m", text: str = "hi", *, most: int = 8) -> bytes:
    return json.dumps(
        {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": most}
    ).encode()


def header(answer: bytes, name: str) -> str | None:
    lines = answer.partition(b"\r\n\r\n")[0].decode().split("\r\n")[1:]
    found = dict(line.split(": ", 1) for line in lines)
    return {key.lower(): value for key, value in found.items()}.get(name)


async def send(it: Crowd, body: bytes, path: str = CHAT_PATH, *lines: bytes) -> bytes:
    return await it.ask(post(body, path, CLOSE, *lines))


def completions(member: Member) -> list[bytes]:
    return [request.body for request in member.got if b"completions" in request.line]


async def test_the_model_decides() -> None:
    async with crowd(Member("a", models=("x",)), Member("b", models=("y",))) as it:
        answer = await send(it, chat("y"))
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert header(answer, "x-kvctl-engine") == "b"
        assert header(answer, "x-kvctl-model") is None
        assert completions(it.members["b"]) == [chat("y")]
        assert not completions(it.members["a"])
        assert it.seen.choices == [("b", ChoiceReason.ONLY)]
        assert it.seen.records[-1].engine == "b"


async def test_no_model_is_the_first_engines_model() -> None:
    async with crowd(Member("a", models=("x",)), Member("b", models=("y",))) as it:
        await send(it, b'{"messages":[{"role":"user","content":"hi"}]}')
        assert len(completions(it.members["a"])) == 1


async def test_an_unknown_model_is_refused_where_that_is_certain() -> None:
    async with crowd(Member("a", named=("m",)), Member("b", named=("n",))) as it:
        answer = await send(it, chat("gone"))
        assert answer.startswith(b"HTTP/1.1 404 ")
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert (error["type"], error["param"], error["code"]) == ("NotFoundError", "model", 404)
        assert "`gone`" in error["message"]
        assert not completions(it.members["a"])


async def test_an_unknown_model_is_forwarded_to_those_that_were_not_named() -> None:
    """A LoRA adapter loaded a minute ago is on no list that was read before."""
    async with crowd(Member("a", named=("m",)), Member("b", models=("n",))) as it:
        assert (await send(it, chat("lora-7"))).startswith(b"HTTP/1.1 200 ")
        assert completions(it.members["b"]) == [chat("lora-7")]


@pytest.mark.parametrize(
    ("sent", "got"),
    [
        (
            b'{"messages":[{"role":"user","content":"say \\"model\\": \\"gpt\\""}], "model" : "gpt"  ,"n":1}',
            b'{"messages":[{"role":"user","content":"say \\"model\\": \\"gpt\\""}], "model" : "m"  ,"n":1}',
        ),
        (
            b'{"mod\\u0065l":"g\\u0070t","messages":[{"role":"user","content":"\xe6\x9d\xb1"}]}',
            b'{"mod\\u0065l":"m","messages":[{"role":"user","content":"\xe6\x9d\xb1"}]}',
        ),
        (
            b'{"metadata":{"model":"gpt"},"messages":[{"role":"user","content":"x"}],"model":"gpt"}',
            b'{"metadata":{"model":"gpt"},"messages":[{"role":"user","content":"x"}],"model":"m"}',
        ),
    ],
)
async def test_an_alias_changes_the_one_value_and_says_so(sent: bytes, got: bytes) -> None:
    async with crowd(Member("a", aliases={"gpt": "m"})) as it:
        answer = await send(it, sent)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert completions(it.members["a"]) == [got]
        assert header(answer, "x-kvctl-model") == "m"
        assert answer.endswith(PLAIN)


async def test_what_names_no_alias_passes_unchanged() -> None:
    odd = b' \n{"model":"m" ,"messages":[{"role":"user","content":"a"}],  "max_tokens":8 }\r\n'
    async with crowd(Member("a", aliases={"gpt": "m"}), Member("b")) as it:
        await send(it, odd)
        assert [*completions(it.members["a"]), *completions(it.members["b"])] == [odd]


async def test_an_alias_in_a_body_that_cannot_be_rewritten_is_refused() -> None:
    body = chat("gpt").decode().encode("utf-16")
    async with crowd(Member("a", aliases={"gpt": "m"})) as it:
        answer = await send(it, body)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"UTF-8" in answer


async def test_one_alias_of_two_engines_is_each_ones_own_name() -> None:
    hold = asyncio.Event()
    members = [
        Member("a", models=("x",), aliases={"gpt": "x"}, hold=hold, capacity=4000),
        Member("b", models=("y",), aliases={"gpt": "y"}, hold=hold, capacity=4000),
    ]
    async with crowd(*members) as it:
        tasks = [asyncio.create_task(send(it, chat("gpt", f"t{n}", most=500))) for n in range(4)]
        await eventually(lambda: it.leases() == 4)
        await eventually(lambda: sum(len(completions(each)) for each in members) == 4)
        hold.set()
        assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in await asyncio.gather(*tasks))
        for member, own in zip(members, ("x", "y"), strict=True):
            assert {json.loads(body)["model"] for body in completions(member)} == {own}


async def test_load_follows_headroom() -> None:
    """A pool three times as large gets about three times as much."""
    hold = asyncio.Event()
    large, small = Member("large", capacity=60_000, hold=hold), Member("small", capacity=20_000, hold=hold)
    async with crowd(large, small) as it:
        tasks = [asyncio.create_task(send(it, chat(text=f"t{n}", most=1000))) for n in range(40)]
        await eventually(lambda: it.leases() == 40)
        shares = len(large.gate.ledger), len(small.gate.ledger)
        hold.set()
        assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in await asyncio.gather(*tasks))
    assert 2.0 <= shares[0] / shares[1] <= 4.5, shares


async def test_a_prefix_draws_its_sessions_back_and_others_away() -> None:
    text = "long " * 3000
    async with crowd(Member("a"), Member("b")) as it:
        first = header(await send(it, chat(text=text)), "x-kvctl-engine")
        again = [header(await send(it, chat(text=text)), "x-kvctl-engine") for _ in range(3)]
        assert again == [first] * 3
        assert [reason for _, reason in it.seen.choices[1:]] == [ChoiceReason.PREFIX] * 3


async def test_a_drained_engine_gets_nothing_and_the_other_all() -> None:
    async with crowd(Member("a"), Member("b")) as it:
        for keeper in it.members["a"].keepers:
            keeper.handle(DrainChanged(draining=True))
        for _ in range(4):
            assert header(await send(it, CHAT), "x-kvctl-engine") == "b"
        assert not completions(it.members["a"])


async def test_an_engine_that_cannot_be_reached_costs_nobody_an_answer() -> None:
    """Nothing was sent, so the request goes to the other, with a lease there and none here."""
    async with crowd(Member("a", capacity=200_000), Member("b")) as it:
        await it.members["a"].fake.stop()
        answers = [await send(it, CHAT) for _ in range(3)]
        assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)
        assert {header(answer, "x-kvctl-engine") for answer in answers} == {"b"}
        assert ("b", ChoiceReason.MOVED) in it.seen.choices
        assert len(completions(it.members["b"])) == 3


async def test_where_none_can_be_reached_the_caller_hears_so() -> None:
    async with crowd(Member("a"), Member("b")) as it:
        for member in it.members.values():
            await member.fake.stop()
        assert (await send(it, CHAT)).startswith(b"HTTP/1.1 502 ")


async def test_an_answer_that_broke_is_not_asked_for_again() -> None:
    """The engine had the request: another generation would be a second one."""
    async with crowd(
        Member("a", capacity=200_000, answers={CHAT_PATH: b"nonsense\r\n\r\n"}), Member("b")
    ) as it:
        assert (await send(it, CHAT)).startswith(b"HTTP/1.1 502 ")
        assert not completions(it.members["b"])


async def test_where_all_are_full_the_refusal_is_the_nearest_ones() -> None:
    hold = asyncio.Event()
    members = [Member(name, capacity=2000, hold=hold, policy=Policy.STATIC) for name in "ab"]
    async with crowd(*members) as it:
        tasks = [asyncio.create_task(send(it, chat(text=f"t{n}", most=1700))) for n in range(2)]
        await eventually(lambda: it.leases() == 2)
        answer = await send(it, chat(most=1700))
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert header(answer, "retry-after") is not None
        assert header(answer, "x-kvctl-reason") == "kv_budget"
        hold.set()
        await asyncio.gather(*tasks)


async def test_a_400_needs_the_proof_of_all() -> None:
    long = chat(text="word " * 3000, most=8)
    async with crowd(Member("a", capacity=2000), Member("b", capacity=6000)) as it:
        assert header(await send(it, long), "x-kvctl-engine") == "b"
    async with crowd(Member("a", capacity=2000), Member("b", capacity=2500)) as it:
        answer = await send(it, long)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert header(answer, "x-kvctl-reason") == "capacity"


# --- passed routes ----------------------------------------------------------------------------------


async def test_models_are_merged_with_the_aliases() -> None:
    a = Member("a", models=("x", "both"), aliases={"gpt": "x"}, capacity=8000)
    async with crowd(a, Member("b", models=("both", "y"), capacity=4000)) as it:
        answer = await it.ask(get("/v1/models"))
        listed = {entry["id"]: entry for entry in json.loads(answer.partition(b"\r\n\r\n")[2])["data"]}
        assert list(listed) == ["x", "both", "gpt", "y"]
        assert listed["gpt"]["root"] == "x"
        assert listed["both"]["max_model_len"] == 4000
        one = await it.ask(get("/v1/models/gpt"))
        assert json.loads(one.partition(b"\r\n\r\n")[2])["root"] == "x"
        assert (await it.ask(get("/v1/models/none"))).startswith(b"HTTP/1.1 404 ")


async def test_an_engine_that_is_down_is_left_out_of_the_models() -> None:
    async with crowd(Member("a", models=("x",)), Member("b", models=("y",))) as it:
        await it.members["a"].fake.stop()
        answer = await it.ask(get("/v1/models"))
        assert [entry["id"] for entry in json.loads(answer.partition(b"\r\n\r\n")[2])["data"]] == ["y"]


async def test_what_all_engines_answer_to_a_missing_key_is_what_the_caller_hears() -> None:
    no = plain(b'{"error":"Unauthorized"}', "401 Unauthorized")
    async with crowd(Member("a", answers={"/v1/models": no}), Member("b", answers={"/v1/models": no})) as it:
        answer = await it.ask(get("/v1/models"))
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert answer.endswith(b'{"error":"Unauthorized"}')


async def test_tokenize_goes_by_the_model_of_its_body() -> None:
    async with crowd(Member("a", models=("x",)), Member("b", models=("y",), aliases={"gpt": "y"})) as it:
        await send(it, b'{"model":"gpt","prompt":"hi"}', "/tokenize")
        assert [r.body for r in it.members["b"].got] == [b'{"model":"y","prompt":"hi"}']


async def test_metrics_are_of_the_engine_that_the_query_names() -> None:
    pages = {
        name: {"/metrics": plain(name.encode()), f"/metrics?engine={name}": plain(name.encode())}
        for name in "ab"
    }
    async with crowd(Member("a", answers=pages["a"]), Member("b", answers=pages["b"])) as it:
        assert (await it.ask(get("/metrics"))).endswith(b"\r\n\r\na")
        assert (await it.ask(get("/metrics?engine=b"))).endswith(b"\r\n\r\nb")
        lost = await it.ask(get("/metrics?engine=c"))
        assert lost.startswith(b"HTTP/1.1 404 ")
        assert b"there are a, b" in lost


async def test_a_route_goes_to_the_kind_of_engine_that_has_it() -> None:
    """TGI's bodies name no model, and vLLM has no such route."""
    made = plain(b'{"generated_text":"x"}')
    tgi = Member("b", models=("t",), engine=TGI(), answers={"/generate_stream": made})
    async with crowd(Member("a", models=("x",)), tgi) as it:
        answer = await send(it, b'{"inputs":"hi","parameters":{"max_new_tokens":4}}', "/generate_stream")
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        assert header(answer, "x-kvctl-engine") == "b"
        assert (await send(it, chat("x"))).startswith(b"HTTP/1.1 200 ")
        assert len(completions(it.members["a"])) == 1


async def test_one_engine_keeps_its_own_models_and_headers() -> None:
    async with crowd(Member("a")) as it:
        answer = await send(it, CHAT)
        assert header(answer, "x-kvctl-engine") is None
        assert not it.seen.choices


async def test_stored_responses_are_asked_of_their_maker() -> None:
    made = plain(b'{"id":"resp_1","object":"response","status":"completed","output":[],"usage":null}')
    b = Member("b", models=("y",), answers={"/v1/responses": made, "/v1/responses/resp_1": plain(b"kept")})
    async with crowd(Member("a", models=("x",)), b) as it:
        answer = await send(it, b'{"model":"y","input":"hi","max_output_tokens":8}', "/v1/responses")
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        assert (await it.ask(get("/v1/responses/resp_1"))).endswith(b"kept")
        await send(it, b'{"model":"y","input":"more","previous_response_id":"resp_1"}', "/v1/responses")
        assert it.seen.choices[-1] == ("b", ChoiceReason.MAKER)


# --- ranks ------------------------------------------------------------------------------------------


async def test_requests_are_pinned_to_the_rank_with_the_most_headroom() -> None:
    hold = asyncio.Event()
    async with crowd(Member("a", ranks=("0", "1"), capacity=3000, hold=hold)) as it:
        tasks = [asyncio.create_task(send(it, chat(text=f"t{n}", most=900))) for n in range(4)]
        member = it.members["a"]
        await eventually(lambda: len(completions(member)) == 4)
        pins = sorted(value for request in member.got for value in request.values(b"x-data-parallel-rank"))
        assert pins == [b"0", b"0", b"1", b"1"]
        assert [len(keeper.gate.ledger) for keeper in member.keepers] == [2, 2]
        hold.set()
        await asyncio.gather(*tasks)


async def test_a_callers_own_pin_is_charged_where_it_points() -> None:
    hold = asyncio.Event()
    async with crowd(Member("a", ranks=("0", "1"), hold=hold)) as it:
        task = asyncio.create_task(send(it, CHAT, CHAT_PATH, b"X-data-parallel-rank: 1"))
        member = it.members["a"]
        await eventually(lambda: len(member.keepers[1].gate.ledger) == 1)
        hold.set()
        await task
        assert [r.values(b"x-data-parallel-rank") for r in member.got] == [[b"1"]]


async def test_one_rank_is_not_pinned() -> None:
    async with crowd(Member("a")) as it:
        await send(it, CHAT)
        assert it.members["a"].got[0].values(b"x-data-parallel-rank") == []
