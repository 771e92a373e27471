"""Our encoders against PyTorch's, run now: new random models, gradients, and saved models. Skipped without torch."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxret.models.cross_encoder import (
    CrossEncoderModel,
    CrossEncoderModule,
    load_score_head,
    read_cross_encoder,
    save_cross_encoder,
)
from jaxret.models.encoders.architectures import make_encoder, read_config
from jaxret.models.encoders.layers import Compute
from jaxret.models.encoders.pretrained import load_pretrained, resolve_encoder, save_pretrained
from jaxret.models.encoders.selection import Selection
from jaxret.types import Tokens

torch = pytest.importorskip("torch", reason="PyTorch is only needed for live parity")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.exhaustive  # the stored outputs of torch are the quick test

VOCABULARY = 50
TINY_TOLERANCE = 1e-5  # absolute error of hidden states
BASE_TOLERANCE = 5e-5
GRADIENT_TOLERANCE = 1e-4  # relative to the largest entry of each gradient
IGNORE = ("pooler", "cls", "vocab_", "lm_head", "head.", "decoder")


def bert_config(**changes: Any) -> Any:
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
    return transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=20, **(sizes | changes))


def distilbert_config() -> Any:
    return transformers.DistilBertConfig(
        vocab_size=VOCABULARY, max_position_embeddings=20, dim=24, n_layers=3, n_heads=3, hidden_dim=40
    )


def modernbert_config(**changes: Any) -> Any:
    """Layers of all kinds, with a window of two tokens in each direction; the texts have up to nine."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 20}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    options = {"max_position_embeddings": 20, "local_attention": 4}
    return transformers.ModernBertConfig(vocab_size=VOCABULARY, **(sizes | special | options | changes))


def xlm_roberta_config() -> Any:
    return transformers.XLMRobertaConfig(
        **(
            bert_config().to_dict()
            | {"model_type": "xlm-roberta", "type_vocab_size": 1, "pad_token_id": 1}
            | {"bos_token_id": 0, "eos_token_id": 2}
        )
    )


MODELS = {
    "bert": lambda: transformers.BertModel(bert_config()),
    "bert with tanh gelu": lambda: transformers.BertModel(bert_config(hidden_act="gelu_new")),
    "bert with relu, one type": lambda: transformers.BertModel(bert_config(hidden_act="relu", type_vocab_size=1)),
    "bert, large epsilon": lambda: transformers.BertModel(bert_config(layer_norm_eps=1e-3)),
    "bert with MLM head": lambda: transformers.BertForMaskedLM(bert_config()),
    "distilbert": lambda: transformers.DistilBertModel(distilbert_config()),
    "roberta": lambda: transformers.RobertaModel(
        transformers.RobertaConfig(
            **(bert_config().to_dict() | {"model_type": "roberta", "type_vocab_size": 1, "pad_token_id": 1})
        )
    ),
    "xlm-roberta": lambda: transformers.XLMRobertaModel(xlm_roberta_config()),
    "xlm-roberta with MLM head": lambda: transformers.XLMRobertaForMaskedLM(xlm_roberta_config()),
    "modernbert": lambda: transformers.ModernBertModel(modernbert_config()),
    "modernbert, other layers": lambda: transformers.ModernBertModel(
        modernbert_config(
            global_attn_every_n_layers=2, local_attention=3, global_rope_theta=100.0, hidden_activation="gelu_new"
        )
    ),
    "modernbert with MLM head": lambda: transformers.ModernBertForMaskedLM(modernbert_config()),
    "distilbert with MLM head": lambda: transformers.DistilBertForMaskedLM(distilbert_config()),
}


def random_model(name: str, seed: int) -> Any:
    """A torch model in eval mode whose every parameter is random."""
    torch.manual_seed(seed)
    model = MODELS[name]().eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape)
    return model


