"""What all verbs of the command line share: flags and help, a quiet terminal, compiled programs that are kept, and
errors in one sentence instead of a traceback.

Nothing here imports JAX: a mistake in the flags is told at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from absl import flags

from jaxret.shipped import load, locate, nearest, require_keys
from jaxret.storage import cache_folder

HELP = {"-h", "--h", "-help", "--help"}

INTERRUPTED = 130  # what a shell shows for a program that Ctrl-C ended
NO_READER = 141  # and for one that wrote to a closed pipe
UNEXPECTED = 70  # EX_SOFTWARE: a fault of the program, not of its input
CACHE_BYTES = 2 << 30  # of compiled programs kept

# These talk about their own work: dozens of lines for a save, a list of the accelerators that were not found.
_TALKATIVE = ("absl", "asyncio", "faiss", "faiss.loader", "orbax", "tensorboardX", "transformers")


@contextmanager
def user_errors() -> Iterator[None]:
    """Prints an error as `error: ...` and exits with 1, an unexpected one with 70; JAXRET_DEBUG=1 shows tracebacks."""
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt as error:
        if _debugging():
            raise
        print("interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from error
    except BrokenPipeError as error:  # `jaxret search ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains once more when it flushes at the end
        raise SystemExit(NO_READER) from error
    except Exception as error:
        if _debugging():
            raise
        told = sentence(error)
        if told:
            print(f"error: {told}", file=sys.stderr)
            if _lost_a_process(error):
                _end_at_once()
            raise SystemExit(1) from error
        first = _first_line(error)
        print(
            f"unexpected error: {type(error).__name__}: {first} (JAXRET_DEBUG=1 shows where; please report it)",
            file=sys.stderr,
        )
        raise SystemExit(UNEXPECTED) from error


def sentence(error: Exception) -> str:
    """What to tell of an error in input, config, files or the machine; "" for one that nobody foresaw."""
    first = _first_line(error)
    if _lost_a_process(error):  # JAX raises it as a ValueError, too, where a value is waited for
        return f"another process of this job is gone; the same command, given to all of them, goes on ({first})"
    if type(error).__name__ in ("XlaRuntimeError", "JaxRuntimeError"):
        if "RESOURCE_EXHAUSTED" in first:
            return f"the device is out of memory; smaller batches or chunks need less ({first})"
        return first
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    if isinstance(error, MemoryError):
        return f"out of memory{f' ({error})' if str(error) else ''}"
    if isinstance(error, (ValueError, OSError, ArithmeticError, EOFError)):
        return str(error) or type(error).__name__
    if isinstance(error, RuntimeError) and not isinstance(error, (NotImplementedError, RecursionError)):
        return _first_line(error)  # ours, or of JAX about its devices, which adds pages
    return ""


def _lost_a_process(error: Exception) -> bool:
    """Whether a collective operation broke because the other end of a connection is no longer there."""
    return bool(re.search(r"Gloo [\w -]+ failed: .*(closed by peer|reset by peer|refused)", _first_line(error)))


def _end_at_once() -> None:
    """JAX would first wait a minute for the process that is gone, and then abort with a dump."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _debugging() -> bool:
    return bool(os.environ.get("JAXRET_DEBUG"))


def quiet() -> None:
    """Leaves the terminal to our own bars and errors. JAX's warnings stay: they are about devices that are missed; what
    XLA logs, as of a program that takes minutes to compile, does not, but for debugging. Before JAX is imported."""
    if not _debugging():
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it advises to install PyTorch
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what goes wrong is told by us, in a sentence
    # JAX reports every accelerator that it does not find. Of the logger "jax" it would take over the level for XLA.
    logging.getLogger("jax._src").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"(orbax|tensorboardX|tokenizers|transformers)\b")
    warnings.filterwarnings("ignore", message="Error (reading|writing) persistent compilation cache")
    sys.unraisablehook = _tell_unraisable


