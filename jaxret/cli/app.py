"""Run a verb of the command line: parse flags, print help, silence libraries, cache compiled programs, and report
errors in one sentence instead of a traceback.

Nothing here imports JAX, so that a wrong flag is reported without delay.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import reduce
from operator import getitem
from types import ModuleType
from typing import Any

from absl import flags

from jaxret.cli.flags import OptionFlags
from jaxret.configs import all_keys, find_config, load_config, require_keys
from jaxret.configs.synonyms import CONFIG_PREFIX, suggest_name
from jaxret.parallel.events import emit, show_texts_by
from jaxret.parallel.metrics_file import report_status, start_metrics_file
from jaxret.storage.atomic import cache_folder, require_disk_path
from jaxret.storage.buckets.address import is_bucket_address
from jaxret.storage.cache import trim_cache

HELP = {"-h", "--h", "-help", "--help"}
_MULTIPLE = ";\n    repeat this option to specify a list of values"  # what absl adds to the help of a flag

_TEXTS = {"filter", "passage", "prompt", "query", "title", "title_separator"}  # flags that are not paths
_OTHER_ADDRESSES = {*_TEXTS, "url", "bucket"}  # flags whose gs:// and s3:// are not replaced
_ANY_SCHEME = {*_TEXTS, "engine", "url"}  # flags in which any scheme is allowed

_QUIET = flags.DEFINE_bool("quiet", False, "print only results and errors: no progress, no notes")
_JSON = flags.DEFINE_bool("json", False, "print events as JSON lines, and all text on standard error (docs/events.md)")
_PROMETHEUS = flags.DEFINE_string(
    "prometheus", "", "file NAME.prom with progress, metrics and status, for Prometheus' node exporter (docs/events.md)"
)

# Exit statuses
INTERRUPT_STATUS = 130  # the status that shells use for Ctrl-C
NO_READER = 141  # the status that shells use for a closed pipe
FAULT_STATUS = 70  # EX_SOFTWARE: a fault of the program, not of its input

_SIGNAL_PAUSE = 0.05  # seconds until a signal that Python dropped is sent again

# Loggers that write dozens of lines for each saved checkpoint, or list the accelerators that were not found.
_VERBOSE_LOGGERS = ("absl", "asyncio", "faiss", "faiss.loader", "orbax", "tensorboardX", "transformers")


@contextmanager
def report_errors() -> Iterator[None]:
    """Print an error as `error: ...` and exit with status 1, or 70 for an unexpected error.

    JAXRET_DEBUG=1 shows tracebacks instead.

    Raises SystemExit with the status of the error.
    """
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt as error:
        if _debugging():
            raise
        _report("interrupted", "interrupted", INTERRUPT_STATUS)
        raise SystemExit(INTERRUPT_STATUS) from error
    except BrokenPipeError as error:  # the reader of the output has ended, as in `jaxret search ... | head`
        # Else Python reports a second error when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(NO_READER) from error
    except Exception as error:
        if _debugging():
            raise
        message = _with_addresses(describe_error(error))
        if message:
            _report(f"error: {message}", message, 1)
            if _lost_a_process(error):
                _end_at_once()
            raise SystemExit(1) from error
        first = f"{type(error).__name__}: {_first_line(error)}"
        _report(f"unexpected error: {first} (JAXRET_DEBUG=1 shows where; please report it)", first, FAULT_STATUS)
        raise SystemExit(FAULT_STATUS) from error


def _report(line: str, message: str, status: int) -> None:
    """Print a line on an error, and emit its event. A closed pipe does not change the exit status."""
    print(line, file=sys.stderr)
    report_status(status)
    with suppress(BrokenPipeError):
        emit("error", message=message, status=status)


def requests_events(arguments: Iterable[str]) -> bool:
    """Return whether --json is set. Flags are not parsed yet, because an error in a flag is an event, too."""
    values = [match for argument in arguments if (match := re.fullmatch(r"--?(no)?json(?:=(.*))?", argument))]
    return bool(values) and not values[-1][1] and (values[-1][2] or "true").lower() in ("true", "t", "1")


def describe_error(error: Exception) -> str:
    """Return a sentence about an error in input, config, files or the machine; "" for an unexpected error."""
    first = _first_line(error)
    if _lost_a_process(error):  # JAX may raise it as a ValueError
        return f"another process of this job is gone; run the same command on all hosts again to continue ({first})"
    if type(error).__name__ in ("XlaRuntimeError", "JaxRuntimeError"):
        if "RESOURCE_EXHAUSTED" in first:
            keys = "train.batch_size, train.chunk_size, encode.tokens_per_batch"
            return f"the device is out of memory; smaller batches or chunks need less ({keys}; {first})"
        return first
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    if isinstance(error, MemoryError):
        return f"out of memory{f' ({error})' if str(error) else ''}"
    if isinstance(error, (ValueError, OSError, ArithmeticError, EOFError)):
        return str(error) or type(error).__name__
    if _has_no_devices(error):
        platforms = os.environ.get("JAX_PLATFORMS", "")
        return f"JAX has no device of JAX_PLATFORMS={platforms}; unset it, or install JAX for it (jaxret doctor)"
    if isinstance(error, RuntimeError) and not isinstance(error, (NotImplementedError, RecursionError)):
        return _first_line(error)  # JAX adds pages to errors about its devices
    return ""


def _has_no_devices(error: Exception) -> bool:
    """Return whether JAX failed while it looked for its devices, without a message."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    file = trace.tb_frame.f_code.co_filename if trace else ""
    return isinstance(error, AssertionError) and file.endswith("xla_bridge.py")


