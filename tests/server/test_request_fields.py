"""Fields of a request that change what is told, and how it is cut: not what is generated."""

import asyncio
import re
import time

import pytest

from jaxpaged.engine.outputs import Logprob, RequestOutput
from jaxpaged.openai import prompts
from jaxpaged.openai.logprobs import PromptScores, TokenLabels
from server.state import ServerLimits
from tests.server.conftest import CHAT, COMPLETIONS

HELLO = {"messages": [{"role": "user", "content": "ABC"}], "max_tokens": 4}
TRUSTING = {"model_settings": {"trust_request_chat_template": True}}


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}])
async def test_a_stream_comes_in_pieces_of_its_interval(server, more):
    body = {"prompt": "ABC", "max_tokens": 8, "stream": True, "stream_interval": 3} | more
    reply = await server.post(body)
    if not more:
        assert reply.texts == ["D", "EFG", "HIJ", "K"]
        return
    assert "".join(reply.texts) == "DEFGHIJK"  # pieces that wait together are one chunk
    tokens = [e["choices"][0]["logprobs"]["tokens"] for e in reply.events]
    assert ["".join(part) for part in tokens] == reply.texts
    assert all(len(part) >= 3 for part in tokens[1:-1])


async def test_the_servers_interval_holds_where_a_request_has_none(start):
    server = await start(limits=ServerLimits(stream_interval=100))
    body = {"prompt": "ABC", "max_tokens": 8, "stream": True}
    assert (await server.post(body)).texts == ["D", "EFGHIJK"]
    assert len((await server.post(body | {"stream_interval": 1})).texts) == 8
    assert (await server.post(body | {"stream": False})).text == "DEFGHIJK"


async def test_pieces_that_wait_are_told_before_an_error(start):
    server = await start(limits=ServerLimits(stream_interval=100))
    server.engine.before_step = lambda step: time.sleep(0.005)
    body = {"prompt": "ABC", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    events = (await server.post(body | {"timeout_s": 0.2})).events
    assert events[-1]["error"]["type"] == "timeout_error"
    assert len("".join(e["choices"][0]["text"] for e in events[:-1])) > 5


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_named_tokens_are_told_instead(server, stream):
    chat = HELLO | {"logprobs": True, "logprob_token_ids": [37, 36], "stream": stream}
    reply = await server.post(chat, CHAT)
    if stream:
        choices = [c for e in reply.events for c in e["choices"] if c["logprobs"]]
        content = [entry for c in choices for entry in c["logprobs"]["content"]]
    else:
        content = reply.body["choices"][0]["logprobs"]["content"]
    assert [[t["token"] for t in entry["top_logprobs"]] for entry in content] == [["F", "E"]] * 4
    assert content[0]["top_logprobs"][1]["logprob"] == pytest.approx(-1.661)
    body = {"prompt": "ABC", "max_tokens": 1, "logprobs": 1, "logprob_token_ids": [36]}
    reply = await server.post(body | {"stream": stream})
    (tops,) = (reply.events if stream else [reply.body])[0]["choices"][0]["logprobs"][
        "top_logprobs"
    ]
    assert set(tops) == {"D", "E"}


async def test_the_operator_bounds_logprobs(start):
    server = await start(model_settings={"max_logprobs": 2})
    asked = {"prompt": "ABC", "max_tokens": 1}
    assert (await server.post(asked | {"logprobs": 2})).status == 200
    for name, more in {
        "logprobs": {"logprobs": 3},
        "prompt_logprobs": {"prompt_logprobs": 3},
    }.items():
        reply = await server.post(asked | more)
        assert (reply.status, reply.error["param"]) == (400, name)
    reply = await server.post(HELLO | {"logprobs": True, "top_logprobs": 3}, CHAT)
    assert (reply.status, reply.error["param"]) == (400, "top_logprobs")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"stop": ["x" * 1025]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"bad_words": ["x" * 1025]}, "bad_words"),
        ({"stream_interval": 0}, "stream_interval"),
        ({"stream_interval": 2**31}, "stream_interval"),
        ({"logprob_token_ids": [36]}, "logprob_token_ids"),
        ({"logprobs": 1, "logprob_token_ids": []}, "logprob_token_ids"),
        ({"logprobs": 1, "logprob_token_ids": [512]}, "logprob_token_ids"),
        ({"logprobs": 1, "logprob_token_ids": [1] * 21}, "logprob_token_ids"),
        ({"allowed_token_ids": [1] * 513}, "allowed_token_ids"),
    ],
)
async def test_what_is_out_of_bounds_is_refused_by_name(server, more, param):
    reply = await server.post({"prompt": "ABC", "max_tokens": 2} | more)
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_a_refusal_names_the_field_that_the_client_wrote(server):
    names = {"max_tokens": -1, "max_completion_tokens": -1}
    for name, value in names.items():
        reply = await server.post(HELLO | {name: value}, CHAT)
        assert (reply.status, reply.error["param"]) == (400, name)
        assert reply.error["message"].startswith(f"{name} is -1")
    beams = {"prompt": "A", "use_beam_search": True, "n": 11}
    assert (await server.post(beams)).error["message"].startswith("n is 11")


