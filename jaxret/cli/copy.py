"""Copies a folder between disks and buckets, and compares all digests; an interrupted copy continues:

jaxret copy runs/mlr gs://bucket/runs/mlr      a run, a corpus, any folder of files
jaxret copy s3://bucket/runs/mlr runs/mlr      back to a disk
jaxret copy runs/mlr gs://bucket/runs/mlr --verify      repair what `jaxret verify gs://bucket/runs/mlr` names

Files that the destination already has are not sent again. Files that only the destination has are kept. A destination
with files of another run is an error. In a bucket, a folder is a manifest and data objects (docs/buckets.md); ordinary
objects of other programs can be a source.
"""

from absl import flags

_VERIFY = flags.DEFINE_bool(
    "verify", False, "read the files of the destination, and copy damaged and missing files again"
)

ARGUMENTS = {"SRC": "folder, or gs:// or s3:// address of one", "DST": "folder, or gs:// or s3:// address of one"}
OPENS_ADDRESSES = True  # the verb reads addresses itself, without working copies


def main(source: str, destination: str) -> None:
    from jaxret.parallel.events import emit
    from jaxret.parallel.progress import Progress
    from jaxret.storage.buckets.copy_folder import copy_folder

    with Progress("copy", 0, "byte", 0, True) as bar:
        copy = copy_folder(source, destination, _VERIFY.value, bar.update)
    print(
        f"{copy.files:,} files, {copy.bytes / 1e6:,.1f} MB in {copy.destination}: {copy.new_files:,} copied, "
        "the others were there; all digests are those of the source"
    )
    emit("copy", source=source, destination=destination, files=copy.files, bytes=copy.bytes, copied=copy.new_files)