def _tell_unraisable(found: Any) -> None:
    """As Python would, but for reads of a checkpoint that come back after one failed, which ended their event loop:
    each prints a traceback, and what failed is told in a sentence."""
    if str(found.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(found)


def keep_compiled() -> None:
    """Lets JAX keep compiled programs in the user's cache folder, so that the next start of the same job compiles
    nothing. JAX's own variables come first; JAXRET_COMPILATION_CACHE=0 turns it off. Must run before JAX is imported.

    JAX could bound the size itself, but then it never writes again after a kill between an entry and its time stamp.
    """
    if os.environ.get("JAXRET_COMPILATION_CACHE") == "0" or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    try:
        folder = cache_folder("compiled")
        folder.mkdir(parents=True, exist_ok=True)
        _prune(folder, CACHE_BYTES)
    except (OSError, RuntimeError):  # no home, or no room in it: compile as ever
        return
    if os.access(folder, os.W_OK):
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def _prune(folder: Path, limit: int) -> None:
    """Removes what was longest not read until the files hold at most `limit` bytes."""
    with os.scandir(folder) as entries:
        files = [(e.stat(), e.path) for e in entries if e.is_file(follow_symlinks=False)]
    total = sum(stat.st_size for stat, _ in files)
    for stat, path in sorted(files, key=lambda file: max(file[0].st_atime, file[0].st_mtime)):
        if total <= limit:
            return
        with contextlib.suppress(FileNotFoundError):  # another start prunes too
            os.unlink(path)
        total -= stat.st_size


def run_command(module: ModuleType, arguments: list[str]) -> None:
    """Parses the flags of a module of `jaxret.commands` and calls its `main`; with one of HELP, prints its help."""
    with user_errors():
        if HELP.intersection(arguments):
            print(help_text(module))
            return
        if "--helpfull" in arguments:
            print(flags.FLAGS.get_help())
            return
        given = parse(module, arguments)
        quiet()  # after the flags: absl sets its log level when they are parsed
        keep_compiled()
        module.main(*given)


def parse(module: ModuleType, arguments: list[str]) -> list[str]:
    """Fills flags.FLAGS and returns the arguments without a name; whatever is wrong is a ValueError that says what
    would be right."""
    if "config" in flags.FLAGS:
        arguments = _with_config(arguments)
    flags.FLAGS.set_gnu_getopt()  # flags and other arguments in any order
    try:
        given = flags.FLAGS(["jaxret", *arguments])[1:]
    except flags.UnrecognizedFlagError as error:
        known = [holder.name for holder in _own_flags(module)]
        raise ValueError(
            f"--{error.flagname} is no flag{nearest(error.flagname, known)} (--help lists them)"
        ) from error
    except flags.Error as error:
        raise ValueError(f"{_wrong_value(str(error))} (--help lists the flags)") from error
    known = list(_arguments(module))
    missing = [name for name in known[len(given) :] if not name.startswith("[")]
    if missing:
        raise ValueError(f"{' and '.join(missing)} must be given (--help says what it is)")
    if len(given) > len(known) and not (known and known[-1].endswith("...")):
        also = f"besides {' and '.join(known)} " if known else ""
        raise ValueError(f"what is {' '.join(given[len(known) :])!r}? {also}every argument is a flag: --name=value")
    return given


def _with_config(arguments: list[str]) -> list[str]:
    """The arguments with the path of the config's file for its name. Raises ValueError where ml_collections would show
    a traceback: for a file that is no config, and keys that it does not have."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] in ("-config", "--config"):  # its value is the next argument
            joined[-1] = f"--config={argument}"
        else:
            joined.append(argument)
    given = [argument for argument in joined if re.match(r"--?config(=|$)", argument)]
    keys = config_keys(joined)
    if not given:
        if keys:
            raise ValueError(f"--config.{keys[0]} needs a config to change: --config=NAME or --config=FILE.py")
        return arguments
    config = given[-1].partition("=")[2]
    require_keys(load(config), keys, config)
    return [f"--config={locate(config)}", *(argument for argument in joined if argument not in given)]


def config_keys(arguments: Iterable[str]) -> list[str]:
    """The keys of the config that a command line sets."""
    names = [argument.lstrip("-").partition("=")[0] for argument in arguments]
    return [name.removeprefix("config.") for name in names if name.startswith("config.")]


def _wrong_value(told: str) -> str:
    """absl's sentence; for a value of another type, which type it must be."""
    if missing := re.findall(r"Flag (--\w+) must have a value", told):
        return f"{' and '.join(missing)} must be given"
    found = re.match(r"flag (--([\w.]+)=.*?): ", told, re.DOTALL)
    kinds = {"int": "a whole number", "float": "a number", "bool": "true or false"}
    if not found or found[2] not in flags.FLAGS:
        return told
    parser: Any = flags.FLAGS[found[2]].parser
    if getattr(parser, "lower_bound", None) is not None:
        return f"{found[1]}: it must be a whole number of at least {parser.lower_bound}"
    kind = kinds.get(parser.flag_type())
    return f"{found[1]}: it must be {kind}" if kind else told.removeprefix("flag ")


def _own_flags(module: ModuleType) -> list[flags.FlagHolder]:
    """The flags that a module itself defines, in its order."""
    return [value for value in vars(module).values() if isinstance(value, flags.FlagHolder)]


def _arguments(module: ModuleType) -> dict[str, str]:
    """The arguments of a module that have no name, and what each is."""
    return getattr(module, "ARGUMENTS", {})


def help_text(module: ModuleType) -> str:
    """A module's docstring, its arguments, and its flags with meaning and default."""
    lines = [(module.__doc__ or "").strip(), ""]
    if _arguments(module):
        lines += ["Arguments:", *(f"  {name:<16} {meaning}" for name, meaning in _arguments(module).items()), ""]
    lines.append("Flags:")
    for holder in _own_flags(module):
        flag = flags.FLAGS[holder.name]
        value = ",".join(flag.default) if isinstance(flag.default, list) else flag.default
        required = any("must have a value" in validator.message for validator in flag.validators)
        default = " [required]" if required else "" if value in (None, "") else f" [{value}]"
        lines.append(f"  --{flag.name + '=':<14} {flag.help}{default}")
        if flag.name == "config":
            lines.append(f"  {'--config.KEY=':<16} any key of the config: configs/base.py has all, with their meaning")
    return "\n".join(lines)
