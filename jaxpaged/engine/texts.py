"""Prompts and conversations to token ids, off the event loop where that takes long."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jaxpaged.config.settings import ModelSettings
from jaxpaged.engine.inputs import InputProcessor, Prompt
from jaxpaged.errors import ConfigError, RequestError
from jaxpaged.text.literals import render_literally
from jaxpaged.text.templates import ChatTemplate
from jaxpaged.text.tokenizer import Tokenizer, ids_only_tokenizer, load_tokenizer

SHORT_TEXT = 2048  # characters that are encoded at once: a thread costs more
MAX_REQUEST_TEMPLATE = 65_536  # characters


class PromptTexts:
    """The text side of an engine: used in an event loop."""

    def __init__(self, inputs: InputProcessor, template: ChatTemplate | None):
        self._inputs, self._template = inputs, template

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The sources of the templates in use, by name; none where the model has none."""
        return {} if self._template is None else self._template.sources

    async def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Text and ids of a prompt; a long text in a worker thread."""
        if isinstance(prompt, str) and len(prompt) > SHORT_TEXT:
            return await asyncio.to_thread(self._inputs.encode, prompt)
        return self._inputs.encode(prompt)

    async def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        most: int | None = None,
        /,  # options have names that clients choose
        *,
        chat_template: str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """A conversation through the model's template or another one, in a worker thread.

        A text of over `most` characters is refused before it is encoded.
        """
        return await asyncio.to_thread(self._render, chat_template, messages, most, options)

    def _render(
        self,
        source: str | None,
        messages: Sequence[Mapping[str, Any]],
        most: int | None,
        options: Mapping[str, Any],
    ) -> dict[str, Any]:
        tokenizer = self._inputs.tokenizer
        if source is None:
            template = chat_template(self._template)
        else:
            template = request_template(source, tuple(tokenizer.special_tokens.items()))
        return render_chat(template, tokenizer, messages, most, **options)


def render_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    most: int | None = None,
    /,
    **options: Any,
) -> dict[str, Any]:
    """A conversation as `{"prompt": text, "prompt_token_ids": ids}`; see `render_literally`.

    Raises:
        RequestError: a message is no mapping, or the template refuses them.
    """
    for message in messages if isinstance(messages, Sequence) else (messages,):
        if not isinstance(message, Mapping):
            raise RequestError(
                f"a message is {type(message).__name__}: give mappings with role and content",
                param="messages",
            )
    text, ids = render_literally(template, tokenizer, messages, most, **options)
    return {"prompt": text, "prompt_token_ids": ids}


def chat_template(template: ChatTemplate | None) -> ChatTemplate:
    """The template, or a refusal that says what to do."""
    if template is None:
        raise RequestError(
            "this model has no chat template: use completions, or start with --chat-template FILE",
            param="messages",
        )
    return template


@lru_cache(maxsize=8)
def request_template(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    """A template that a request brings.

    Raises:
        RequestError: it is too long, or no template.
    """
    if len(source) > MAX_REQUEST_TEMPLATE:
        raise RequestError(
            f"chat_template has {len(source)} characters, allowed are {MAX_REQUEST_TEMPLATE}",
            param="chat_template",
        )
    try:
        return ChatTemplate(source, dict(special_tokens))
    except (ConfigError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
        said = str(error) if isinstance(error, ConfigError) else "it is nested too deep, or no text"
        raise RequestError(
            f"chat_template cannot be used: {said[:200]}", param="chat_template"
        ) from None


def tokenizer_for(settings: ModelSettings, path: Path) -> Tokenizer:
    """The model's own tokenizer, another one, or none: then only token ids are taken."""
    if settings.skip_tokenizer_init:
        return ids_only_tokenizer()
    return load_tokenizer(settings.tokenizer or path)


def template_for(settings: ModelSettings, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The operator's template, or the model's, or none.

    Raises:
        ConfigError: the file cannot be read, or is no template.
    """
    form = settings.chat_template_content_format
    if settings.chat_template is None:
        found = tokenizer.chat_templates
        return ChatTemplate(found, tokenizer.special_tokens, content=form) if found else None
    try:
        source = Path(settings.chat_template).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"chat_template {settings.chat_template} cannot be read: {error.strerror}"
        ) from error
    except ValueError:
        raise ConfigError(f"chat_template {settings.chat_template} is no UTF-8") from None
    return ChatTemplate(source, tokenizer.special_tokens, content=form)