def _lost_a_process(error: Exception) -> bool:
    """Return whether a collective operation failed because another process closed its connection."""
    return bool(re.search(r"Gloo [\w -]+ failed: .*(closed by peer|reset by peer|refused)", _first_line(error)))


def _end_at_once() -> None:
    """Exit without JAX's shutdown, which would wait a minute for the lost process, and then abort with a core dump."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _debugging() -> bool:
    return bool(os.environ.get("JAXRET_DEBUG"))


def silence_libraries() -> None:
    """Silence the logs of libraries, so that the terminal shows only jaxret's progress bars and errors.

    Must run before JAX is imported. JAX's warnings about missing devices are still shown. XLA's logs, such as the
    warning about a program that takes minutes to compile, are shown only with JAXRET_DEBUG=1.
    """
    if not _debugging():
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # transformers advises to install PyTorch
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in _VERBOSE_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # jaxret reports the errors itself
    # At level INFO, JAX reports every accelerator that it does not find. The logger is not "jax": JAX copies its level
    # to XLA.
    logging.getLogger("jax._src").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"(orbax|tensorboardX|tokenizers|transformers)\b")
    warnings.filterwarnings("ignore", message="Error (reading|writing) persistent compilation cache")
    sys.unraisablehook = _report_unraisable


def _report_unraisable(unraisable: Any) -> None:
    """Report an unraisable error, except from reads of a checkpoint that finish after another read failed and closed
    their event loop: the first failure is already reported in a sentence.

    If Ctrl-C or SIGTERM arrives during a callback of the garbage collector (JAX has one), Python drops its exception.
    The signal is sent again, from a thread and after a pause, when the callback has returned.
    """
    if isinstance(unraisable.exc_value, KeyboardInterrupt | SystemExit):
        number = signal.SIGINT if isinstance(unraisable.exc_value, KeyboardInterrupt) else signal.SIGTERM
        threading.Timer(_SIGNAL_PAUSE, os.kill, (os.getpid(), number)).start()
    elif str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def shorten_spinning() -> None:
    """Let threads of NumPy's OpenBLAS wait for work for 2^16 cycles of a processor, and then sleep.

    By default they spin for 2^26 cycles (a tenth of a second) at the import of NumPy and after each large product, on
    cores that XLA needs. Must run before NumPy is imported; the user's own value takes precedence.
    """
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "16")


def shorten_exit() -> None:
    """Let the interpreter exit without its last garbage collections, which take 0.2 s over the objects of JAX."""
    atexit.register(gc.freeze)


def enable_compilation_cache() -> None:
    """Let JAX cache compiled programs in the user's cache folder, so that the same job compiles nothing when it starts
    again.

    Must run before JAX is imported. JAX's own variables take precedence; JAXRET_COMPILATION_CACHE=0 turns the cache
    off. jaxret limits the size itself, because with JAX's own limit, JAX stops writing if a process was killed between
    writing an entry and its time stamp.
    """
    if os.environ.get("JAXRET_COMPILATION_CACHE") == "0" or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    try:
        folder = cache_folder("compiled")
        folder.mkdir(parents=True, exist_ok=True)
        trim_cache(folder, "compiled")
    except (OSError, RuntimeError):  # no home folder, or no space in it: compile without a cache
        return
    if os.access(folder, os.W_OK):
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def run_command(module: ModuleType, arguments: list[str]) -> None:
    """Parse the flags of a module of `jaxret.cli` and call its `main`; print its help if one of HELP is an argument."""
    try:
        with report_errors():
            _run_command(module, arguments)
    except SystemExit as error:
        report_status(error.code if isinstance(error.code, int) else int(error.code is not None))
        raise
    report_status(0)


def _run_command(module: ModuleType, arguments: list[str]) -> None:
    if HELP.intersection(argument.partition("=")[0] for argument in arguments):
        print(help_text(module))
        return
    if "--helpfull" in arguments:
        print(flags.FLAGS.get_help())
        return
    positional = parse_flags(module, arguments)
    require_utf8([*arguments, _working_directory()])
    require_known_schemes(arguments)
    silence_libraries()  # after parsing, where absl sets its log level
    shorten_spinning()
    shorten_exit()
    enable_compilation_cache()
    if _QUIET.value:
        from jaxret.parallel.progress import be_quiet

        be_quiet()
    if _PROMETHEUS.value:
        start_metrics_file(_PROMETHEUS.value, module.__name__.rpartition(".")[2].replace("_", " "))
    # An address may follow a format, as in FORMAT:gs://...
    if any(re.search(r"\b(gs|s3)://", argument) for argument in arguments):
        sys.stdout, sys.stderr = _AddressStream(sys.stdout), _AddressStream(sys.stderr)
        show_texts_by(_with_addresses)
    positional = _fetch_addresses(module, positional)
    try:
        module.main(*positional)
    except SystemExit:  # ended in order, as by SIGTERM
        _publish()
        raise
    _publish()


def _working_directory() -> str:
    """Return the working directory; "" if it was deleted, which affects only relative paths."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def require_utf8(arguments: Iterable[str]) -> None:
    """Raise ValueError for an argument with bytes that are not UTF-8, which Python represents as lone surrogates. Paths
    are recorded in JSON, and tokenizers need UTF-8. Questions are checked where they are read."""
    for argument in arguments:
        byte = next((ord(character) - 0xDC00 for character in argument if "\udc80" <= character <= "\udcff"), 0)
        if byte and not argument.startswith(("--query=", "--passage=")):
            text = os.fsencode(argument).decode(errors="backslashreplace")
            raise ValueError(f"{text} holds byte 0x{byte:02x}, which is not UTF-8; rename the file or folder")


