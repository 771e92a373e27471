"""A process that has imported the modules of the scripts, and forks a child for each requested script.

The child runs the script as a process that begins, ends and dies as if a shell had started it, but seconds earlier. A
request has the script, its arguments and environment, and `faults`, which are injected into it:

kill_at: n        SIGKILL at the n-th system call that makes something durable or visible; negative: just after it
count: file       writes there how many such calls there were
fail: [name, n, errno]   the n-th call of os.<name> and all later ones fail
file_size: bytes  no file may grow larger (RLIMIT_FSIZE)
delay: [name, n, seconds, file]   the n-th call of os.<name> takes that long; a file, if named, says that it began
passages: [n, seconds]   the n-th passage that is read to be encoded and all later ones take that long
cache: folder     where compiled programs are kept
clock: seconds    each reading of the wall clock is this much later than the one before
"""

from __future__ import annotations

import atexit
import gc
import itertools
import json
import os
import resource
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import jax

COUNTED = ("fsync", "replace", "rename", "unlink", "mkdir", "rmdir")


def install(faults: dict[str, Any]) -> None:
    """Inject faults into this process."""
    counter, lock = itertools.count(1), threading.Lock()
    kill_at = faults.get("kill_at", 0)

    def counted(call: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with lock:
                number = next(counter)
            if number == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*args, **kwargs)
            if number == -kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    if kill_at or "count" in faults:
        for name in COUNTED:
            setattr(os, name, counted(getattr(os, name)))
    if "count" in faults:
        atexit.register(lambda: Path(faults["count"]).write_text(str(next(counter) - 1)))
    if "fail" in faults:
        name, first, number = faults["fail"]
        call, calls = getattr(os, name), itertools.count(1)

        def failing(*args: Any, **kwargs: Any) -> Any:
            if next(calls) >= first:
                raise OSError(number, os.strerror(number), *args[:1] if name != "fsync" else ())
            return call(*args, **kwargs)

        setattr(os, name, failing)
    if "delay" in faults:
        name, place, seconds, *files = faults["delay"]
        call, calls = getattr(os, name), itertools.count(1)

        def slow(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == place:
                for file in files:
                    Path(file).touch()
                time.sleep(seconds)
            return call(*args, **kwargs)

        setattr(os, name, slow)
    if "passages" in faults:
        from jaxret.data.formats import Corpus

        first, seconds = faults["passages"]
        read = Corpus.read

        def slowly(*args: Any) -> Any:
            for number, passage in enumerate(read(*args), 1):
                time.sleep(seconds if number >= first else 0)
                yield passage

        setattr(Corpus, "read", slowly)  # noqa: B010
    if "cache" in faults:
        jax.config.update("jax_compilation_cache_dir", faults["cache"])
    if "file_size" in faults:
        resource.setrlimit(resource.RLIMIT_FSIZE, (faults["file_size"], resource.RLIM_INFINITY))
    if "clock" in faults:
        now, readings = time.time(), itertools.count()
        time.time = lambda: now + faults["clock"] * next(readings)


def requests(control: socket.socket) -> dict[str, Any]:
    """Fork a child for each request, and return in the child; the process itself ends when the connection is closed."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 3)
        if not message:
            os._exit(0)
        if os.fork():
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        stdout, stderr, status = descriptors
        child = os.fork()
        if child:  # the parent reports the end of the script to the client
            os.write(status, child.to_bytes(4, "little"))
            _, ended, used = os.wait4(child, 0)
            milliseconds = int(1000 * (used.ru_utime + used.ru_stime))
            os.write(status, ended.to_bytes(4, "little") + milliseconds.to_bytes(4, "little"))
            os._exit(0)
        control.close()
        os.close(status)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        return json.loads(message)


def run(script: str) -> int:
    """Run the script as `python script` does; return its exit status."""
    try:
        runpy.run_path(script, run_name="__main__")
        status: Any = 0
    except SystemExit as error:
        status = error.code
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status if isinstance(status, int) else int(status is not None)


def main() -> None:
    import transformers

    import jaxret.experiments.searches.search_files
    import jaxret.index.encoding.encode
    import jaxret.training.loop  # noqa: F401

    for name in ("AutoTokenizer", "PreTrainedTokenizerFast", "BertTokenizerFast"):
        getattr(transformers, name)  # transformers imports a class at its first use
    gc.freeze()  # otherwise, a collection in the child would copy the pages of all imported modules
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a fork would lose all but one"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes of a shell ignore this signal
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the processes that wait for the scripts are not waited for
    request = requests(socket.socket(fileno=int(sys.argv[1])))
    os.environ.update(request["environment"])
    sys.argv = [request["script"], *request["arguments"]]
    install(request["faults"])
    os._exit(run(request["script"]))  # a second less than freeing all imported modules


if __name__ == "__main__":
    main()