def random_tokens(seed: int) -> Tokens:
    """Four rows of 1 to 9 tokens, padded on the right with 0; one row contains the id of RoBERTa's <pad>."""
    lengths = np.array([9, 4, 1, 6])
    ids = np.random.default_rng(seed).integers(2, VOCABULARY, (4, 9), np.int32)
    ids[0, 3] = 1
    mask = np.arange(9) < lengths[:, None]
    return Tokens(jnp.asarray(np.where(mask, ids, 0)), jnp.asarray(mask))


def torch_states(model: Any, tokens: Tokens) -> np.ndarray:
    """Every hidden state of a torch model, [L+1,B,T,H]."""
    ids = torch.tensor(np.asarray(tokens.ids), dtype=torch.long)
    mask = torch.tensor(np.asarray(tokens.mask), dtype=torch.long)
    with torch.no_grad():
        output = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    return torch.stack(output.hidden_states).numpy()


def distance(config: Any, params: Any, tokens: Tokens, expected: np.ndarray) -> float:
    """The largest difference between our states and `expected`, at real positions."""
    states = jax.jit(lambda p: make_encoder(config).apply({"params": p}, tokens, selection=Selection()).states)(params)
    assert states.shape == expected.shape
    assert np.isfinite(states).all()
    return float(np.abs(np.asarray(states) - expected)[:, np.asarray(tokens.mask)].max())


@pytest.mark.daily("modernbert")
@pytest.mark.parametrize("name", MODELS)
def test_a_fresh_random_model_has_equal_hidden_states(tmp_path: Path, name: str) -> None:
    model, tokens = random_model(name, seed=11), random_tokens(seed=12)
    model.save_pretrained(tmp_path)
    config, params = load_pretrained(tmp_path, ignore=IGNORE)
    assert distance(config, params, tokens, torch_states(model, tokens)) <= TINY_TOLERANCE
    other = torch_states(random_model(name, seed=13), tokens)
    assert distance(config, params, tokens, other) > TINY_TOLERANCE  # control: the weights matter