class _AddressStream:
    """A text stream that shows addresses in place of the paths of working copies."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(_with_addresses(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _fetch_addresses(module: ModuleType, positional: list[str]) -> list[str]:
    """Replace the addresses of folders and files in buckets by the paths of their working copies, in the flags and in
    the positional arguments. Return the positional arguments."""
    if getattr(module, "OPENS_ADDRESSES", False):
        return positional
    holders = {holder.name: holder for holder in _verb_flags(module) if holder.name not in _OTHER_ADDRESSES}
    values = [*(holder.value for holder in holders.values()), *positional]
    addresses = sorted({address for value in values for address in _addresses_in(value)}, key=len)
    if not addresses:
        return positional
    from jaxret.storage.buckets.working_copy import copy_of, local_path

    paths = {address: str(local_path(address)) for address in addresses}  # a run before its files
    arguments = {name: holder.value for name, holder in holders.items()} | dict(zip(_arguments(module), positional))
    for name in getattr(module, "WRITES", ("out",)):
        if arguments.get(name) in paths and (copy := copy_of(arguments[name])):
            copy.require_writable()  # an error now, not after the work
    for name, holder in holders.items():
        if _addresses_in(holder.value):
            flags.FLAGS[name].value = _replace_addresses(holder.value, paths)
    return [_replace_addresses(value, paths) for value in positional]


def _addresses_in(value: Any) -> list[str]:
    """Return the addresses in the value of a flag or argument: ADDRESS, NAME=ADDRESS,ADDRESS, or a list of these."""
    if isinstance(value, list):
        return [address for item in value for address in _addresses_in(item)]
    if not isinstance(value, str):
        return []
    if is_bucket_address(value):
        return [value]
    return [part for part in value.partition("=")[2].split(",") if is_bucket_address(part)]


def _replace_addresses(value: Any, paths: Mapping[str, str]) -> Any:
    """Return the value of a flag or argument with paths for its addresses."""
    if isinstance(value, list):
        return [_replace_addresses(item, paths) for item in value]
    if value in paths:
        return paths[value]
    name, equals, parts = value.partition("=")
    return name + equals + ",".join(paths.get(part, part) for part in parts.split(","))


def require_known_schemes(arguments: Iterable[str]) -> None:
    """Raise ValueError for an argument with an address of an unsupported scheme. It would be read as a folder, such as
    "https:"."""
    name = ""  # name of a flag whose value is the next argument
    for argument in arguments:
        flag, equals, value = argument.partition("=") if argument.startswith("-") else (name, "=", argument)
        name = "" if equals else flag
        if flag.lstrip("-") not in _ANY_SCHEME and not re.fullmatch(r"--?config\..*(prompt|separator)", flag):
            for match in re.finditer(r"(?:^|[=:,])(\w[\w+.-]*://[^,]*)", value):
                require_disk_path(match[1])


def _with_addresses(message: str) -> str:
    """Return a message with addresses in place of the paths of working copies."""
    module = sys.modules.get("jaxret.storage.buckets.working_copy")
    return str(module.shown_message(message)) if module else message


def _publish() -> None:
    """Write the command's changes of working copies to their buckets."""
    if module := sys.modules.get("jaxret.storage.buckets.working_copy"):
        module.publish_all()


