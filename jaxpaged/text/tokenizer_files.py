"""Where a model keeps its tokenizer: a Hugging Face directory, or the metadata of a GGUF file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from jaxpaged.config.files import read_object, read_text
from jaxpaged.errors import ConfigError
from jaxpaged.text.gguf_metadata import read_gguf_metadata
from jaxpaged.text.gguf_vocabulary import build_vocabulary

SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# These classes put the BOS themselves, so add_bos_token false takes it away from the vocabulary's.
_PLACES_BOS = ("Llama", "Gemma", "CodeLlama")


@dataclass(frozen=True)
class TokenizerInfo:
    """What a model's files say about its tokens, beside the vocabulary itself."""

    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()  # any of these ends an answer
    pad_token_id: int | None = None
    adds_bos: bool | None = None  # None leaves it to the vocabulary's own post-processor
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # "bos_token" -> "<s>"
    chat_templates: Mapping[str, str] = field(default_factory=dict)  # "default" -> source


def load(
    path: str | Path, *, gguf_fields: Mapping[str, Any] | None = None
) -> tuple[RawTokenizer, TokenizerInfo]:
    """Read the vocabulary and what the files beside it say.

    `gguf_fields` are the metadata of a GGUF file that someone has read already.

    Raises:
        ConfigError: no tokenizer is there, or a file cannot be read; the text names it.
    """
    path = Path(path)
    if gguf_fields is not None or path.suffix == ".gguf":
        fields = read_gguf_metadata(path) if gguf_fields is None else gguf_fields
        return build_vocabulary(fields), _info_from_gguf(fields)
    if not path.is_dir():
        raise ConfigError(f"tokenizer: {str(path)!r} is neither a directory nor a .gguf file")
    raw = _raw_from_directory(path)
    return raw, _info_from_directory(path, raw)


def _raw_from_directory(path: Path) -> RawTokenizer:
    file = path / "tokenizer.json"
    if file.exists():
        text = read_text(file)
        try:
            return RawTokenizer.from_str(text)
        except Exception as error:  # the library raises this bare type
            raise ConfigError(f"tokenizer.json cannot be read: {error}") from None
    if not any((path / name).exists() for name in ("tokenizer.model", "vocab.json", "vocab.txt")):
        raise ConfigError(f"tokenizer: no tokenizer.json in {str(path)!r}")
    return _raw_from_transformers(path)


def _raw_from_transformers(path: Path) -> RawTokenizer:
    """Older layouts: transformers converts them, tokenizer.model by the sentencepiece package."""
    from transformers import AutoTokenizer  # takes seconds to import

    try:
        loaded = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except (ImportError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[:1]
        raise ConfigError(
            f"tokenizer: {str(path)!r} has no tokenizer.json and its older files cannot be "
            f"converted ({' '.join(reason)}): install sentencepiece, or save it as tokenizer.json"
        ) from None
    raw = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(raw, RawTokenizer):
        raise ConfigError(
            f"tokenizer: {str(path)!r} has no tokenizer.json; {type(loaded).__name__} makes none"
        )
    return raw


def _info_from_directory(path: Path, raw: RawTokenizer) -> TokenizerInfo:
    config = read_object(path / "tokenizer_config.json")
    special = read_object(path / "special_tokens_map.json") | config
    names = {name: text for name in SPECIAL_NAMES if (text := _token_text(special.get(name)))}
    ids = {name: raw.token_to_id(text) for name, text in names.items()}
    generation = read_object(path / "generation_config.json")
    model = read_object(path / "config.json")
    ends = _ids(generation.get("eos_token_id", model.get("eos_token_id")))
    ends |= _ids(ids.get("eos_token"))
    bos = ids.get("bos_token")
    return TokenizerInfo(
        bos_token_id=bos if bos is not None else _first_id(model.get("bos_token_id")),
        eos_token_ids=frozenset(ends),
        pad_token_id=ids.get("pad_token"),
        adds_bos=_adds_bos(config),
        special_tokens=names,
        chat_templates=_templates(path, config),
    )


def _adds_bos(config: Mapping[str, Any]) -> bool | None:
    wanted = config.get("add_bos_token")
    if wanted is False and not str(config.get("tokenizer_class", "")).startswith(_PLACES_BOS):
        return None
    return wanted if isinstance(wanted, bool) else None


def _token_text(value: Any) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _ids(value: Any) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0}


def _first_id(value: Any) -> int | None:
    return min(_ids(value), default=None)


def _templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; a file of its own wins over the one in tokenizer_config.json."""
    found = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(found, str):
        templates["default"] = found
    elif isinstance(found, list):
        for entry in found:
            named = (entry.get("name"), entry.get("template")) if isinstance(entry, Mapping) else ()
            match named:
                case (str() as name, str() as template):
                    templates[name] = template
                case _:
                    raise ConfigError(
                        "tokenizer_config.json: a chat_template has no name or no template"
                    )
    file = path / "chat_template.jinja"
    if file.exists():
        templates["default"] = read_text(file)
    return templates


def _info_from_gguf(fields: Mapping[str, Any]) -> TokenizerInfo:
    tokens = fields["tokenizer.ggml.tokens"]

    def token_id(name: str) -> int | None:
        value = fields.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) and 0 <= value < len(tokens) else None

    bos, pad = token_id("bos"), token_id("padding")
    ends = [token_id("eos"), token_id("eot"), token_id("eom")]
    named = {
        "bos_token": bos,
        "eos_token": ends[0],
        "unk_token": token_id("unknown"),
        "pad_token": pad,
    }
    template = fields.get("tokenizer.chat_template")
    return TokenizerInfo(
        bos_token_id=bos,
        eos_token_ids=frozenset(end for end in ends if end is not None),
        pad_token_id=pad,
        special_tokens={name: tokens[i] for name, i in named.items() if i is not None},
        chat_templates={"default": template} if template else {},
    )