@pytest.mark.daily("bert-all")
@pytest.mark.parametrize(
    ("name", "layers"),
    [("bert", "last"), ("bert", "all"), ("distilbert", "last"), ("modernbert", "last"), ("modernbert", "all")],
)
def test_gradients_of_every_weight_equal_torch(tmp_path: Path, name: str, layers: Literal["last", "all"]) -> None:
    model, tokens = random_model(name, seed=21), random_tokens(seed=22)
    model.save_pretrained(tmp_path / "weights")
    config, params = load_pretrained(tmp_path / "weights")
    count = config.num_layers + 1 if layers == "all" else 1
    vectors = np.random.default_rng(23).normal(size=(count, config.hidden_size)).astype(np.float32)

    ids, mask = (torch.tensor(np.asarray(a), dtype=torch.long) for a in (tokens.ids, tokens.mask))
    states = model(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states[-count:]
    sum((state[:, 0] @ torch.tensor(vector)).sum() for state, vector in zip(states, vectors, strict=True)).backward()
    expected = {key: p.grad.numpy() for key, p in model.named_parameters() if p.grad is not None}

    def loss(p: Any) -> jax.Array:
        kept = make_encoder(config).apply({"params": p}, tokens, selection=Selection(1, layers=layers))
        return jnp.einsum("lbh,lh->", kept.states[:, :, 0], vectors, precision="highest")

    # A gradient has the shapes of the parameters, so saving it as a model gives it torch's names and layout.
    save_pretrained(tmp_path / "gradients", config, jax.jit(jax.grad(loss))(params))
    actual = load_file(tmp_path / "gradients" / "model.safetensors")
    assert actual.keys() == expected.keys()
    largest = max(float(np.abs(gradient).max()) for gradient in expected.values())
    for key, gradient in expected.items():
        scale = float(np.abs(gradient).max())
        if key.endswith(("key.bias", "k_lin.bias")):  # softmax ignores what all keys share: 0 except for rounding
            assert max(scale, float(np.abs(actual[key]).max())) <= 1e-5 * largest
            continue
        assert scale > 1e-4 * largest, f"{key}: control: a gradient near zero would prove nothing"
        np.testing.assert_allclose(actual[key], gradient, rtol=0, atol=GRADIENT_TOLERANCE * scale, err_msg=key)


@pytest.mark.daily("bert-BertModel")
@pytest.mark.parametrize(
    ("name", "auto"),
    [
        ("bert", "BertModel"),
        ("distilbert", "DistilBertModel"),
        ("xlm-roberta", "XLMRobertaModel"),
        ("modernbert", "ModernBertModel"),
        ("modernbert, other layers", "ModernBertModel"),
    ],
)
def test_transformers_loads_saved_files(tmp_path: Path, name: str, auto: str) -> None:
    model, tokens = random_model(name, seed=31), random_tokens(seed=32)
    model.save_pretrained(tmp_path / "theirs")
    config, params = load_pretrained(tmp_path / "theirs")
    save_pretrained(tmp_path / "ours", config, params)
    loaded, info = getattr(transformers, auto).from_pretrained(
        tmp_path / "ours", output_loading_info=True, local_files_only=True
    )
    assert all(key.startswith("pooler.") for key in info["missing_keys"])
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    original = model.state_dict()
    for key, tensor in loaded.state_dict().items():
        assert key.startswith("pooler.") or torch.equal(tensor, original[key]), key
    np.testing.assert_array_equal(torch_states(loaded.eval(), tokens), torch_states(model, tokens))
    assert isinstance(transformers.AutoModel.from_pretrained(tmp_path / "ours"), type(model))
    loaded_config = loaded.config.to_dict()
    changed = {key for key, value in model.config.to_dict().items() if loaded_config.get(key) != value}
    special = {f"{token}_token_id" for token in ("pad", "bos", "eos", "cls", "sep")} if "modernbert" in name else set()
    assert changed <= {"_name_or_path", "architectures", "dtype", "transformers_version"} | special


@pytest.mark.daily("distilbert")
@pytest.mark.parametrize("name", ["bert", "distilbert", "xlm-roberta", "modernbert"])
def test_mlm_logits_round_trip(tmp_path: Path, name: str) -> None:
    """A model of transformers has equal logits here, and our model has equal logits in transformers."""
    model, tokens = random_model(f"{name} with MLM head", seed=51), random_tokens(seed=52)
    model.save_pretrained(tmp_path / "theirs")
    ids, mask = (torch.tensor(np.asarray(a), dtype=torch.long) for a in (tokens.ids, tokens.mask))
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits.numpy()
    config: Any = read_config(tmp_path / "theirs")
    config, params = load_pretrained(tmp_path / "theirs", (), dataclasses.replace(config, mlm_head=True))

    def logits(module: Any) -> jax.Array:
        return module.mlm_head(module(tokens, Selection(layers="last")).states[-1], module.word_table)

    actual = jax.jit(lambda p: make_encoder(config).apply({"params": p}, method=logits))(params)
    scale = np.abs(expected).max()
    assert np.abs(actual - expected)[np.asarray(tokens.mask)].max() <= TINY_TOLERANCE * scale
    save_pretrained(tmp_path / "ours", config, params)
    loaded, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True, local_files_only=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        np.testing.assert_array_equal(loaded.eval()(input_ids=ids, attention_mask=mask).logits, expected)


@pytest.mark.daily("float16")
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_half_precision_weights_load_as_the_float32_they_stand_for(tmp_path: Path, name: str) -> None:
    model, tokens = random_model("bert", seed=41).to(getattr(torch, name)), random_tokens(seed=42)
    model.save_pretrained(tmp_path)
    config, params = load_pretrained(tmp_path)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    assert distance(config, params, tokens, torch_states(model.float(), tokens)) <= TINY_TOLERANCE


def test_minilm_has_equal_hidden_states_at_every_position(minilm_dir: Path) -> None:
    model = transformers.BertModel.from_pretrained(minilm_dir, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_dir, local_files_only=True)
    texts = ["where do eels spawn", "Eels spawn in the Sargasso Sea, a region of the Atlantic.", "eel"]
    batch = tokenizer(texts, padding=True, return_tensors="np")
    tokens = Tokens(jnp.asarray(batch["input_ids"], jnp.int32), jnp.asarray(batch["attention_mask"], bool))
    config, params = load_pretrained(minilm_dir)
    assert distance(config, params, tokens, torch_states(model, tokens)) <= BASE_TOLERANCE


def test_the_command_that_converts_a_pickle(tmp_path: Path) -> None:
    """The test copies the command from the error message into a shell, as a user would."""
    model = random_model("bert", seed=41)
    model.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    expected = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError) as error:
        resolve_encoder(str(tmp_path))
    command = str(error.value).splitlines()[-1].replace("python -c", f"{sys.executable} -c")
    subprocess.run(command, shell=True, check=True)
    tensors = load_file(resolve_encoder(str(tmp_path)) / "model.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(tensors[name].tobytes() == expected[name].tobytes() for name in tensors)


CLASSIFIERS = {
    "bert": lambda: transformers.BertForSequenceClassification(bert_config(num_labels=1)),
    "xlm-roberta": lambda: transformers.XLMRobertaForSequenceClassification(
        transformers.XLMRobertaConfig(
            **(xlm_roberta_config().to_dict() | {"id2label": {0: "LABEL_0"}, "label2id": {"LABEL_0": 0}})
        )
    ),
    "modernbert": lambda: transformers.ModernBertForSequenceClassification(modernbert_config(num_labels=1)),
    "modernbert, mean": lambda: transformers.ModernBertForSequenceClassification(
        modernbert_config(num_labels=1, classifier_pooling="mean")
    ),
}


@pytest.mark.daily("bert")
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_cross_encoder_scores_as_torch_does_and_is_read_back_by_it(name: str, tmp_path: Path) -> None:
    """The logit of one label is equal, with token types if the model has them; torch computes the same logit from our
    files."""
    torch.manual_seed(3)
    model = CLASSIFIERS[name]().eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape)
    model.save_pretrained(tmp_path / "torch")
    config = read_cross_encoder(tmp_path / "torch")
    _, encoder = load_pretrained(tmp_path / "torch", (*IGNORE, "classifier"), config)
    params = {"encoder": encoder, "head": load_score_head(tmp_path / "torch", config)}
    first = np.array([3, 2, 1, 6], np.int32)
    tokens = dataclasses.replace(random_tokens(5), first=jnp.asarray(first))
    ids, mask = (torch.tensor(np.asarray(x), dtype=torch.long) for x in (tokens.ids, tokens.mask))
    types = torch.tensor(np.arange(9) >= first[:, None], dtype=torch.long) if name == "bert" else None
    if name == "xlm-roberta":  # this model's padding id is 1, which determines positions
        ids = torch.where(mask.bool(), ids, 1)
        tokens = dataclasses.replace(tokens, ids=jnp.asarray(ids.numpy(), jnp.int32))

    def logits(model: Any) -> np.ndarray:
        with torch.no_grad():
            more = {} if types is None else {"token_type_ids": types}
            return model(input_ids=ids, attention_mask=mask, **more).logits[:, 0].numpy()

    score = jax.jit(CrossEncoderModel(CrossEncoderModule(config, Compute())).score)
    np.testing.assert_allclose(score(params, tokens), logits(model), atol=TINY_TOLERANCE)
    save_cross_encoder(tmp_path / "ours", config, params)
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours").eval()
    assert type(again) is type(model)
    np.testing.assert_allclose(logits(again), logits(model), atol=1e-6)
    other = dataclasses.replace(tokens, ids=tokens.ids.at[0, 1].add(-1))
    assert abs(float(score(params, other)[0]) - logits(model)[0]) > 1e-3, "control: another token gives another score"
