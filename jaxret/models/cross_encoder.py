"""Cross-encoders (Nogueira & Cho 2019): a query and a passage are read together and get one score.

A cross-encoder is an encoder with the head of transformers' classes for sequence classification with one label.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jaxtyping import Float
from ml_collections import ConfigDict

from jaxret.data.tokens.tokenizer import TextTokenizer
from jaxret.models.encoders.architectures import ARCHITECTURES, EncoderConfig, make_encoder, read_config
from jaxret.models.encoders.attention import ACTIVATIONS
from jaxret.models.encoders.layers import Compute, Dense, Dropout
from jaxret.models.encoders.layout import TokenLayout
from jaxret.models.encoders.pretrained import canonical, save_pretrained
from jaxret.models.encoders.selection import Selection
from jaxret.models.encoders.sentence_transformers import encoder_folder
from jaxret.models.encoders.stored import Classifier
from jaxret.models.encoders.weight_files import open_weights
from jaxret.models.heads.head import one_token_selection
from jaxret.models.model import LinenModel
from jaxret.models.retriever_model import check_compute
from jaxret.storage.atomic import read_json, write_json
from jaxret.storage.foreign_files import read_tensors, write_tensors
from jaxret.types import HiddenStates, Params, Tokens


class ScoreHead(nn.Module):
    """The hidden state of a pair -> its score: dense, activation, norm (in some architectures), dropout, dense.

    It computes in float32, because different scores in bfloat16 would often be equal.
    """

    form: Classifier
    dropout: float  # rate
    deviation: float  # standard deviation of initial kernels
    norm_eps: float

    @nn.compact
    def __call__(self, state: Float[jax.Array, "N H"], layout: TokenLayout) -> Float[jax.Array, " N"]:
        def dense(features: int, name: str, bias: bool = True) -> Dense:
            return Dense(features, Compute(), nn.initializers.normal(self.deviation), bias, name=name)

        state, form = state.astype(jnp.float32), self.form
        if form.dropout_before:
            state = Dropout(self.dropout, layout)(state)
        state = (ACTIVATIONS | {"tanh": jnp.tanh})[form.activation](
            dense(state.shape[-1], "dense", form.dense_bias)(state)
        )
        if form.norm:
            state = nn.LayerNorm(self.norm_eps, use_bias=False, use_fast_variance=False, name="norm")(state)
        return dense(1, "score")(Dropout(self.dropout, layout)(state))[:, 0]


class CrossEncoderModule(nn.Module):
    """The Linen module, with the parameters `encoder` and `head`."""

    config: EncoderConfig
    compute: Compute

    def setup(self) -> None:
        config: Any = self.config
        self.encoder = make_encoder(config, self.compute)
        dropout, eps = getattr(config, "hidden_dropout", 0.0), getattr(config, "norm_eps", 1e-5)
        self.head = ScoreHead(classifier(config), dropout, config.initializer_range, eps)

    def __call__(self, pairs: Tokens, train: bool) -> Float[jax.Array, " N"]:
        mean = getattr(self.config, "classifier_pooling", "cls") == "mean"
        hidden = self.encoder(pairs, one_token_selection("mean" if mean else "cls", "last"), train)
        return self.head(hidden.states[-1][:, 0], TokenLayout.of(replace(pairs, packing=None), train))

    def hidden_states(self, pairs: Tokens) -> HiddenStates:
        """Return the states of all layers and positions [L+1,N,T,H], without dropout."""
        return self.encoder(pairs, Selection())


@dataclass(frozen=True)
class CrossEncoderModel(LinenModel):
    """A model that scores pairs of texts, without parameters."""

    module: CrossEncoderModule

    def score(
        self, params: Params, pairs: Tokens, train: bool = False, dropout_key: jax.Array | None = None
    ) -> Float[jax.Array, " N"]:
        """Return a float32 score for each pair, which is transformers' logit.

        Args:
            pairs: token ids; `pairs.first` has the lengths of the queries.
            train: whether to use dropout.
            dropout_key: random key, required if `train`.
        """
        rngs = {"dropout": dropout_key} if train else None
        with jax.named_scope("pairs"):
            return self.module.apply({"params": params}, pairs, train, rngs=rngs)

    def hidden_states(self, params: Params, pairs: Tokens) -> HiddenStates:
        """Return all hidden states of the encoder [L+1,N,T,H], to inspect a model."""
        return self.plain.module.apply({"params": params}, pairs, method=CrossEncoderModule.hidden_states)

    def init(self, key: jax.Array) -> Params:
        """Return random parameters."""
        pairs = Tokens(jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool))
        return self.plain.module.init({"params": key, "dropout": key}, pairs, True)["params"]

    def contract(self) -> dict[str, Any]:
        """Return all settings that scores depend on, besides the parameters."""
        dtype = jnp.dtype(self.compute.dtype).name
        return {"encoder": {**asdict(self.module.config), "dtype": dtype}, "head": {"name": "cross_encoder"}}

    def check_tokenizer(self, tokenizer: TextTokenizer) -> None:
        """Raise ValueError for a tokenizer without [CLS]."""
        if tokenizer.cls_id is None:
            raise ValueError("a cross-encoder computes scores from [CLS], which the tokenizer does not have")

    def stored_head(self, root: Path) -> Params:
        """Return the stored parameters of the head: all of them, only the dense layer that is BERT's pooler, or {}."""
        return load_score_head(encoder_folder(root), self.module.config)


