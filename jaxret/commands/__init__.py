"""What `jaxret VERB` does: a module a verb (a blank in its name is a _ in the module's), each with a docstring that is
its help, flags at module level, `ARGUMENTS` if it has some without a name ("[X]": may be left out, "X...": one or
more), and `main`, which takes them. A module imports nothing heavy before `main`.
"""

VERBS = {
    "train": "train a retriever; the same command again goes on",
    "pretrain": "pre-train an encoder for retrieval on a corpus; the same command again goes on",
    "encode": "encode a corpus; the same command again goes on",
    "search": "search an encoded corpus, exactly unless told otherwise, and evaluate",
    "index": "an approximate index of an encoded corpus, with its recall measured",
    "compare": "results of several runs: means, deviations over seeds, paired tests",
    "explain": "why a passage is found: words, tokens or vectors, as the family has them",
    "mine": "hard negatives for training, from BM25, a run or a file of rankings; audited",
    "recipe": "a config's stages from the start to the table; the same command again goes on",
    "rerank": "a run by the scores of a cross-encoder; or training data with them",
    "open": "a model as it comes, as a run: to encode, search and start training from",
    "export": "a run in the files of other libraries, read back and compared",
    "verify": "everything in a folder against its digests; names what is wrong",
    "data check": "what a data set is, its counts, lengths, duplicates, leaks, and every bad record",
    "data convert": "write a data set in another format; what that cannot hold is counted",
    "data build": "write a data set as a versioned one of TFDS, which is read in place",
    "plan": "memory, time and storage of a config on chips that are not there",
    "demo": "train, encode, search and evaluate on the documentation of this Python",
    "diversity": "how different a checkpoint's vectors of a passage are, and which wins",
    "keywords": "pseudo-queries from the passages' own words",
}