@pytest.mark.parametrize(
    ("path", "more", "name"),
    [
        (COMPLETIONS, {"prompt": "A", "max_tokens": 10**6}, "max_tokens"),
        (CHAT, HELLO | {"max_tokens": 10**6}, "max_tokens"),
        (CHAT, HELLO | {"max_completion_tokens": 10**6}, "max_completion_tokens"),
        (CHAT, HELLO | {"max_tokens": 9, "max_completion_tokens": 10**6}, "max_completion_tokens"),
        ("/v1/responses", {"input": "A", "max_output_tokens": 10**6}, "max_output_tokens"),
        ("/v1/messages", HELLO | {"max_tokens": 10**6}, "max_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_over_the_context_names_the_limit_that_the_client_wrote(
    server, path, more, name, stream
):
    model = server.llm.served_model_names[0]
    reply = await server.post(more | {"stream": stream, "model": model}, path)
    assert reply.status == 400
    told = re.search(r"or lower (\w+) to \d+$", reply.error["message"])
    assert told is not None
    assert told[1] == name


async def test_a_word_of_the_client_is_told_as_it_is_where_its_limit_has_another_name(server):
    choice = {"type": "function", "function": {"name": "max_tokens"}}
    more = {"max_completion_tokens": 3, "tool_choice": choice}
    reply = await server.post(HELLO | more, CHAT)
    assert "'max_tokens'" in reply.error["message"]
    few = await server.post(HELLO | {"max_completion_tokens": 3, "min_tokens": 4}, CHAT)
    assert few.error["message"].startswith("min_tokens is 4, over max_completion_tokens of 3")


async def test_a_text_that_is_cut_may_be_long_and_not_endless(server, monkeypatch):
    monkeypatch.setattr(prompts, "MAX_CUT_TEXT", 100_000)
    for size, status in ((99_000, 200), (101_000, 400)):
        cut = {"max_tokens": 1, "truncate_prompt_tokens": 5}
        message = {"messages": [{"role": "user", "content": "A" * size}]}
        assert (await server.post(cut | {"prompt": "A" * size})).status == status
        assert (await server.post(cut | message, CHAT)).status == status


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/inference/v1/generate"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_logprobs_of_a_long_prompt_are_written_off_the_loop(
    server, monkeypatch, path, stream
):
    ways, to_thread = [], asyncio.to_thread

    def noting(function, *given):
        ways.append(getattr(function, "__name__", "writing"))
        return to_thread(function, *given)

    monkeypatch.setattr(asyncio, "to_thread", noting)
    fields = {"max_tokens": 1, "prompt_logprobs": 2, "n": 3}
    body = {
        COMPLETIONS: {"prompt": "A" * 300, "stream": stream} | fields,
        CHAT: HELLO | fields | {"messages": [{"role": "user", "content": "A" * 300}]},
        "/inference/v1/generate": {"token_ids": [32] * 300, "sampling_params": fields},
    }[path] | {"stream": stream}
    reply = await server.post(body, path)
    assert {"add", "writing"} <= set(ways)
    events = reply.events if stream else [reply.body]
    places = events if path == CHAT else [c for e in events for c in e["choices"]]
    told = [place["prompt_logprobs"] for place in places if "prompt_logprobs" in place]
    assert len(told) == (1 if path == CHAT else 3)
    assert all(scores == told[0] for scores in told)
    assert (told[0][0], len(told[0]), len(told[0][299])) == (None, 300, 3)


async def test_logprobs_of_one_prompt_are_never_told_of_another(server):
    scores = PromptScores(TokenLabels(server.llm.tokenizer, as_ids=False))
    told = []
    for places in ([None, {32: Logprob(-1.0, 1, "A")}], None, [None], [None]):
        output = RequestOutput("id", None, [32], [], True, prompt_logprobs=places)
        told.append(bytes(scores.of(output)))
    scored = b'[null,{"32":{"logprob":-1.0,"rank":1,"decoded_token":"A"}}]'
    assert told == [scored, b"[]", b"[null]", b"[null]"]


async def test_the_logprobs_of_a_prompt_are_not_told_without_end(server):
    asked = {"prompt": "A" * 2000, "max_tokens": 1, "prompt_logprobs": 20}
    reply = await server.post(asked | {"n": 25})
    assert (reply.status, reply.error["param"]) == (400, "n")
    assert "1050000 in all" in reply.error["message"]


@pytest.mark.parametrize("content", ["x", "</s>"])
async def test_what_a_template_writes_is_measured_before_it_is_encoded(start, content):
    server = await start(template="{{ messages[0]['role'] }}{{ messages[1]['content'] }}")
    messages = [{"role": "r" * 200_000, "content": ""}, {"role": "user", "content": content}]
    reply = await server.post({"messages": messages}, CHAT)
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert "characters with the chat template" in reply.error["message"]
    cut = {"messages": messages, "truncate_prompt_tokens": 3, "max_tokens": 1}
    assert (await server.post(cut, CHAT)).status == 200


async def test_values_for_the_template_are_few(server):
    reply = await server.post(
        HELLO | {"chat_template_kwargs": {f"k{i}": 1 for i in range(129)}}, CHAT
    )
    assert (reply.status, reply.error["param"]) == (400, "chat_template_kwargs")
    assert "129" in reply.error["message"]


async def test_values_for_the_template_may_have_any_name(start):
    names = ("self", "template", "tokenizer", "messages_", "source", "options", "/")
    shown = "".join(f"{{{{ {name} }}}}" for name in names[:-1])
    server = await start(template=shown)
    for name in names:
        reply = await server.post(HELLO | {"chat_template_kwargs": {name: "ABC"}}, CHAT)
        is_taken = name not in ("self", "tokenizer", "/")
        assert reply.status == (200 if is_taken else 400), name
        if not is_taken:
            assert reply.error["param"] == "chat_template_kwargs"


async def test_a_requests_own_template_needs_the_operator(server):
    reply = await server.post(HELLO | {"chat_template": "x"}, CHAT)
    assert (reply.status, reply.error["param"]) == (400, "chat_template")
    body = {"messages": HELLO["messages"], "chat_template": "x"}
    assert (await server.post(body, "/tokenize")).status == 400


async def test_a_requests_own_template_is_its_alone(start):
    server = await start(**TRUSTING)
    own = HELLO | {"chat_template": "{{ messages[0]['content'] }}{{ extra }}KLM"}
    reply = await server.post(own | {"chat_template_kwargs": {"extra": "x"}}, CHAT)
    assert reply.text == "NOPQ"
    body = {"messages": HELLO["messages"], "chat_template": own["chat_template"]}
    assert (await server.post(body, "/tokenize")).body["count"] == 6
    assert (await server.post(HELLO, CHAT)).text == "DEFG"


LOOP = "{% for i in range(99999) %}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% include 'tokenizer_config.json' %}",
        LOOP * 3 + "{% endfor %}" * 3,
        "{{ 'x' * 10 ** 9 }}",
        "{% if a %}" * 3000 + "{% endif %}" * 3000,
        "(" * 60_000,
        "x" * 70_000,
        "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
        "{{ raise_exception('no') }}",
        "{{ 1 // 0 }}",
    ],
)
async def test_a_bad_template_of_a_request_is_a_400_and_harms_nobody(start, template):
    server = await start(**TRUSTING)
    reply = await server.post(HELLO | {"chat_template": template}, CHAT)
    assert reply.status == 400, reply.raw[:200]
    assert reply.error["param"] in ("chat_template", "messages", "prompt")
    assert (await server.post({"prompt": "ABC", "max_tokens": 3})).text == "DEF"