def require_passage_room(query_length: int, longest: int) -> None:
    """Raise ValueError if queries may be so long that a pair of `longest` tokens has no room for a passage."""
    if query_length + 3 > longest:
        raise ValueError(
            f"tokens.query_length (or --query_length) is {query_length}, which leaves no token for a passage. The "
            f"encoder reads {longest} tokens of a pair, so it may be {longest - 3} at most"
        )


def classifier(config: EncoderConfig) -> Classifier:
    """Return the form of an architecture's classification head. Raises ValueError if none is implemented."""
    form = ARCHITECTURES[config.model_type].classifier
    if form is None:
        names = ", ".join(name for name, architecture in ARCHITECTURES.items() if architecture.classifier)
        raise ValueError(f"no cross-encoder of {config.model_type} is implemented; use one of {names}")
    return form


def make_cross_encoder_model(config: ConfigDict, shapes: EncoderConfig) -> CrossEncoderModel:
    """Return the cross-encoder of a config with an encoder. Raises ValueError for combinations that are not
    supported."""
    classifier(shapes)
    return CrossEncoderModel(CrossEncoderModule(shapes, check_compute(config, shapes)))


def score_head_names(config: EncoderConfig) -> dict[str, str]:
    """Return {parameter path in the head: tensor name without the prefix of models with a head}."""
    form = classifier(config)
    names = {"dense/kernel": f"{form.dense}.weight", "dense/bias": f"{form.dense}.bias"}
    names |= {"norm/scale": f"{form.norm}.weight"}
    names |= {"score/kernel": f"{form.score}.weight", "score/bias": f"{form.score}.bias"}
    is_missing = {"dense/bias": not form.dense_bias, "norm/scale": not form.norm}
    return {parameter: name for parameter, name in names.items() if not is_missing.get(parameter)}


def load_score_head(directory: Path, config: EncoderConfig) -> Params:
    """Return the parameters of the head that are stored in a directory, float32 on the host. Raises ValueError for a
    weight without its bias, a wrong shape, NaN or infinity, and more than one label."""
    arrays: dict[str, np.ndarray] = {}
    prefix, size = ARCHITECTURES[config.model_type].prefix, config.hidden_size
    shapes = {"dense/kernel": (size, size), "score/kernel": (1, size), "score/bias": (1,)}
    names = score_head_names(config)
    with open_weights(directory) as weights:
        path, file_names = weights.path, {canonical(name, prefix): name for name in weights.files}
        for parameter, name in names.items():
            if name not in file_names:
                continue
            shape, expected_shape = weights.shape(file_names[name]), shapes.get(parameter, (size,))
            if shape != expected_shape:
                labels = f", a classifier of {shape[0]} labels" if parameter.startswith("score") and shape else ""
                raise ValueError(
                    f"{path}: {file_names[name]} has shape {shape}{labels}; {expected_shape} is needed: one score"
                )
            array = weights.array(file_names[name])
            arrays[parameter] = array.T if parameter.endswith("kernel") else array
    parts = {parameter.partition("/")[0] for parameter in arrays}
    for parameter in names:
        if parameter.partition("/")[0] in parts and parameter not in arrays:
            raise ValueError(f"{path} has no {names[parameter]}, although it has the other parameter of the layer")
    return traverse_util.unflatten_dict(arrays, sep="/")


def save_cross_encoder(directory: Path, config: EncoderConfig, params: Mapping[str, Any]) -> None:
    """Write config.json and model.safetensors of transformers' class for sequence classification with one label."""
    architecture, form = ARCHITECTURES[config.model_type], classifier(config)
    save_pretrained(directory, config, params["encoder"])
    path = directory / "model.safetensors"
    tensors = {architecture.prefix + name: array for name, array in read_tensors(path).items()}
    flat = traverse_util.flatten_dict(jax.device_get(dict(params["head"])), sep="/")
    for parameter, name in score_head_names(config).items():
        array = np.asarray(flat[parameter], np.float32)
        full_name = architecture.prefix + name if name.startswith(form.inside) and form.inside else name
        tensors[full_name] = array.T if parameter.endswith("kernel") else array
    write_tensors(path, tensors, {"format": "pt"})
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "problem_type": None}
    raw = read_json(directory / "config.json") | {"architectures": [form.class_name], **labels}
    write_json(directory / "config.json", raw)


def read_cross_encoder(directory: Path) -> EncoderConfig:
    """Return the encoder's config in a directory with a cross-encoder. Raises ValueError if its head is incomplete."""
    config = read_config(directory)
    missing_layers = {name.partition("/")[0] for name in score_head_names(config)} - load_score_head(
        directory, config
    ).keys()
    if missing_layers:
        names = ", ".join(
            name for path, name in score_head_names(config).items() if path.partition("/")[0] in missing_layers
        )
        raise ValueError(
            f"{directory}/model.safetensors is not a cross-encoder: {names} missing; jaxret train makes one"
        )
    return config
