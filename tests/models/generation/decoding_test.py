"""T5 with its decoder against transformers: weights, logits, greedy decoding, beam search; and sampling against
NumPy."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxret.models.generation.decoding import generate_tokens, sample_token
from jaxret.models.generation.decoding_options import DecodingOptions
from jaxret.models.generation.generator_weights import load_generator
from jaxret.models.generation.t5_decoder import T5Generator, empty_cache
from jaxret.types import Tokens
from tests.pipeline import save_generator

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH = 60, 14
KINDS = {"tied": "relu", "untied": "gated-gelu"}  # T5 v1.0; v1.1 and Flan-T5
TOLERANCE = 1e-4  # allowed error, relative to the largest logit


def make_original(kind: str, end_id: int = 1) -> Any:
    """A T5 of transformers with random parameters that are large enough for every nonlinearity to matter."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=6,
        d_ff=48,
        num_layers=3,
        num_decoder_layers=2,
        num_heads=4,
        feed_forward_proj=KINDS[kind],
        relative_attention_num_buckets=12,
        relative_attention_max_distance=9,
        pad_token_id=0,
        eos_token_id=end_id,
        decoder_start_token_id=0,
        **({} if kind == "tied" else {"tie_word_embeddings": False}),
    )
    model = transformers.T5ForConditionalGeneration(config)
    if kind == "untied":
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(VOCABULARY, 32))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in sorted(model.named_parameters()):
        scale = 1.0 if name == "shared.weight" and kind == "tied" else 0.3  # a tied output is divided by sqrt(32)
        parameter.data = ("norm" in name) + scale * torch.randn(parameter.shape, generator=generator)
    return model.eval()


@pytest.fixture(scope="module", params=KINDS)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, T5Generator, Any, Path]:
    """transformers' model, our module and its parameters, and the model's folder."""
    original = make_original(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    original.save_pretrained(folder)
    config, params = load_generator(folder)
    assert config.own_output == (request.param == "untied")
    assert config.scaled_output == (request.param == "tied")
    return original, T5Generator(config), params, folder


def make_source() -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([12, 1, 7, 2, 10])
    mask = np.arange(12) < lengths[:, None]
    return np.where(mask, np.random.default_rng(0).integers(2, VOCABULARY, mask.shape), 0), mask


def our_tokens() -> Tokens:
    ids, mask = make_source()
    return Tokens(jnp.asarray(ids, jnp.int32), jnp.asarray(mask))


def target_ids() -> np.ndarray:
    """Input ids for the decoder: the start token, then random tokens."""
    ids = np.random.default_rng(1).integers(2, VOCABULARY, (5, LENGTH))
    ids[:, 0] = 0
    return ids


def generate_ours(generator: T5Generator, params: Any, options: DecodingOptions, tokens: Tokens) -> np.ndarray:
    numbers = jnp.arange(len(tokens.ids), dtype=jnp.uint32)
    return np.asarray(jax.jit(partial(generate_tokens, generator, options))(params, tokens, numbers))


def without_fill(ids: np.ndarray, end_id: int, pad_id: int = 0) -> np.ndarray:
    """Ids with the padding id after the first end. If the padding id is 0, transformers' beam search writes the end id
    there."""
    ended = np.cumsum(ids == end_id, axis=-1) - (ids == end_id) > 0
    return np.where(ended, pad_id, ids)


def generate_torch(original: Any, options: DecodingOptions, end_id: int, **settings: Any) -> np.ndarray:
    ids, mask = make_source()
    settings |= {"do_sample": False, "max_new_tokens": options.query_length, "num_return_sequences": options.queries}
    settings |= {"eos_token_id": end_id, "pad_token_id": 0}
    sequences = original.generate(
        input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask).long(), **settings
    ).numpy()[:, 1:]
    sequences = np.pad(sequences, ((0, 0), (0, options.query_length - sequences.shape[1])))
    return without_fill(sequences.reshape(len(ids), options.queries, -1), end_id)


def common_token(generator: T5Generator, params: Any) -> int:
    """The token that greedy decoding chooses most often. As the end token, it gives sequences of several lengths."""
    config = replace(generator.config, end_id=VOCABULARY - 1)
    ids = generate_ours(T5Generator(config), params, DecodingOptions("greedy", query_length=LENGTH), our_tokens())
    rows = [sum(token in row for row in ids[:, 0].tolist()) * (token > 0) for token in range(VOCABULARY)]
    late = [min((row.index(t) for row in ids[:, 0].tolist() if t in row), default=0) for t in range(VOCABULARY)]
    return int(np.argmax(np.where(np.array(late) > 0, rows, 0)))


