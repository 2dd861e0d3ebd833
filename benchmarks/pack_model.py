"""Carries a large file to another machine in parts, checked by SHA-256 at both ends.

    python benchmarks/pack_model.py split MODEL.gguf FOLDER [--part-mib 48]
    python benchmarks/pack_model.py join FOLDER MODEL.gguf

`split` writes MODEL.gguf.0, MODEL.gguf.1, ... and manifest.json into FOLDER. `join` writes the file
only when every part is there and right, and says which are not.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

MIB = 2**20


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def split(file: Path, folder: Path, part_bytes: int) -> list[str]:
    """The names of the parts written."""
    folder.mkdir(parents=True, exist_ok=True)
    parts, whole = {}, hashlib.sha256()
    with file.open("rb") as source:
        while data := source.read(part_bytes):
            name = f"{file.name}.{len(parts)}"
            (folder / name).write_bytes(data)
            parts[name] = digest(data)
            whole.update(data)
    manifest = {"file": file.name, "sha256": whole.hexdigest(), "parts": parts}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return list(parts)


def join(folder: Path, file: Path) -> None:
    """Put the parts together again.

    Raises:
        ValueError: parts that are missing or damaged, or a whole that is; nothing was written.
    """
    manifest = json.loads((folder / "manifest.json").read_text())
    wrong, whole = [], hashlib.sha256()
    partial = file.with_name(file.name + ".partial")
    with partial.open("wb") as target:
        for name, wanted in manifest["parts"].items():
            data = (folder / name).read_bytes() if (folder / name).is_file() else b""
            if digest(data) != wanted:
                wrong.append(f"{name} is {'damaged' if data else 'missing'}")
            whole.update(data)
            target.write(data)
    if not wrong and whole.hexdigest() != manifest["sha256"]:
        wrong.append("the whole has another SHA-256")
    if wrong:
        partial.unlink()
        raise ValueError(f"{folder}: {', '.join(wrong)}")
    partial.rename(file)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    splitting = commands.add_parser("split")
    splitting.add_argument("file", type=Path)
    splitting.add_argument("folder", type=Path)
    splitting.add_argument("--part-mib", type=int, default=48)
    joining = commands.add_parser("join")
    joining.add_argument("folder", type=Path)
    joining.add_argument("file", type=Path)
    args = parser.parse_args()
    if args.command == "split":
        print("\n".join(split(args.file, args.folder, args.part_mib * MIB)))
        return 0
    try:
        join(args.folder, args.file)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
