"""POST /tokenize and /detokenize."""

import asyncio

import msgspec
from aiohttp import web

from jaxpaged.core.params import check_ids
from jaxpaged.errors import RequestError
from jaxpaged.openai.chunks import encode
from jaxpaged.openai.prompts import check_text, encode_chat
from jaxpaged.openai.schema import DetokenizeRequest, TokenizeRequest, decode_body
from server.bodies import read_body
from server.state import SERVER

_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(request: web.Request) -> web.Response:
    server = request.app[SERVER]
    body = decode_body(await read_body(request), _TOKENIZE)
    engine = server.engine_of(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if body.prompt is None:
        server.check_model(body.model)
        ids = (await encode_chat(body, server.engine, body.tools))["prompt_token_ids"]
    else:
        check_text(body.prompt, engine)
        adds = body.add_special_tokens is not False
        ids = await asyncio.to_thread(engine.tokenizer.encode, body.prompt, adds)
    strings = None
    if body.return_token_strs:
        strings = await asyncio.to_thread(engine.tokenizer.tokens, ids)
    answer = {
        "count": len(ids),
        "max_model_len": engine.max_model_len,
        "tokens": ids,
        "token_strs": strings,
    }
    return web.Response(body=encode(answer), content_type="application/json")


async def detokenize(request: web.Request) -> web.Response:
    server = request.app[SERVER]
    body = decode_body(await read_body(request), _DETOKENIZE)
    engine = server.engine_of(body.model)

    def decode() -> str:
        check_ids("tokens", body.tokens, engine.vocab)
        return engine.tokenizer.decode(body.tokens, False)

    text = await asyncio.to_thread(decode)
    return web.Response(body=encode({"prompt": text}), content_type="application/json")


async def tokenizer_info(request: web.Request) -> web.Response:
    """What a client needs that tokenises here and writes its prompts itself."""
    engine = request.app[SERVER].engine
    tokenizer = engine.tokenizer
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    answer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict.fromkeys(names),
        **tokenizer.special_tokens,
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": engine.max_model_len,
        "chat_template": engine.chat_templates.get("default"),
    }
    return web.Response(body=encode(answer), content_type="application/json")
