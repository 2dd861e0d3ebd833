"""Chat templates: a list of messages to the text that the model was trained on."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes

from jaxpaged.errors import ConfigError, RequestError, UnsupportedParameter
from jaxpaged.text.template_sandbox import Sandbox, check_size

RENDER_SECONDS = 2.0

# Names that a request must not set: they are arguments of rendering, or belong to the template.
RESERVED = frozenset((
    "add_generation_prompt", "bos_token", "chat_template", "continue_final_message",
    "conversation", "eos_token", "messages", "pad_token", "padding", "raise_exception",
    "return_dict", "return_tensors", "strftime_now", "tokenize", "tokenizer", "tokenizer_kwargs",
    "tools", "truncation", "unk_token",
))  # fmt: skip
# Names that clients send to any model; a template that does not read them is not harmed.
COMMON = frozenset((
    "add_vision_id", "builtin_tools", "custom_tools", "date_string", "documents",
    "enable_thinking", "python_tools", "reasoning_effort", "thinking", "thinking_budget",
    "tools_in_user_message", "xml_tools",
))  # fmt: skip

type Message = Mapping[str, Any]


class ChatTemplate:
    """A model's templates, compiled once. Rendering is safe from several threads.

    `content` says how they take the content of messages: as text, or in OpenAI's parts.

    Raises:
        ConfigError: a template that jinja2 cannot read.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        *,
        render_seconds: float = RENDER_SECONDS,
        content: Literal["auto", "string", "openai"] = "auto",
    ):
        sources = {"default": source} if isinstance(source, str) else dict(source)
        self.sources: Mapping[str, str] = sources
        self._sandbox = Sandbox()
        self._seconds = render_seconds
        self._special_tokens = dict(special_tokens or {})
        self._templates = {name: self._compile(name, text) for name, text in sources.items()}
        trees = [self._sandbox.parse(text) for text in sources.values()]
        self.variables = frozenset().union(*map(meta.find_undeclared_variables, trees))
        self.takes_parts = content == "openai"
        if content == "auto":
            self.takes_parts = any(map(_walks_content, trees))

    def _compile(self, name: str, source: str) -> Template:
        try:
            return self._sandbox.compile_checked(source)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"chat template {name!r} cannot be read: {error.message} in line {error.lineno}"
            ) from None

    def render(
        self,
        messages: Sequence[Message],
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The text of a conversation, special tokens written out: encode it without adding any.

        With `continue_final_message` the text ends with the last message's own words, for the model
        to go on from there. Other keywords are a request's `chat_template_kwargs`.

        Raises:
            UnsupportedParameter: a keyword that a request must not set.
            RequestError: the template refuses the messages, takes too long or makes too much text.
        """
        self._check_keywords(kwargs)
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt are both true: choose one",
                param="continue_final_message",
            )
        shown = [self._flatten(message) for message in messages]
        values: dict[str, Any] = {
            **self._special_tokens,
            **kwargs,
            "messages": shown,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
            "documents": kwargs.get("documents"),
        }
        text = self._run(self._choose(bool(tools)), values)
        return _cut_after(text, shown) if continue_final_message else text

    def _choose(self, has_tools: bool) -> Template:
        name = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise UnsupportedParameter(
                f"the model's chat templates are {sorted(self._templates)}, none of them a default",
                param="messages",
            )
        return self._templates[name]

    def _check_keywords(self, keywords: Iterable[str]) -> None:
        allowed = (self.variables | COMMON) - RESERVED
        for name in keywords:
            if name not in allowed:
                raise UnsupportedParameter(
                    f"chat_template_kwargs: {name!r} cannot be set; this model's template takes "
                    f"{', '.join(sorted(self.variables - RESERVED)) or 'none'}",
                    param="chat_template_kwargs",
                )

    def _flatten(self, message: Message) -> dict[str, Any]:
        """Content parts as the template wants them: a list where it walks one, else one text."""
        content = message.get("content")
        if self.takes_parts or not isinstance(content, list):
            return dict(message)
        return {**message, "content": "\n".join(part["text"] for part in content)}

    def _run(self, template: Template, values: dict[str, Any]) -> str:
        pieces: list[str] = []
        size = 0
        try:
            with self._sandbox.deadline(self._seconds):
                for piece in template.generate(values):
                    pieces.append(piece)
                    size += len(piece)
                    check_size(size)
        except TemplateError as error:
            raise RequestError(
                f"the chat template refuses this conversation: {error.message}", param="messages"
            ) from None
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise RequestError(
                f"the chat template cannot render this conversation ({type(error).__name__}): "
                "check the roles and the kinds of content",
                param="messages",
            ) from None
        except (RecursionError, MemoryError, OverflowError) as error:
            raise RequestError(
                f"the chat template does not end on this conversation ({type(error).__name__})",
                param="messages",
            ) from None
        return "".join(pieces)


def _walks_content(tree: nodes.Template) -> bool:
    """The template has a loop over the parts of a message's content."""
    return any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _is_content(walked: nodes.Node) -> bool:
    match walked:
        case nodes.Name(name="content") | nodes.Getattr(attr="content"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
    return False


def _cut_after(text: str, messages: Sequence[Message]) -> str:
    """Drop what the template wrote after the last message's own words."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list):
        content = content[-1]["text"] if content else None
    words = content.strip() if isinstance(content, str) else ""
    place = text.rfind(words) if words else -1
    if place < 0:
        raise RequestError(
            "continue_final_message: the template does not show the last message's content",
            param="continue_final_message",
        )
    return text[: place + len(words)]
