"""Configs of the package, and functions that load a config by its name or by the path of a file.

`configs/` at the root of the repository is a link to this folder. A config of your own may begin with
`from jaxret.configs.base import get_config`.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import extract_tb
from types import CodeType, ModuleType
from typing import Any

from ml_collections import ConfigDict

from jaxret.configs.base import get_config as get_base
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
    """Return the config that `find_config` locates, locked: a key that configs/base.py does not have is an error.
    Raises ValueError for any error in the file."""
    path, colon, suffix = find_config(config).partition(":")
    name = config.partition(":")[0]
    with _errors_of(config, path):
        module = _load_module(path)
        if not hasattr(module, "get_config"):
            raise ValueError(f"{name} has no function get_config(), which returns the config")
        if colon and not inspect.signature(module.get_config).parameters:
            raise ValueError(f"{name} takes no suffix: remove {colon + suffix!r}")
        result = module.get_config(suffix) if colon else module.get_config()
        if not isinstance(result, ConfigDict):
            raise ValueError(f"get_config() of {name} returns {result!r}; end it with return config (a ConfigDict)")
        require_complete(result, name)
    return result.lock()


def load_stages(config: str) -> list[Any]:
    """Return the stages of `jaxret recipe` from a config's `stages` function. Raises ValueError if there is none."""
    path, colon, suffix = find_config(config).partition(":")
    with _errors_of(config, path):
        module = _load_module(path)
        if hasattr(module, "stages"):
            # A function `stages` without a parameter returns the same stages for every suffix.
            takes = inspect.signature(module.stages).parameters
            return list(module.stages(suffix) if colon and takes else module.stages())
    raise ValueError(f"--config={config}: {path} has no function stages() (docs/mining.md describes it)")


class _UncachedLoader(SourceFileLoader):
    """Compiles a file at each load. Python's cache would take a file for unchanged that was changed to another of the
    same size within a second."""

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def _load_module(path: str) -> ModuleType:
    """Return the module of a config file."""
    name = f"config {path}"
    spec = spec_from_file_location(name, path, loader=_UncachedLoader(name, path))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for their module there
    spec.loader.exec_module(module)
    return module


@contextmanager
def _errors_of(config: str, path: str) -> Iterator[None]:
    """Raise ValueError for any error in a config file, with the last line of the file that led to it."""
    try:
        yield
    except Exception as error:  # the file may raise anything
        message = _describe(error)
        if path in message or config.partition(":")[0] in message:
            raise ValueError(message) from error
        lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == path]
        place = f"line {lines[-1]}: " if lines else ""
        raise ValueError(f"--config={config}: {place}{message}") from error


def _describe(error: Exception) -> str:
    """Return the message of an error, or its class if the message is empty, as after an assert statement without a
    text."""
    message = str(error).strip() or type(error).__name__
    if match := re.match(r"Could not override field '(\w+)' .*?\. (.*) is of original type <class '(\w+)'>", message):
        value = repr(match[2]) if match[3] == "str" else match[2]
        return f"{match[1]} cannot be {value}: it must be {_describe_kind(message)}"
    return message


def _describe_kind(message: str) -> str:
    """Return the kind of value that ml_collections expects, from its message of a value of another type."""
    kind = message.rpartition("to type <class '")[2].partition("'")[0]
    return {
        "int": "a whole number",
        "float": "a number",
        "bool": "True or False",
        "str": "a text",
        "tuple": "a tuple, such as (1, 2)",
    }.get(kind, kind)


def change_config(config: ConfigDict, changes: Mapping[str, Any], source: str) -> ConfigDict:
    """Return a locked copy of a config with other values of some keys ({"train.steps": 10}). Raises ValueError for a
    key that a config of `source` does not have, and for a value of another type."""
    require_keys(config, changes, source)
    result = ConfigDict(config.to_dict()).lock()
    for key, value in changes.items():
        try:
            result.update_from_flattened_dict({key: value})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{key} cannot be {value!r}: it must be {_describe_kind(str(error))}") from error
    return result


def require_complete(config: ConfigDict, source: str) -> None:
    """Raise ValueError unless a config has the keys of configs/base.py, and no others. `source` is its name."""
    keys, valid_keys = set(all_keys(config)), list(all_keys(get_base()))
    if missing_keys := sorted({key.partition(".")[0] for key in valid_keys} - set(config)) or sorted({*valid_keys} - keys):
        raise ValueError(
            f"{source} lacks keys, such as {', '.join(missing_keys[:3])}: change the result of "
            "jaxret.configs.load_config(NAME)"
        )
    if unknown_keys := sorted(keys - {*valid_keys}):
        raise ValueError(f"{source} has a key that does not exist, {unknown_keys[0]}{suggest_name(unknown_keys[0], valid_keys)}")


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