SAYS = {"messages": [{"role": "user", "content": "XY"}]}
MOOD = "m" * 20
CONVERSATIONS = {
    CHAT: SAYS | {"max_tokens": 1},
    "/v1/responses": {"input": "XY", "max_output_tokens": 1},
    "/v1/messages": SAYS | {"max_tokens": 1},
    "/v1/messages/count_tokens": SAYS,
    "/tokenize": SAYS,
    "/v1/cache/prefixes": SAYS,
}


@pytest.mark.parametrize("path", CONVERSATIONS)
async def test_the_templates_default_values_hold_wherever_a_conversation_is_taken(start, path):
    defaults = {"default_chat_template_kwargs": {"mood": MOOD}}
    server = await start(
        template="{{ mood }}{{ messages[-1]['content'] }}", model_settings=defaults
    )
    body = (await server.post(CONVERSATIONS[path], path)).body
    wanted = len(MOOD) + 2
    if path == "/v1/cache/prefixes":  # this engine keeps none
        assert len(server.engine.last_request.prompt_token_ids) == wanted
        return
    usage = body.get("usage", body)
    names = ("prompt_tokens", "input_tokens", "count")
    assert next(usage[name] for name in names if name in usage) == wanted


async def test_a_requests_values_for_the_template_go_before_the_defaults(start):
    defaults = {"default_chat_template_kwargs": {"mood": MOOD, "tone": "t"}}
    server = await start(
        template="{{ mood }}{{ tone }}{{ messages[-1]['content'] }}", model_settings=defaults
    )
    reply = await server.post(HELLO | {"chat_template_kwargs": {"mood": "m"}}, CHAT)
    assert reply.body["usage"]["prompt_tokens"] == len("mtABC")
