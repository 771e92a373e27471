"""Shows the sizes of jaxret's folders in the user's cache, and empties them:

jaxret cache                    sizes and limits
jaxret cache --clear=tokens     delete the tokenized texts; they are created again when needed

JAXRET_TOKENS_GB=100 sets another limit for tokenized texts; a folder in data.store has no limit. Texts that were used
in the last 24 hours are kept even above the limit, because a process may be reading them.
JAXRET_OBJECTS_GB=100 sets another limit for files of buckets, which are fetched again when they are needed.
"""

from absl import flags

_CLEAR = flags.DEFINE_enum("clear", None, ["tokens", "compiled", "objects", "all"], "kind of entries to delete")


def main() -> None:
    from datetime import datetime

    from jaxret.parallel.events import emit
    from jaxret.storage.atomic import cache_folder
    from jaxret.storage.cache import CACHE_KINDS, cache_entries, cache_limit, clear_cache

    for kind, title in CACHE_KINDS.items():
        if _CLEAR.value in (kind, "all"):
            deletions = clear_cache(kind)
            print(f"deleted {len(deletions):,} {title}, {sum(entry.size for entry in deletions) / 1e6:,.1f} MB")
        entries, limit = cache_entries(cache_folder(kind)), cache_limit(kind)
        size = sum(entry.size for entry in entries)
        print(f"{cache_folder(kind)}: {len(entries):,} {title}, {size / 1e6:,.1f} MB of at most {limit / 1e9:,.1f} GB")
        if size > limit:
            stay = "; those used in the last 24 hours stay" if kind == "tokens" else ""
            print(f"  above the bound: the next job that adds to them deletes the least recently used{stay}")
        emit("cache", kind=kind, folder=cache_folder(kind), entries=len(entries), bytes=size, limit=limit)
        if kind == "tokens":
            for entry in reversed(entries):
                last_use = datetime.fromtimestamp(entry.last_use)
                print(f"  {entry.size / 1e6:10,.1f} MB  used {last_use:%Y-%m-%d %H:%M}  {entry.path.name}")