@pytest.mark.table
def test_logits_equal_torch(pair: Any) -> None:
    original, generator, params, _ = pair
    ids, mask = make_source()
    with torch.no_grad():
        expected = original(
            input_ids=torch.tensor(ids),
            attention_mask=torch.tensor(mask).long(),
            decoder_input_ids=torch.tensor(target_ids()),
        ).logits.numpy()
    targets = jnp.asarray(target_ids(), jnp.int32)

    def difference(generator: T5Generator, tokens: Tokens) -> float:
        logits = jax.jit(generator.apply)({"params": params}, tokens, targets)
        assert logits.dtype == jnp.float32
        return float(np.abs(logits - expected).max() / np.abs(expected).max())

    assert difference(generator, our_tokens()) <= TOLERANCE
    controls = {
        "mask": (generator.config, replace(our_tokens(), mask=jnp.ones((5, 12), bool))),
        "distance": (
            replace(generator.config, decoder=replace(generator.config.decoder, max_distance=30)),
            our_tokens(),
        ),
        "scale": (replace(generator.config, scaled_output=not generator.config.scaled_output), our_tokens()),
    }
    for name, (config, tokens) in controls.items():
        assert difference(T5Generator(config), tokens) > 10 * TOLERANCE, name


@pytest.mark.table
def test_steps_with_a_cache_equal_one_call(pair: Any) -> None:
    _, generator, params, _ = pair
    variables, targets = {"params": params}, jnp.asarray(target_ids(), jnp.int32)
    whole = jax.jit(generator.apply)(variables, our_tokens(), targets)
    source = jax.jit(partial(generator.apply, method="read"))(variables, our_tokens())
    decode = jax.jit(partial(generator.apply, method="decode"))

    def stepwise(shift: int) -> np.ndarray:
        cache, logits = empty_cache(generator.config.decoder, 5, LENGTH + shift, jnp.float32), []
        for step in range(LENGTH):
            one, cache = decode(variables, targets[:, step : step + 1], cache, jnp.int32(step + shift), source)
            logits.append(one)
        return np.concatenate(logits, axis=1)

    np.testing.assert_allclose(stepwise(0), whole, atol=TOLERANCE * float(jnp.abs(whole).max()))
    assert np.abs(stepwise(1) - whole).max() > 0.01, "control: an empty slot is read as a token"


@pytest.mark.slow
def test_greedy_decoding_equals_torch(pair: Any) -> None:
    original, generator, params, _ = pair
    end_id = common_token(generator, params)
    ours = T5Generator(replace(generator.config, end_id=end_id))
    options = DecodingOptions("greedy", query_length=LENGTH)
    ids = generate_ours(ours, params, options, our_tokens())
    lengths = (ids[:, 0] != 0).sum(axis=1)
    assert len(set(lengths.tolist())) > 1, "queries of several lengths"
    np.testing.assert_array_equal(ids, generate_torch(original, options, end_id))
    endless = generate_ours(generator, params, options, our_tokens())
    assert not np.array_equal(ids, endless), "control: sequences do not end without the end token"


LONG = pytest.mark.exhaustive
BEAM_SETTINGS = [  # (length_penalty, early_stopping)
    (1.0, False),
    (-1.0, True),
    *(
        pytest.param(*values, marks=LONG)
        for values in [(1.0, True), (0.0, False), (0.0, True), (2.0, False), (2.0, True)]
    ),
]