def parse_flags(module: ModuleType, arguments: list[str]) -> list[str]:
    """Parse a command line into flags.FLAGS, and return the positional arguments. Raises ValueError."""
    if "config" in flags.FLAGS:
        arguments = _with_config(arguments)
    flags.FLAGS.set_gnu_getopt()  # flags and other arguments in any order
    try:
        values = flags.FLAGS(["jaxret", *arguments])[1:]
    except flags.UnrecognizedFlagError as error:
        names = [*(holder.name for holder in _verb_flags(module)), _QUIET.name, _JSON.name, _PROMETHEUS.name]
        if "config" in names:
            names += [f"{CONFIG_PREFIX}{key}" for key in all_keys(load_config("base"))]
        raise ValueError(
            f"--{error.flagname} is not a flag{suggest_name(error.flagname, names, '--')} (--help lists them)"
        ) from error
    except flags.Error as error:
        first = arguments[0] if arguments and not _arguments(module) else "-"
        example = "" if first.startswith("-") else f"; every argument is a flag, such as --NAME={first}"
        raise ValueError(f"{_wrong_value(str(error))}{example} (--help lists the flags)") from error
    positional = list(_arguments(module))
    missing_arguments = [name for name in positional[len(values) :] if not name.startswith("[")]
    if missing_arguments:
        raise ValueError(f"{' and '.join(missing_arguments)} must be given (--help explains it)")
    if len(values) > len(positional) and not (positional and positional[-1].endswith("...")):
        positional_hint = f"besides {' and '.join(positional)} " if positional else ""
        extra = " ".join(values[len(positional) :])
        raise ValueError(f"unexpected argument {extra!r}: {positional_hint}every argument is a flag, --name=value")
    return values


