"""BERT: its configuration translated, and the names of its weights."""

from collections.abc import Mapping
from typing import Any

from jaxpaged.config.architecture import EncoderConfig
from jaxpaged.errors import ConfigError
from jaxpaged.models.family import Place
from jaxpaged.models.fields import Fields

EMBEDS = ("BertModel", "BertForMaskedLM", "BertForPreTraining")
CLASSIFIES = "BertForSequenceClassification"
UNUSED = ("cls.", "pooler.dense.")  # what embedding needs nothing of: heads of the training
LAYER = {
    "attention.self.query.weight": Place("attention.qkv", ("q_rows", "embed"), "q"),
    "attention.self.key.weight": Place("attention.qkv", ("q_rows", "embed"), "k"),
    "attention.self.value.weight": Place("attention.qkv", ("q_rows", "embed"), "v"),
    "attention.self.query.bias": Place("attention.qkv_bias", ("q_rows",), "q"),
    "attention.self.key.bias": Place("attention.qkv_bias", ("q_rows",), "k"),
    "attention.self.value.bias": Place("attention.qkv_bias", ("q_rows",), "v"),
    "attention.output.dense.weight": Place("attention.out", ("embed", "embed")),
    "attention.output.dense.bias": Place("attention.out_bias", ("embed",)),
    "attention.output.LayerNorm.weight": Place("attention_norm.scale", ("embed",)),
    "attention.output.LayerNorm.bias": Place("attention_norm.bias", ("embed",)),
    "intermediate.dense.weight": Place("up", ("ffn", "embed")),
    "intermediate.dense.bias": Place("up_bias", ("ffn",)),
    "output.dense.weight": Place("down", ("embed", "ffn")),
    "output.dense.bias": Place("down_bias", ("embed",)),
    "output.LayerNorm.weight": Place("feed_forward_norm.scale", ("embed",)),
    "output.LayerNorm.bias": Place("feed_forward_norm.bias", ("embed",)),
}


def is_encoder(hf_config: Mapping[str, Any]) -> bool:
    """True where the configuration is that of a BERT-type encoder."""
    return hf_config.get("model_type") == "bert"


def translate(fields: Fields) -> EncoderConfig:
    """Read a BERT configuration.

    Raises:
        ConfigError: a field that is missing or not served.
    """
    given = fields.get("architectures")
    name = given[0] if isinstance(given, list) and given else EMBEDS[0]
    if name not in (*EMBEDS, CLASSIFIES):
        known = ", ".join((*EMBEDS, CLASSIFIES))
        raise ConfigError(f"{fields.source}: architecture {name} is not served, known are {known}")
    if fields.get("position_embedding_type") not in (None, "absolute"):
        fields.refuse("position_embedding_type", "served is absolute")
    if fields.get("is_decoder"):
        fields.refuse("is_decoder", "served are encoders")
    embed = fields.count("hidden_size", most=2**20)
    heads = fields.count("num_attention_heads", most=4096)
    if embed % heads:
        fields.refuse("hidden_size", f"num_attention_heads, {heads}, must divide it")
    return EncoderConfig(
        family="bert",
        vocab=fields.count("vocab_size"),
        embed=embed,
        ffn=fields.count("intermediate_size"),
        heads=heads,
        num_layers=fields.count("num_hidden_layers", most=4096),
        max_len=fields.count("max_position_embeddings", 512),
        token_types=fields.count("type_vocab_size", 2),
        norm_eps=fields.number("layer_norm_eps", 1e-12),
        activation=fields.activation("hidden_act", "gelu"),
        num_labels=_num_labels(fields) if name == CLASSIFIES else 0,
    )


def weight_names(config: EncoderConfig) -> dict[str, Place]:
    """Every tensor that a checkpoint must hold, by its name there without `bert.` before it."""
    embeddings = {
        "word_embeddings.weight": Place("tokens", ("vocab", "embed")),
        "position_embeddings.weight": Place("positions", ("positions", "embed")),
        "token_type_embeddings.weight": Place("types", ("token_types", "embed")),
        "LayerNorm.weight": Place("norm.scale", ("embed",)),
        "LayerNorm.bias": Place("norm.bias", ("embed",)),
    }
    names = {f"embeddings.{name}": place for name, place in embeddings.items()}
    for index in range(config.num_layers):
        for name, place in LAYER.items():
            path = f"layers.{index}.{place.path}"
            names[f"encoder.layer.{index}.{name}"] = Place(path, place.axes, place.part)
    if config.num_labels:
        names |= {
            "pooler.dense.weight": Place("classifier.pooler", ("embed", "embed")),
            "pooler.dense.bias": Place("classifier.pooler_bias", ("embed",)),
            "classifier.weight": Place("classifier.out", ("labels", "embed")),
            "classifier.bias": Place("classifier.out_bias", ("labels",)),
        }
    return names


def _num_labels(fields: Fields) -> int:
    labels = fields.get("id2label")
    number = len(labels) if isinstance(labels, Mapping) else fields.count("num_labels", 2)
    if number != 1:
        fields.refuse("id2label", "served are classifiers with one label, which score pairs")
    return 1
