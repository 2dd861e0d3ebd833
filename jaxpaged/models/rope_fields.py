"""The rotary part of a configuration file, in its old and its new spelling."""

import math
from typing import cast, get_args

from jaxpaged.config.architecture import RopeConfig, RopeKind
from jaxpaged.models.fields import Fields

KINDS: tuple[str, ...] = get_args(RopeKind.__value__)
LAYER_TYPES = ("full_attention", "sliding_attention")


def read_rope(fields: Fields, *, theta: float, layer_type: str = LAYER_TYPES[0]) -> RopeConfig:
    """Translate `rope_parameters` (flat, or by layer type), or `rope_theta` with `rope_scaling`.

    `theta` is what applies when the file names none.
    """
    theta = fields.number("rope_theta", theta)
    name, part = _section(fields, layer_type)
    if part is None:
        return RopeConfig(theta)
    theta = part.number(f"{name}.rope_theta", theta)
    kind = part.get(f"{name}.rope_type") or part.get(f"{name}.type") or "default"
    if kind not in KINDS:
        known = ", ".join(KINDS)
        return fields.refuse(name, f"rope_type {kind!r} is not served, known are {known}")
    for owner, key in ((part, f"{name}.partial_rotary_factor"), (fields, "partial_rotary_factor")):
        if owner.get(key) not in (None, 1):
            owner.refuse(key, "only 1 is served")
    if kind == "default":
        return RopeConfig(theta)
    return _scaled(fields, part, name, theta, cast(RopeKind, kind))


def extended_len(fields: Fields, rope: RopeConfig) -> int:
    """Tokens that the positions support: what the file says, times what the scaling adds."""
    stated = fields.count("max_position_embeddings", 2048)
    if rope.kind in ("linear", "dynamic"):
        return int(stated * rope.factor)
    if rope.kind == "yarn":
        return int(rope.original_max_len * rope.factor)
    return stated


def _section(fields: Fields, layer_type: str) -> tuple[str, Fields | None]:
    for name in ("rope_scaling", "rope_parameters"):  # the old spelling wins, as in transformers
        part = fields.section(name)
        if part is None or not part.values:
            continue
        if not any(f"{name}.{key}" in part.values for key in LAYER_TYPES):
            return name, part
        inner = part.section(f"{name}.{layer_type}")
        return f"{name}.{layer_type}", inner
    return "", None


def _scaled(fields: Fields, part: Fields, name: str, theta: float, kind: RopeKind) -> RopeConfig:
    max_len = fields.count("max_position_embeddings", 2048)
    factor = part.number(f"{name}.factor")
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    if kind == "dynamic":
        return RopeConfig(theta, kind, factor, original_max_len=max_len)
    original = part.count(f"{name}.original_max_position_embeddings", max_len)
    if kind == "llama3":
        low, high = part.number(f"{name}.low_freq_factor"), part.number(f"{name}.high_freq_factor")
        if high <= low:
            part.refuse(f"{name}.high_freq_factor", f"it must be over low_freq_factor, {low:g}")
        return RopeConfig(theta, kind, factor, original, low_freq_factor=low, high_freq_factor=high)
    return RopeConfig(
        theta,
        kind,
        factor,
        original,
        beta_fast=part.number(f"{name}.beta_fast", 32.0),
        beta_slow=part.number(f"{name}.beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(part, name, factor),
        truncate=part.flag(f"{name}.truncate", True),
    )


def _yarn_attention_factor(part: Fields, name: str, factor: float) -> float:
    """How much cosine and sine grow, so that q . k keeps its temperature in the longer context."""

    def growth(strength: float) -> float:
        return 0.1 * strength * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = part.number(f"{name}.attention_factor", None)
    if given is not None:
        return given
    mscale = part.number(f"{name}.mscale", None)
    mscale_all_dim = part.number(f"{name}.mscale_all_dim", None)
    if mscale and mscale_all_dim:
        return growth(mscale) / growth(mscale_all_dim)
    return growth(1.0)
