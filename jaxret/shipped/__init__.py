"""The configs of the repository, found by name wherever jaxret is. `configs/` is a link to the repository's folder; an
installed jaxret has the files themselves."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_flags.config_flags import ConfigFileFlagParser

FOLDER = Path(__file__).parent / "configs"


def names() -> list[str]:
    """What `load` knows by name: "mlr", "recipes/mlr_open_qa", ..."""
    return sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.py"))


def importable() -> None:
    """Lets a config, wherever it is, say `from configs.base import get_config`."""
    if (root := str(FOLDER.parent)) not in sys.path:
        sys.path.append(root)


def locate(config: str) -> str:
    """NAME or FILE.py, both perhaps with :SUFFIX -> the path of the file, with the suffix. "configs/NAME.py" is also
    found where there is no such folder. Raises ValueError."""
    name, colon, suffix = config.partition(":")
    places = [Path(name)] if name.endswith(".py") else [FOLDER.resolve() / f"{name}.py"]
    if name.startswith("configs/"):
        places.append(FOLDER.resolve() / name.removeprefix("configs/"))
    for path in places:
        if path.suffix == ".py" and path.is_file():
            return f"{path}{colon}{suffix}"
    known = [f"configs/{one}.py" if name.startswith("configs/") else one for one in names()]
    near = nearest(name, [*known, *map(str, Path(name).parent.glob("*.py"))])
    raise ValueError(
        f"--config={config}: there is no file {name!r} that ends in .py, and no config of that name is shipped"
        + (near or f" ({', '.join(one for one in known if '/' not in one)}, ...)")
    )


def load(config: str) -> ConfigDict:
    """The config that `locate` finds, locked: an unknown key is an error. Raises ValueError, whatever the file does."""
    path, colon, suffix = locate(config).partition(":")
    shown = config.partition(":")[0]
    importable()
    try:
        return ConfigFileFlagParser("config").parse(f"{path}{colon}{suffix}")
    except Exception as error:  # whatever the file does
        told = re.sub(r"^[A-Za-z]+Error: ", "", str(error).strip().splitlines()[-1])
        if re.search(r"get_config\(\) takes 0 positional arguments", told):
            told = f"{shown} takes no suffix: leave {colon + suffix!r} out"
        raise ValueError(told if path in told or shown in told else f"--config={config}: {told}") from error


def stages(config: str) -> list[Any]:
    """What a config's `stages` function says that `jaxret recipe` is to do. Raises ValueError if it has none."""
    path, colon, suffix = locate(config).partition(":")
    importable()
    spec = spec_from_file_location("stages_of_a_config", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "stages"):
        raise ValueError(f"--config={config}: {path} has no function stages() that says what they are (docs/mining.md)")
    try:
        takes = inspect.signature(module.stages).parameters  # one for all systems of its config need not ask which
        return list(module.stages(suffix) if colon and takes else module.stages())
    except Exception as error:  # whatever the file does
        raise ValueError(f"--config={config}: {path}: {error}") from error


def changed(config: ConfigDict, changes: Mapping[str, Any], source: str) -> ConfigDict:
    """A copy with other values of some keys ({"train.steps": 10}), locked. Raises ValueError for a key that a config of
    `source` does not have, and for a value of another type."""
    require_keys(config, changes, source)
    found = ConfigDict(config.to_dict()).lock()
    for key, value in changes.items():
        try:
            found.update_from_flattened_dict({key: value})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{key} cannot be {value!r}: {str(error).splitlines()[0]}") from error
    return found


def require_keys(config: ConfigDict, keys: Iterable[str], source: str) -> None:
    """Raises ValueError unless every one of `keys` is a key, and no group of keys, of a config of `source`."""
    known = list(_keys(config))
    for key in keys:
        if any(name.startswith(f"{key}.") for name in known):
            raise ValueError(f"--config.{key} is a group of keys: set one of them, as --config.{key}.KEY=VALUE")
        if key not in known:
            raise ValueError(f"--config.{key}: {source} has no such key{nearest(key, known)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" for the known name that is nearest, "" if none is near."""
    found = get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def _keys(tree: Any, prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if hasattr(value, "items"):
            yield from _keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
