"""Configs of the package, and functions that load a config by its name or by the path of a file.

`configs/` at the root of the repository is a link to this folder. A config of your own may begin with
`from jaxret.configs.base import get_config`.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_flags.config_flags import ConfigFileFlagParser

from jaxret.configs.synonyms import suggest_name

FOLDER = Path(__file__).parent
NOT_CONFIGS = ("__init__.py", "options.py", "shared_options.py", "synonyms.py")  # modules of the folder that have no get_config


def config_names() -> list[str]:
    """Return the names that `load_config` takes: "mlr", "recipes/mlr_open_qa", ..."""
    paths = (path.relative_to(FOLDER) for path in FOLDER.rglob("*.py") if path.name not in NOT_CONFIGS)
    return sorted(path.with_suffix("").as_posix() for path in paths)


def find_config(config: str) -> str:
    """Return the path of a config file, with its :SUFFIX, for NAME or FILE.py, with or without a suffix.

    "configs/NAME.py" is a config of the package if no such file exists. Raises ValueError if there is none.
    """
    name, colon, suffix = config.partition(":")
    paths = [Path(name)] if name.endswith(".py") else [FOLDER / f"{name}.py"]
    if name.startswith("configs/"):
        paths.append(FOLDER / name.removeprefix("configs/"))
    for path in paths:
        if path.suffix == ".py" and path.is_file():
            return f"{path}{colon}{suffix}"
    names = [f"configs/{config}.py" if name.startswith("configs/") else config for config in config_names()]
    same_name = re.sub(r"\.(ya?ml|json|toml|cfg|ini)$", "", name)  # extensions of other libraries' configs
    suggestion = suggest_name(same_name, [*names, *map(str, Path(name).parent.glob("*.py"))])
    raise ValueError(
        f"--config={config}: there is no file {name!r} that ends in .py, and no config of that name is shipped"
        + (suggestion or f" ({', '.join(config for config in names if '/' not in config)}, ...)")
    )


def load_config(config: str) -> ConfigDict:
    """Return the config that `find_config` locates, locked: an unknown key is an error. Raises ValueError for any
    error in the file."""
    path, colon, suffix = find_config(config).partition(":")
    name = config.partition(":")[0]
    try:
        with warnings.catch_warnings():
            # ml_collections causes this warning; where warnings are errors, it would look like an error in the file.
            warnings.filterwarnings("ignore", message="the load_module", category=DeprecationWarning)
            return ConfigFileFlagParser("config").parse(f"{path}{colon}{suffix}")
    except Exception as error:  # the file may raise anything
        message = re.sub(r"^[A-Za-z]+Error: ", "", _describe(error).splitlines()[-1])
        if re.search(r"get_config\(\) takes 0 positional arguments", message):
            message = f"{name} takes no suffix: remove {colon + suffix!r}"
        raise ValueError(message if path in message or name in message else f"--config={config}: {message}") from error


def load_stages(config: str) -> list[Any]:
    """Return the stages of `jaxret recipe` from a config's `stages` function. Raises ValueError if there is none."""
    path, colon, suffix = find_config(config).partition(":")
    spec = spec_from_file_location("stages_of_a_config", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if hasattr(module, "stages"):
            # A function `stages` without a parameter returns the same stages for every suffix.
            takes = inspect.signature(module.stages).parameters
            return list(module.stages(suffix) if colon and takes else module.stages())
    except Exception as error:  # the file may raise anything
        raise ValueError(f"--config={config}: {path}: {_describe(error)}") from error
    raise ValueError(f"--config={config}: {path} has no function stages() (docs/mining.md describes it)")


def _describe(error: Exception) -> str:
    """Return the message of an error, or its class if the message is empty, as after an assert statement without a
    text."""
    return str(error).strip() or type(error).__name__


def change_config(config: ConfigDict, changes: Mapping[str, Any], source: str) -> ConfigDict:
    """Return a locked copy of a config with other values of some keys ({"train.steps": 10}). Raises ValueError for a
    key that a config of `source` does not have, and for a value of another type."""
    require_keys(config, changes, source)
    result = ConfigDict(config.to_dict()).lock()
    for key, value in changes.items():
        try:
            result.update_from_flattened_dict({key: value})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{key} cannot be {value!r}: {str(error).splitlines()[0]}") from error
    return result


def require_keys(config: ConfigDict, keys: Iterable[str], source: str, prefix: str = "") -> None:
    """Raise ValueError unless all of `keys` are keys of a config. A group of keys is not a key.

    Args:
        keys: keys with their groups: "optimizer.learning_rate".
        source: name of the config, for the message.
        prefix: text before each key in the message: "--config." on a command line.
    """
    valid_keys = list(all_keys(config))
    for key in keys:
        if any(name.startswith(f"{key}.") for name in valid_keys):
            raise ValueError(f"{prefix}{key} is a group of keys: set one of them, such as {prefix}{key}.KEY=VALUE")
        if key not in valid_keys:
            raise ValueError(f"{prefix}{key}: {source} has no such key{suggest_name(key, valid_keys)}")


def all_keys(tree: Any, prefix: str = "") -> Iterator[str]:
    """Yield the keys of a config or of a group of it, each with the groups around it: "optimizer.learning_rate"."""
    for key, value in tree.items():
        if hasattr(value, "items"):
            yield from all_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
