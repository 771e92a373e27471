"""The verbs of `jaxret VERB`. Each is a module, named after the verb with _ for a space.

A module has a docstring (its help), flags at module level, `ARGUMENTS` with its positional arguments ("[X]" is
optional, "X..." is one or more), and `main`, which takes them. `WRITES` names the flags and arguments with the paths
that the verb always writes, if not --out; permission to write there is checked first. A module imports nothing heavy
before `main`.
"""

VERBS = {
    "train": "train a retriever or a cross-encoder (resumes)",
    "pretrain": "pre-train an encoder for retrieval on a corpus (resumes)",
    "encode": "encode a corpus (resumes)",
    "search": "search an encoded corpus and evaluate; exact by default",
    "mteb": "evaluate a run with mteb, and write mteb's files of results",
    "beir": "encode, search and evaluate every data set of a folder, with the means for BEIR (resumes)",
    "bm25": "search a corpus by BM25 and evaluate",
    "index": "build an approximate index of an encoded corpus and measure its recall",
    "compare": "compare results of runs: means, deviations over seeds, paired tests",
    "report": "write a report of runs as one HTML file",
    "track": "send the metrics of a run to trackio, wandb or mlflow",
    "explain": "explain why a passage is found, by words, tokens or vectors",
    "mine": "mine hard negatives from BM25, a run or a file of rankings",
    "recipe": "mine, train, encode, search for each stage of a config (resumes)",
    "sweep": "train and compare a config at every point of a grid, with seeds (resumes)",
    "plot": "draw sweeps, training curves, winners, weights of words, and results in and out of the domain",
    "reproduce": "list or run the rows of the papers' tables, with the papers' numbers",
    "fuse": "fuse the rankings of several systems, by ranks or scores",
    "rerank": "rerank rankings with a cross-encoder, or score training data",
    "open": "make a run from a pre-trained model, without training",
    "serve": "serve runs over HTTP: vectors, search, a web page",
    "export": "export a run to the files of another library, and verify it",
    "copy": "copy a folder between disks and buckets (resumes)",
    "verify": "compare all files of a folder with their digests",
    "data check": "describe a data set: counts, lengths, duplicates, leaks, bad records",
    "data convert": "convert a data set to another format",
    "data build": "write a data set as a versioned TFDS data set",
    "data chunk": "split passages into sentences, equal parts, or windows of words",
    "data split": "split judgements by whether relevant passages have training queries",
    "cache": "show and empty the caches of compiled programs, tokenized texts and files of buckets",
    "plan": "plan memory, time and storage of a config for absent chips",
    "doctor": "check packages, devices, search backends, memory and disks of this machine",
    "demo": "train, encode, search and evaluate on documentation of Python",
    "probe": "measure retrieval with every layer of an encoder, without training",
    "diversity": "measure how different the vectors of a passage are",
    "generate": "generate queries for passages with a T5 model (resumes)",
    "keywords": "write pseudo-queries from the words of the passages",
}