def _with_config(arguments: list[str]) -> list[str]:
    """Replace the name of a config by the path of its file. Raises ValueError for a file that is not a config, and for
    unknown keys; ml_collections would show a traceback."""
    words: list[str] = []
    for argument in arguments:
        if words and words[-1] in ("-config", "--config"):  # the value of the flag is the next argument
            words[-1] = f"--config={argument}"
        else:
            words.append(argument)
    config_arguments = [argument for argument in words if re.match(r"--?config(=|$)", argument)]
    keys = config_keys(words)
    if not config_arguments:
        if keys:
            raise ValueError(f"--config.{keys[0]} needs a config to change: --config=NAME or --config=FILE.py")
        return arguments
    config = config_arguments[-1].partition("=")[2]
    require_keys(load_config(config), keys, config, "--config.")
    return [f"--config={find_config(config)}", *(argument for argument in words if argument not in config_arguments)]


def config_keys(arguments: Iterable[str]) -> list[str]:
    """Return the keys of the config that a command line sets."""
    names = [argument.lstrip("-").partition("=")[0] for argument in arguments]
    return [name.removeprefix("config.") for name in names if name.startswith("config.")]


def config_overrides(config: Mapping[str, Any], arguments: Iterable[str]) -> dict[str, Any]:
    """Return the keys of the config that a command line sets, with their values in the parsed config."""
    return {key: reduce(getitem, key.split("."), config) for key in config_keys(arguments)}


def _wrong_value(message: str) -> str:
    """Return absl's message, or a clearer one for a missing value and a value of the wrong type."""
    if flag_names := re.findall(r"Flag (--\w+) must have a value", message):
        return f"{' and '.join(flag_names)} must be given"
    message = re.sub(r"^flag --out=.*?: (?=--out=)", "", message)  # the message of the validator is a sentence
    match = re.match(r"flag (--([\w.]+)=.*?): ", message, re.DOTALL)
    kinds = {"int": "a whole number", "float": "a number", "bool": "true or false"}
    if not match or match[2] not in flags.FLAGS:
        return message
    parser: Any = flags.FLAGS[match[2]].parser
    kind = kinds.get(parser.flag_type())
    if choices := getattr(parser, "enum_values", None):
        value, names = match[1].partition("=")[2], [choice for choice in choices if choice]
        return f"{match[1]}: it must be one of {', '.join(names)}{suggest_name(value, names)}"
    if getattr(parser, "lower_bound", None) is not None:
        return f"{match[1]}: it must be {kind} of at least {parser.lower_bound}"
    return f"{match[1]}: it must be {kind}" if kind else message.removeprefix("flag ")


def _verb_flags(module: ModuleType) -> list[flags.FlagHolder]:
    """Return the flags that a module defines, in the order of their first definition."""
    holders: dict[str, flags.FlagHolder] = {}
    for value in vars(module).values():
        parts = value.holders.values() if isinstance(value, OptionFlags) else [value]
        holders |= {part.name: part for part in parts if isinstance(part, flags.FlagHolder)}
    return list(holders.values())


def _arguments(module: ModuleType) -> dict[str, str]:
    """Return the positional arguments of a module with their help."""
    return getattr(module, "ARGUMENTS", {})


def help_text(module: ModuleType) -> str:
    """Return a module's docstring, its arguments, and its flags with help and default."""
    lines = [(module.__doc__ or "").strip(), ""]
    if _arguments(module):
        lines += ["Arguments:", *(f"  {name:<16} {meaning}" for name, meaning in _arguments(module).items()), ""]
    lines.append("Flags:")
    for holder in (*_verb_flags(module), _QUIET, _JSON, _PROMETHEUS):
        flag = flags.FLAGS[holder.name]
        value = ",".join(flag.default) if isinstance(flag.default, list) else flag.default
        is_required = any("must have a value" in validator.message for validator in flag.validators)
        default = " [required]" if is_required else "" if value in (None, "") else f" [{value}]"
        meaning = flag.help.replace(_MULTIPLE, "; may be repeated")
        lines.append(f"  --{flag.name + '=':<14} {meaning}{default}")
        if flag.name == "config":
            lines.append(f"  {'--config.KEY=':<16} a key of the config; configs/base.py explains all keys")
    return "\n".join(lines)
