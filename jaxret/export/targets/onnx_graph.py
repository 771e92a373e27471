"""Builds an encoder as an ONNX graph with dynamic axes, node by node from its weights, without PyTorch or tracing.

It uses opset 17 (LayerNormalization, Erf) and IR 8, which every onnxruntime since 1.14 reads. Slice takes the first
rows of the table of positions, because Range and Gather pass onnx's checker but fail in onnxruntime. The computation is
that of `models/encoders/architectures/bert.py`, in float32, without dropout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxret.models.encoders.architectures.bert import BertConfig
from jaxret.models.encoders.layers import MASKED_LOGIT
from jaxret.models.encoders.protocol import EncoderConfig

OPSET, IR_VERSION = 17, 8
IN_ONE_FILE = 2**31 - 2**20  # a protobuf has less than 2 GiB: above this size, weights are in NAME.data
INSTALL = "pip install 'jaxret[export]'"


def require_onnx() -> Any:
    """Return the package onnx. Raises RuntimeError with the packages to install."""
    try:
        import onnx
    except ModuleNotFoundError as error:
        raise RuntimeError(f"--to=onnx needs the package onnx: {INSTALL}") from error
    return onnx


class Graph:
    """Nodes and weights of a graph. Values have names."""

    def __init__(self) -> None:
        self.onnx = require_onnx()
        self.nodes: list[Any] = []
        self.weights: dict[str, np.ndarray] = {}

    def __call__(self, operator: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        """Add a node, and return the name of its output."""
        name = name or f"{operator}_{len(self.nodes)}"
        self.nodes.append(self.onnx.helper.make_node(operator, list(inputs), [name], name, **attributes))
        return name

    def weight(self, name: str, value: Any) -> str:
        """Add a constant as float32 or int64, and return its name."""
        array = np.asarray(value)
        self.weights[name] = np.asarray(array, np.int64 if array.dtype.kind in "iu" else np.float32, order="C")
        return name

    def number(self, value: float) -> str:
        """Add a float32 constant without axes, and return its name."""
        return self.weight(repr(float(value)), np.float32(value))

    def integers(self, *values: int) -> str:
        """Add an int64 constant [len(values)], such as axes or a shape, and return its name."""
        return self.weight("_".join(map(str, ("int", *values))), np.array(values, np.int64))

    def dense(self, x: str, name: str, layer: Mapping[str, Any]) -> str:
        """Add x W, plus b if the layer has a bias, and return the name of the output.

        Args:
            x: name of the input.
            name: prefix of the names of the weights.
            layer: parameters of the layer, "kernel" [I,O] and perhaps "bias" [O].
        """
        product = self("MatMul", x, self.weight(f"{name}.kernel", layer["kernel"]))
        return self("Add", product, self.weight(f"{name}.bias", layer["bias"])) if "bias" in layer else product

    def norm(self, x: str, name: str, layer: Mapping[str, Any], epsilon: float) -> str:
        """Add a layer norm over the last axis, and return the name of the output.

        Args:
            x: name of the input.
            name: prefix of the names of the weights.
            layer: parameters of the layer, "scale" and "bias".
            epsilon: number added to the variance.
        """
        scale, bias = (self.weight(f"{name}.{part}", layer[part]) for part in ("scale", "bias"))
        return self("LayerNormalization", x, scale, bias, axis=-1, epsilon=epsilon)

    def save(self, path: Path, outputs: Mapping[str, Sequence[int | str]]) -> None:
        """Write and check the model. Its inputs are `input_ids` and `attention_mask` [batch,sequence]; `outputs` is
        {name: axes}."""
        helper, kinds = self.onnx.helper, self.onnx.TensorProto
        axes = ["batch", "sequence"]
        graph = helper.make_graph(
            self.nodes,
            path.stem,
            [helper.make_tensor_value_info(name, kinds.INT64, axes) for name in ("input_ids", "attention_mask")],
            [helper.make_tensor_value_info(name, kinds.FLOAT, list(sizes)) for name, sizes in outputs.items()],
            [self.onnx.numpy_helper.from_array(array, name) for name, array in self.weights.items()],
        )
        opsets = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(graph, producer_name="jaxret", opset_imports=opsets, ir_version=IR_VERSION)
        large = sum(array.nbytes for array in self.weights.values()) > IN_ONE_FILE
        options = {"save_as_external_data": True, "location": f"{path.name}.data"} if large else {}
        self.onnx.save_model(model, str(path), **options)
        self.onnx.checker.check_model(str(path), full_check=True)


def require_bert(config: EncoderConfig) -> BertConfig:
    """Return the config if it is the config of a BERT. Raises ValueError for other encoders."""
    if isinstance(config, BertConfig):
        return config
    raise ValueError(
        f"--to=onnx writes BERT, DistilBERT, RoBERTa and XLM-RoBERTa; a graph of {config.model_type} cannot be written "
        "here: use --to=hf, and export the result with optimum"
    )


def hidden_states(graph: Graph, config: BertConfig, params: Mapping[str, Any]) -> list[str]:
    """Add the nodes of the encoder. Return the names of its states [batch,sequence,H], from the embeddings on."""
    states, mask = [_embeddings(graph, config, params["embeddings"])], _key_mask(graph)
    layers = params["layers"]
    for index in range(config.num_layers):
        states.append(_layer(graph, config, f"layers.{index}", _layer_params(layers, index), states[-1], mask))
    return states


def _layer_params(tree: Any, index: int) -> Any:
    return {
        name: _layer_params(part, index) if isinstance(part, Mapping) else part[index] for name, part in tree.items()
    }


def _key_mask(graph: Graph) -> str:
    """Add the mask of real keys [batch,1,1,sequence], and return its name."""
    real = graph("Greater", "attention_mask", graph.weight("int_0d", np.int64(0)))
    return graph("Unsqueeze", real, graph.integers(1, 2))


def _embeddings(graph: Graph, config: BertConfig, params: Mapping[str, Any]) -> str:
    word = graph("Gather", graph.weight("embeddings.word", params["word"]["embedding"]), "input_ids")
    table = graph.weight("embeddings.position", params["position"]["embedding"])
    if config.first_position:  # RoBERTa counts tokens that are not padding, from the id of padding + 1 on
        padding = graph.weight("padding", np.int64(config.first_position - 1))
        real = graph("Cast", graph("Not", graph("Equal", "input_ids", padding)), to=graph.onnx.TensorProto.INT64)
        ordinals = graph("Mul", graph("CumSum", real, graph.weight("int_1d", np.int64(1))), real)
        position = graph("Gather", table, graph("Add", ordinals, padding))
    else:
        length = graph("Slice", graph("Shape", "input_ids"), graph.integers(1), graph.integers(2))
        position = graph("Slice", table, graph.integers(0), length)
    total = graph("Add", word, position)
    if config.type_vocab_size:
        total = graph("Add", total, graph.weight("embeddings.type", params["type"]["embedding"][0]))
    return graph.norm(total, "embeddings.norm", params["norm"], config.layer_norm_eps)


def _layer(graph: Graph, config: BertConfig, name: str, params: Mapping[str, Any], hidden: str, mask: str) -> str:
    attention = _attention(graph, config, f"{name}.attention", params["attention"], hidden, mask)
    norm_name = f"{name}.attention_norm"
    hidden = graph.norm(graph("Add", hidden, attention), norm_name, params["attention_norm"], config.layer_norm_eps)
    wide = _activation(graph, config, graph.dense(hidden, f"{name}.intermediate", params["intermediate"]))
    narrow = graph.dense(wide, f"{name}.output", params["output"])
    return graph.norm(graph("Add", hidden, narrow), f"{name}.norm", params["output_norm"], config.layer_norm_eps)


def _attention(graph: Graph, config: BertConfig, name: str, params: Mapping[str, Any], hidden: str, mask: str) -> str:
    width = config.head_size

    def heads(part: str, order: list[int]) -> str:
        flat = graph.dense(hidden, f"{name}.{part}", params[part])
        return graph("Transpose", graph("Reshape", flat, graph.integers(0, 0, config.num_heads, width)), perm=order)

    query = graph("Mul", heads("query", [0, 2, 1, 3]), graph.number(width**-0.5))
    scores = graph("MatMul", query, heads("key", [0, 2, 3, 1]))
    weights = graph("Softmax", graph("Where", mask, scores, graph.number(MASKED_LOGIT)), axis=-1)
    context = graph("Transpose", graph("MatMul", weights, heads("value", [0, 2, 1, 3])), perm=[0, 2, 1, 3])
    flat_context = graph("Reshape", context, graph.integers(0, 0, config.hidden_size))
    return graph.dense(flat_context, f"{name}.output", params["output"])


def _activation(graph: Graph, config: BertConfig, x: str) -> str:
    if config.hidden_act == "relu":
        return graph("Relu", x)
    if config.hidden_act == "gelu":
        curve = graph("Erf", graph("Mul", x, graph.number(2**-0.5)))
    else:  # gelu_new, gelu_pytorch_tanh
        cube = graph("Mul", graph("Mul", graph("Mul", x, x), x), graph.number(0.044715))
        curve = graph("Tanh", graph("Mul", graph("Add", x, cube), graph.number(math.sqrt(2 / math.pi))))
    return graph("Mul", graph("Mul", x, graph.number(0.5)), graph("Add", curve, graph.number(1.0)))


def mixed_layers(graph: Graph, states: Sequence[str], weights: Mapping[int, float]) -> str:
    """Add sum_l w_l h_l, and return its name."""
    parts = [graph("Mul", states[layer], graph.number(weight)) for layer, weight in weights.items()]
    return graph("Sum", *parts) if len(parts) > 1 or set(weights.values()) != {1.0} else states[next(iter(weights))]


def pooled_state(graph: Graph, states: str, token: str) -> str:
    """Add the state [batch,H] for a value of head.token, and return its name."""
    if token == "cls":
        return graph("Gather", states, graph.weight("int_0d", np.int64(0)), axis=1)
    real = graph("Cast", graph("Unsqueeze", "attention_mask", graph.integers(2)), to=graph.onnx.TensorProto.FLOAT)
    if token != "mean":
        number = graph("CumSum", real, graph.weight("int_1d", np.int64(1)))  # number of real tokens up to each position
        count = graph("ReduceSum", real, graph.integers(1), keepdims=1)
        choice = graph("Equal", number, count)
        if token == "mean_without_first":
            later = graph("Greater", number, graph.number(1.0))
            choice = graph("Or", later, graph("Equal", count, graph.number(1.0)))
        real = graph("Mul", real, graph("Cast", choice, to=graph.onnx.TensorProto.FLOAT))
    is_real = graph("Greater", real, graph.number(0.0))
    total = graph("ReduceSum", graph("Where", is_real, states, graph.number(0.0)), graph.integers(1), keepdims=0)
    return graph("Div", total, graph("Max", graph("ReduceSum", real, graph.integers(1), keepdims=0), graph.number(1.0)))


def add_normalization(graph: Graph, x: str) -> str:
    """Add x scaled to length 1, and return its name."""
    squares = graph("ReduceSum", graph("Mul", x, x), graph.integers(-1), keepdims=1)
    return graph("Div", x, graph("Sqrt", graph("Max", squares, graph.number(1e-24))))
