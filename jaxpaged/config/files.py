"""Small files of a model's folder: text and JSON that anybody may have written."""

import json
from pathlib import Path
from typing import Any, cast

from jaxpaged.errors import ConfigError


def read_text(file: Path) -> str:
    """The text of a file.

    Raises:
        ConfigError: it is no plain file (a pipe would be waited for), or no UTF-8.
    """
    if file.exists() and not file.is_file():
        raise ConfigError(f"{file.name} cannot be read: it is no plain file")
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file.name} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{file.name} cannot be read: {error}") from None


def read_json(file: Path) -> Any:
    """What a JSON file holds, all its texts being such that can be written again.

    Raises:
        ConfigError: as `read_text`, or it is no JSON.
    """
    text = read_text(file).removeprefix("\ufeff")
    try:
        content = json.loads(text)
        if "\\ud" in text.lower():  # half of a surrogate pair, perhaps
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file.name} cannot be read: {error}") from None
    return content


def read_object(file: Path) -> dict[str, Any]:
    """Likewise, of a JSON object; an empty one where the file is missing."""
    if not file.exists():
        return {}
    content = read_json(file)
    if not isinstance(content, dict):
        raise ConfigError(f"{file.name} holds a {type(content).__name__}, not an object")
    return cast("dict[str, Any]", content)
