"""How GPUs are linked with each other, as `nvidia-smi topo -m` says; and a warning where slowly."""

import logging
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from itertools import combinations

log = logging.getLogger(__name__)

TIMEOUT_S = 20.0
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU(\d+)")

# GPU and GPU to the word for their link: NV18 is 18 NVLinks; PIX, PXB, PHB, NODE, SYS go over PCIe
type Links = Mapping[tuple[int, int], str]


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """The links between GPUs in what `nvidia-smi topo -m` prints; empty where it has no matrix."""
    columns: list[str] | None = None
    links: dict[tuple[int, int], str] = {}
    for line in _ESCAPES.sub("", text).splitlines():
        words = line.split()
        if columns is None:
            if words and _GPU.fullmatch(words[0]):
                columns = words
        elif words and (row := _GPU.fullmatch(words[0])):
            for column, word in zip(columns, words[1:], strict=False):
                if (gpu := _GPU.fullmatch(column)) and gpu[1] != row[1]:
                    links[int(row[1]), int(gpu[1])] = word
    return links


def unlinked_pairs(links: Links, groups: Sequence[Sequence[int]]) -> list[tuple[int, int, str]]:
    """Pairs within a group that are not linked by NVLink, and what links them."""
    pairs = [pair for group in groups for pair in combinations(group, 2)]
    known = [(*pair, links[pair]) for pair in pairs if pair in links]
    return [pair for pair in known if not pair[2].startswith("NV")]


def warn_of_slow_links(groups: Sequence[Sequence[int]]) -> None:
    """Say which GPUs of a tensor-parallel group are not linked by NVLink, in driver's numbers."""
    if all(len(group) < 2 for group in groups):
        return
    slow = unlinked_pairs(parse_topology(ask_driver("topo", "-m")), groups)
    if slow:
        said = ", ".join(f"{a} and {b} ({word})" for a, b, word in slow)
        log.warning(
            "GPUs that share each layer are not linked by NVLink: %s; every layer waits for them "
            "twice: choose others by --device-ids, or -pp or -dp in place of -tp",
            said,
        )


def driver_ids(device_ids: Sequence[int]) -> list[int]:
    """JAX's numbers of GPUs as the driver's; empty where CUDA_VISIBLE_DEVICES has other names."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(device_ids)
    words = [word.strip() for word in visible.split(",")]
    if not all(word.isdigit() for word in words) or max(device_ids, default=-1) >= len(words):
        return []
    return [int(words[device_id]) for device_id in device_ids]


def ask_driver(*arguments: str) -> str:
    """What `nvidia-smi` prints; empty where there is none, or it fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