@pytest.mark.table
@pytest.mark.parametrize(("length_penalty", "early_stopping"), BEAM_SETTINGS)
def test_beam_search_equals_torch(pair: Any, length_penalty: float, early_stopping: bool) -> None:
    original, generator, params, _ = pair
    end_id = common_token(generator, params)
    ours = T5Generator(replace(generator.config, end_id=end_id))
    options = DecodingOptions(
        "beam",
        queries=3,
        beams=4,
        query_length=LENGTH,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    ids = generate_ours(ours, params, options, our_tokens())
    settings = {"num_beams": 4, "length_penalty": length_penalty, "early_stopping": early_stopping}
    np.testing.assert_array_equal(ids, generate_torch(original, options, end_id, **settings))
    if length_penalty < 0:
        assert 0 < (ids == end_id).any(axis=-1).mean() < 1, "some queries end, others have full length"
        other = generate_ours(ours, params, replace(options, length_penalty=2.0), our_tokens())
        assert not np.array_equal(ids, other), "control: the penalty has an effect"


@pytest.mark.table
def test_padding_rows_have_no_query(pair: Any) -> None:
    _, generator, params, _ = pair
    tokens = replace(our_tokens(), mask=our_tokens().mask.at[1].set(False))
    for method in ("greedy", "beam"):
        options = DecodingOptions(method, query_length=LENGTH)
        ids = generate_ours(generator, params, options, tokens)
        if method != "beam":
            assert not ids[1].any()
        others = [0, 2, 3, 4]
        expected = generate_ours(generator, params, options, our_tokens())
        np.testing.assert_array_equal(ids[others], expected[others])


def distribution_of_transformers(logits: np.ndarray, options: DecodingOptions) -> np.ndarray:
    """Return the distribution from which `generate` of transformers samples; it calls its processors in this order."""
    scores = torch.tensor(logits, dtype=torch.float32)[None]
    processors = [transformers.TemperatureLogitsWarper(options.temperature)]
    processors += [transformers.TopKLogitsWarper(options.top_k)] if options.top_k else []
    processors += [transformers.TopPLogitsWarper(options.top_p)] if options.top_p < 1 else []
    for process in processors:
        scores = process(None, scores)
    return torch.softmax(scores, -1)[0].numpy()


@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature"), [(0, 1.0, 1.0), (5, 1.0, 0.7), (0, 0.6, 1.3), (6, 0.5, 1.0)]
)
def test_samples_follow_the_distribution(top_k: int, top_p: float, temperature: float) -> None:
    draws = 40_000
    logits = np.random.default_rng(3).normal(size=12) * 1.5
    options = DecodingOptions(top_k=top_k, top_p=top_p, temperature=temperature)
    keys = jax.random.split(jax.random.key(0), draws)
    sampled = jax.vmap(partial(sample_token, options, jnp.asarray(logits, jnp.float32)))(keys)
    frequencies = np.bincount(sampled, minlength=12) / draws

    scaled = logits / temperature
    order = np.argsort(-scaled)
    kept = order[: top_k or None]
    probabilities = np.exp(scaled[kept]) / np.exp(scaled[kept]).sum()
    kept = kept[: int(np.searchsorted(np.cumsum(probabilities), top_p - 1e-9)) + 1]
    expected = np.zeros(12)
    expected[kept] = np.exp(scaled[kept]) / np.exp(scaled[kept]).sum()
    assert not frequencies[expected == 0].any()
    np.testing.assert_allclose(expected, distribution_of_transformers(logits, options), atol=1e-6)
    deviation = np.sqrt(expected * (1 - expected) / draws)
    assert (np.abs(frequencies - expected) <= 5 * deviation + 1e-12).all()
    plain = np.exp(logits) / np.exp(logits).sum()
    if (top_k, top_p, temperature) != (0, 1.0, 1.0):
        assert np.abs(frequencies - plain).max() > 0.02, "control: the options change the distribution"


@pytest.mark.table
def test_a_sample_depends_on_seed_and_number_and_not_on_the_batch(pair: Any) -> None:
    _, generator, params, _ = pair
    options = DecodingOptions("sample", queries=3, query_length=LENGTH, top_k=0, seed=7)
    tokens = our_tokens()
    ids = generate_ours(generator, params, options, tokens)
    np.testing.assert_array_equal(ids, generate_ours(generator, params, options, tokens))
    assert not np.array_equal(ids, generate_ours(generator, params, replace(options, seed=8), tokens))
    assert len({row.tobytes() for row in ids.reshape(-1, LENGTH)}) == 15, "samples of a text differ"
    part = jax.tree.map(lambda x: x[2:4], tokens)
    run = jax.jit(partial(generate_tokens, generator, options))
    np.testing.assert_array_equal(run(params, part, jnp.array([2, 3], jnp.uint32)), ids[2:4])
    assert not np.array_equal(run(params, part, jnp.array([0, 1], jnp.uint32)), ids[2:4]), (
        "control: other numbers give other samples"
    )


