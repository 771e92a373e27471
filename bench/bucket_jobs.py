"""Simulate encoding jobs that share a corpus in a bucket: requests, bytes, time, and the limit that is reached first.

    python bench/bucket_jobs.py --passages=1000000000 --jobs=1000

No server is contacted. The requests to claim a lease, to read the state, to write a shard and to end are those of
jaxret.storage.buckets.bucket_leases and bucket_folder; limits are those that the stores publish for a new bucket or
prefix.
"""

import argparse
import math
from dataclasses import dataclass

PAGE = 1000  # keys of a list
PART = 32 << 20  # bytes of an object
ENTRY = 190  # bytes of a file's entry in files.json: name, digest, size, one object's key
ID = 11  # bytes of a passage's id; vectors of other jobs are not fetched
FILES = 3  # per shard: vectors, ids, sidecar
CLAIM, RELEASE = 3, 1  # requests of a lease: read, write, read back; write
LEASES = 2  # per shard: the reservation, and the shard itself
BOUNDS = {"reads": 5000, "writes": 1000}  # requests per second: GCS; S3's are 5,500 and 3,500
# Per second, of one object: GCS. A lease changes most often: it is claimed and released with each shard of a job.
CHANGES = 1.0


@dataclass
class Outcome:
    """Time, requests and bytes of a simulated run."""

    seconds: float
    encoding: float  # seconds during which a job encodes
    reads: int
    writes: int
    fetched: float  # bytes by each job
    manifest: float  # bytes of files.json
    peaks: dict[str, float]  # requests per second, of all jobs
    changes: float = 0.0  # per second, of one object, at most


def simulate(options: argparse.Namespace, shard_rows: int) -> Outcome:
    """Return the costs of a run in which jobs encode shards at the same time."""
    shards = math.ceil(options.passages / shard_rows)
    encode = shard_rows / options.rate
    size = shard_rows * options.dimension * options.bytes
    parts = math.ceil(size / PART) + FILES - 1
    outcome = Outcome(0.0, 0.0, 0, 0, 0.0, shards * FILES * ENTRY, {"reads": 0.0, "writes": 0.0})
    done = 0
    while done < shards:
        active = min(options.jobs, shards - done)
        # To read the state: lists of groups and leases, the manifest, and each new group, 32 at a time.
        pages = math.ceil(done / PAGE) + math.ceil(LEASES * done / PAGE) + 2
        new = min(done, options.jobs)
        # Each job passes the shards that others hold, half of them on average, with two reads each.
        reads = pages + 1 + 3 * new + LEASES * (CLAIM - 1) + active
        writes = parts + 1 + LEASES * (1 + RELEASE)
        beats = int(encode / (options.lease / 10))  # each renewal is a write and a read
        reads, writes = reads + beats, writes + beats
        waiting = options.latency * (
            active + pages + 1 + math.ceil(3 * new / 32) + LEASES * (CLAIM + RELEASE) + parts / 8 + 1
        )
        fetching = new * shard_rows * ID / options.bandwidth  # while the next shard is encoded
        bounded = max(active * reads / BOUNDS["reads"], active * writes / BOUNDS["writes"], (1 + RELEASE) / CHANGES)
        seconds = max(encode + waiting, fetching, bounded)
        outcome.seconds += seconds
        outcome.encoding += encode
        outcome.reads += active * reads
        outcome.writes += active * writes
        outcome.fetched += new * shard_rows * ID
        for kind, count in (("reads", reads), ("writes", writes)):
            outcome.peaks[kind] = max(outcome.peaks[kind], active * count / (encode + waiting))
        outcome.changes = max(outcome.changes, (1 + RELEASE) / (encode + waiting))
        done += active
    rest = options.passages * ID - outcome.fetched  # a job ends when it has read all ids
    outcome.fetched += rest
    outcome.seconds += rest / options.bandwidth
    deletes = math.ceil((1 + LEASES) * shards / 32) * options.latency  # the last job deletes groups and leases
    outcome.seconds += deletes
    outcome.writes += (1 + LEASES) * shards
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=1_000_000_000)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=2000.0, help="passages per second of a job")
    parser.add_argument("--dimension", type=int, default=768)
    parser.add_argument("--bytes", type=int, default=2, help="of a number: float16")
    parser.add_argument("--latency", type=float, default=0.03, help="seconds of a request")
    parser.add_argument("--bandwidth", type=float, default=1e9, help="bytes per second of a job")
    parser.add_argument("--lease", type=float, default=300.0, help="seconds")
    # More than 41,666 rows also need --shard_mb, which is 64 by default.
    parser.add_argument("--shard_rows", type=int, nargs="*", default=[8192, 65536, 262144, 1_000_000])
    options = parser.parse_args()
    print(
        "shard_rows | shards | hours | encoding | requests | reads/s | writes/s | changes/s | files.json | "
        "fetched by each job"
    )
    for rows in options.shard_rows:
        run = simulate(options, rows)
        hours, encoding, millions = run.seconds / 3600, run.encoding / 3600, (run.reads + run.writes) / 1e6
        rates = f"{run.peaks['reads']:,.0f} | {run.peaks['writes']:,.0f} | {run.changes:.3f}"
        print(
            f"{rows:,} | {math.ceil(options.passages / rows):,} | {hours:.2f} | {encoding:.2f} | "
            f"{millions:.1f} M | {rates} | {run.manifest / 1e6:.1f} MB | {run.fetched / 1e9:,.0f} GB"
        )


if __name__ == "__main__":
    main()
