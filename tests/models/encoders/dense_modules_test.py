"""Dense modules of sentence-transformers directories are layers of the dual encoder, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxret.export.targets.stock_modules import dense_config
from jaxret.models.heads import read_model_keys
from jaxret.storage.atomic import read_json, write_json
from tests import tiny
from tests.sentence_transformers import write_modules


def write_dense(folder: Path, matrix: np.ndarray, **settings: Any) -> None:
    folder.mkdir()
    save_file({"linear.weight": np.ascontiguousarray(matrix.T)}, folder / "model.safetensors")
    write_json(folder / "config.json", dense_config(matrix) | settings)


def directory(folder: Path, *matrices: np.ndarray, **settings: Any) -> Path:
    names = [f"{i}_Dense" for i in range(2, 2 + len(matrices))]
    write_modules(folder, more=[(name, "models.Dense") for name in names])
    for name, matrix in zip(names, matrices, strict=True):
        write_dense(folder / name, matrix, **settings)
    return folder


@pytest.mark.slow
def test_vectors_are_multiplied_by_the_dense_matrices(tmp_path: Path) -> None:
    matrices = [
        np.random.default_rng(i).normal(size=size).astype(np.float32) for i, size in enumerate([(32, 9), (9, 4)])
    ]
    folder = directory(tmp_path / "model", *matrices)
    assert read_model_keys(folder)["head.dual_encoder.dense"] == (9, 4)
    retriever = tiny.make_retriever({"head.dual_encoder.dense": (9, 4), "encoder.tied": True})
    stored = retriever.stored_head(folder)
    assert retriever.dimension == 4
    params, tokens = tiny.make_params(tiny.make_retriever({"encoder.tied": True})), tiny.make_tokens(3, 6)
    plain = tiny.make_retriever({"encoder.tied": True}).encode(params, tokens, "query").vectors
    small = [matrix[:16] if i == 0 else matrix for i, matrix in enumerate(matrices)]  # the tiny encoder has 16 numbers
    stored["dense_0"]["kernel"] = small[0]
    vectors = jax.jit(lambda p: retriever.encode(p, tokens, "passage").vectors)({**params, "head": stored})
    np.testing.assert_allclose(vectors, plain @ small[0] @ small[1], rtol=1e-4, atol=1e-4)


def test_a_directory_without_dense_modules_prints_nothing(tmp_path: Path) -> None:
    assert "head.dual_encoder.dense" not in read_model_keys(write_modules(tmp_path / "model"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bias": True}, r"2_Dense/config.json: bias is True; only False is implemented"),
        (
            {"activation_function": "torch.nn.modules.activation.Tanh"},
            r"activation_function is 'torch.*Tanh'; only '",
        ),
        ({"use_residual": True}, r"use_residual is True; only False"),
        ({"module_input_name": "token_embeddings"}, r"module_input_name is 'token_embeddings'; only 'sentence_embed"),
    ],
)
def test_dense_modules_with_bias_or_activation_are_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    folder = directory(tmp_path / "model", np.ones((32, 4), np.float32), **settings)
    with pytest.raises(ValueError, match=message):
        read_model_keys(folder)


def test_missing_values_have_the_librarys_defaults(tmp_path: Path) -> None:
    folder = directory(tmp_path / "model", np.ones((32, 4), np.float32))
    path = folder / "2_Dense" / "config.json"
    write_json(path, {key: value for key, value in read_json(path).items() if key != "activation_function"})
    with pytest.raises(ValueError, match=r"activation_function is 'torch.*Tanh'"):
        read_model_keys(folder)


def test_dense_sizes_that_do_not_match(tmp_path: Path) -> None:
    folder = directory(tmp_path / "model", np.ones((32, 4), np.float32), np.ones((5, 3), np.float32))
    with pytest.raises(ValueError, match=r"3_Dense: .*size 5; .*4"):
        read_model_keys(folder)