def test_saved_weights_are_the_same_bytes_and_transformers_reads_them(pair: Any, tmp_path: Path) -> None:
    original, generator, params, folder = pair
    save_generator(tmp_path, generator.config, params)
    stored, saved = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    copies = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}
    assert stored.keys() - saved.keys() <= copies
    assert all(saved[name].tobytes() == stored[name].tobytes() for name in saved)
    again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path)
    assert again.config.scale_decoder_outputs == generator.config.scaled_output
    for name, tensor in original.state_dict().items():
        np.testing.assert_array_equal(again.state_dict()[name], tensor, err_msg=name)
    assert load_generator(tmp_path)[0] == generator.config


def test_weights_in_parts(pair: Any, tmp_path: Path) -> None:
    original, generator, params, _ = pair
    original.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    config, loaded = load_generator(tmp_path)
    assert config == generator.config
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(FileNotFoundError, match=r"index\.json names model-00002"):
        load_generator(tmp_path)


@pytest.mark.parametrize("key", ["num_layers", "num_decoder_layers"])
def test_layers_are_compared_with_the_files_before_names_are_made(key: str, pair: Any, tmp_path: Path) -> None:
    _, generator, params, _ = pair
    save_generator(tmp_path, generator.config, params)
    raw = json.loads((tmp_path / "config.json").read_text())
    for layers, message in ((9_999, r"num_layers is 9,999, but model.safetensors"), (10**9, r"from 1 to 10,000")):
        (tmp_path / "config.json").write_text(json.dumps(raw | {key: layers}))
        with pytest.raises(ValueError, match=message):
            load_generator(tmp_path)


CHANGES: dict[str, tuple[dict[str, np.ndarray | None], str]] = {
    "missing": ({"decoder.block.1.layer.1.EncDecAttention.q.weight": None}, r"missing decoder\.block\.1\.layer\.1"),
    "unused": ({"decoder.block.2.layer.0.layer_norm.weight": np.ones(32, np.float32)}, r"unused decoder\.block\.2"),
    "shape": ({"decoder.final_layer_norm.weight": np.ones(31, np.float32)}, r"has shape \(31,\), config.json requires"),
    "copy": (
        {"decoder.embed_tokens.weight": np.ones((VOCABULARY, 32), np.float32)},
        r"decoder.embed_tokens.weight differs from shared.weight",
    ),
    "infinite": ({"decoder.final_layer_norm.weight": np.full(32, np.nan, np.float32)}, "holds NaN or infinity"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_do_not_fit_are_errors(pair: Any, tmp_path: Path, change: str) -> None:
    *_, folder = pair
    tensors = load_file(folder / "model.safetensors")
    for name, value in CHANGES[change][0].items():
        tensors.pop(name, None)
        tensors |= {} if value is None else {name: value}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(ValueError, match=CHANGES[change][1]):
        load_generator(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "mt5"}, r"model_type .*'mt5'; .*generated .*'t5'"),
        ({"eos_token_id": 99}, r"eos_token_id .*99; .*token .*60"),
        ({"num_decoder_layers": 0}, "num_layers is 0"),
        ({"relative_attention_max_distance": 6}, r"relative_attention_max_distance .*6; .*decoder .*6"),
        ({"scale_decoder_outputs": 1}, r"scale_decoder_outputs .*1; .*false"),
    ],
)
def test_configs_that_are_not_implemented(pair: Any, tmp_path: Path, values: dict[str, Any], message: str) -> None:
    *_, folder = pair
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | values))
    with pytest.raises(ValueError, match=message):
        load_generator(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "greedy", "queries": 2}, "greedy decoding returns one query"),
        ({"method": "beam", "queries": 5}, r"search .*4 beams"),
        ({"temperature": 0.0}, "temperature is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"method": "nucleus"}, "method is 'nucleus'"),
        ({"method": "beam", "temperature": 0.5}, r"temperature .*0.5, .*'sample' .*'beam'"),
        ({"method": "greedy", "seed": 3}, r"seed .*3, .*'sample' .*'greedy'"),
        ({"method": "greedy", "top_k": 0}, r"top_k .*0, .*'sample' .*'greedy'"),
        ({"beams": 8}, r"beams .*8, .*'beam' .*'sample'"),
        ({"early_stopping": True}, r"early_stopping .*True, .*'beam' .*'sample'"),
    ],
)
def test_options_that_conflict(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecodingOptions(**values)
