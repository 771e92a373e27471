"""Names that other libraries have for flags, config keys, measures and verbs of jaxret, and suggestions for a wrong name.

The table has names of transformers' TrainingArguments, sentence-transformers, PyLate, Tevatron, DPR, Pyserini, BEIR,
ranx and trec_eval.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

# Names in jaxret (of keys perhaps without their groups) -> names in other libraries, without case, "_" and "-". If a
# name of another library is in several lines, the first line whose name the command has is used.
_NAMES: dict[str, str] = {
    # flags, config keys
    "encoder.checkpoint": "model modelname modelnameorpath modelpath modelfile pretrainedmodel encodername backbone",
    "encoder.tied": "untieencoder tieencoder shareencoder sharedencoder shareweights",
    "encoder.layers": "numlayers numhiddenlayers nlayers",
    "encoder.dtype": "fp16 bf16 amp mixedprecision torchdtype precision",
    "encoder.recompute": "gradientcheckpointing remat activationcheckpointing",
    "encoder.attention": "attnimplementation flashattention useflashattn",
    "encoder.download": "localfilesonly",
    "optimizer.learning_rate": "lr peaklr maxlr initlr baselr",
    "optimizer.decay": "lrschedulertype scheduler schedule lrscheduler lrdecay",
    "optimizer.warmup_fraction": "warmupratio warmup warmupproportion",
    "optimizer.warmup_steps": "numwarmupsteps warmup",
    "optimizer.clip_norm": "maxgradnorm gradclip clip gradientclipval gradclipnorm",
    "optimizer.weight_decay": "wd",
    "optimizer.b1": "adambeta1 beta1",
    "optimizer.b2": "adambeta2 beta2",
    "optimizer.eps": "adamepsilon epsilon adameps",
    "optimizer.name": "optim optimizertype",
    "optimizer.frozen": "freeze freezelayers",
    "lora.rank": "lorar r lorarank",
    "lora.alpha": "loraalpha",
    "lora.dropout": "loradropout",
    "lora.targets": "loratargetmodules targetmodules",
    "lora.layers": "layerstotransform",
    "lora.rslora": "userslora",
    "lora.adapters": "loranameorpath loramodel adapter",
    "train.batch_size": "perdevicetrainbatchsize pergputrainbatchsize trainbatchsize batchsize bs",
    "train.epochs": "numtrainepochs nepochs numepochs maxepochs",
    "train.steps": "maxsteps numsteps totalsteps maxtrainsteps",
    "train.accumulate": "gradientaccumulationsteps gradaccum accumulationsteps gradaccumsteps accumulategradbatches",
    "train.chunk_size": "gradcache gradcachechunk minibatchsize gcqchunksize gcpchunksize gradcacheminibatchsize",
    "train.trackers": "reportto logwith logger loggers tracker wandb",
    "train.log_every": "loggingsteps logsteps logevery logfreq",
    "train.checkpoint_every": "savesteps evalsteps checkpointsteps saveevery validationsteps evaluationsteps",
    "train.start_from": "initcheckpoint initfrom finetunefrom",
    "validation.batch_size": "perdeviceevalbatchsize evalbatchsize devbatchsize",
    "validation.metric": "metricforbestmodel evalmetric",
    "validation.best": "loadbestmodelatend",
    "tokens.query_length": "querymaxlen qmaxlen maxquerylength querymaxlength maxqlen",
    "tokens.passage_length": "passagemaxlen pmaxlen maxseqlength maxlength maxpassagelength documentlength doclength"
    " docmaxlen docmaxlength passagemaxlength maxseqlen",
    "tokens.query_prompt": "queryprefix queryinstruction prompts queryprompt",
    "tokens.prompts": "prompttemplate instructiontemplate queryinstructionformat template",
    "tokens.task": "instruction task queryinstructionforretrieval",
    "tokens.prompt_in_mean": "includeprompt skipinstruction",
    "tokens.passage_prompt": "passageprefix documentprefix documentprompt passageinstruction docprefix",
    "query_length": "querymaxlen qmaxlen maxquerylength",
    "passage_length": "passagemaxlen pmaxlen maxseqlength maxlength documentlength doclength",
    "data.train": "traindir trainfile traindata datasetname datasetpath trainpath traindatapath traindataset",
    "data.dev": "devfile evaldir valdata evaldataset devdata validationfile valfile",
    "data.negatives": "trainnpassages traingroupsize hardnegatives numnegatives numhardnegatives nway nnegatives",
    "data.subset": "maxtrainsamples",
    "loss.temperature": "temp tau temperature",
    "loss.kl.weight": "kd distillation distill klweight kldiv",
    "loss.false_negatives.masked": "maskfakenegative infoncemaskfakenegative maskfalsenegatives",
    "loss.false_negatives.margin": "fakenegativemargin falsenegativemargin gistmargin",
    "loss.matryoshka.sizes": "matryoshkadims mrldims matryoshka mrl usemrl matryoshkasizes",
    "loss.matryoshka.weights": "matryoshkaweights",
    "encode.dimension": "truncatedim embeddingdim dimensions truncatedimension",
    "dimension": "truncatedim dimensions dim embeddingdim truncatedimension",
    "normalize": "normalizeembeddings l2normalize normalizeembs",
    "head.token": "poolingmode pooler poolingstrategy",
    "projection": "embeddingsize embeddim projectiondim dim",
    "expansion": "doqueryexpansion attendtoexpansiontokens queryexpansion",
    "skiplist": "skiplistwords",
    "seed.init": "seed randomseed",
    "seed": "randomseed",
    "mesh.fsdp": "deepspeed zero",
    "mesh.platform": "device devices",
    "platform": "device devices accelerator",
    "factory": "type kind indextype indexfactory factorystring indexname",
    "to": "format target type",
    "out": "output outputpath outputfile saverankingto outfile o",
    "workdir": "output outputfile saverankingto outfile out outputdir outdir savedir saveto outputpath outputfolder rundir checkpointdir logdir modeldir run model modelnameorpath modelpath",
    "k": "n topk topn hits numresults limit retrievaltopk nresults depth",
    "queries": "topics queryfile queriespath questions queriesfile qryfile",
    "query": "question q search",
    "qrels": "judgements judgments relevance groundtruth labels qrelspath",
    "corpus": "documents docs collection passages corpuspath corpusfile encodeinpath ctxsrc index input",
    "data": "train trainfile traindata dataset datasetname",
    "measures": "metrics metric metrickeys evalmetrics",
    "tokens_per_batch": "batchsize encodebatchsize perdeviceevalbatchsize",
    "download": "localfilesonly",
    "token": "poolingmode pooling",
    "keep": "n numnegatives nnegatives negativesperquery",
    "count": "n numwords",
    "num_processes": "worldsize nnodes numnodes nprocpernode",
    "process_id": "rank noderank machinerank localrank",
    "coordinator": "masteraddr masterport rdzvendpoint maincoprocessip mainprocessip",
    # measures
    "RR": "mrr recip reciprank reciprocalrank meanreciprocalrank",
    "nDCG": "ndcgcut",
    "R": "recall rec recallk",
    "AP": "map meanaverageprecision averageprecision mapcut",
    "Success": "hit hits hitrate hr accuracyatk acc topkaccuracy",
    # jaxret has no precision; the entry prevents the suggestion of a similar name
    "P": "precision p",
    # values of `export --to`
    "hf": "huggingface transformers",
    "sentence-transformers": "sbert st",
    "pyserini": "faiss",
    "anserini": "lucene",
    "pgvector": "postgres postgresql",
    # verbs
    "encode": "embed vectorize",
    "search": "retrieve evaluate eval rank query",
    "train": "finetune fit",
    "mine": "minehardnegatives hnmine hardnegatives",
    "open": "import download load",
    "data convert": "convert",
    "data check": "check inspect stats validate",
    "rerank": "crossencode",
    "plan": "estimate memory",
}
_HERE: dict[str, list[str]] = {}
for _name, _synonyms in _NAMES.items():
    for _synonym in _synonyms.split():
        _HERE.setdefault(_synonym, []).append(_name)
CONFIG_PREFIX = "config."  # before a key, among flags
# Names in other libraries of settings that have no flag here -> a flag of the verb, and the setting to use instead.
_WITHOUT = {
    "batchsize": ("checkpoint", "a batch holds as many texts as fit into the run's encode.tokens_per_batch tokens"),
}


def suggest_name(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Return "; did you mean X?" for the result of `similar_name`, with a prefix. For a setting without a flag, return
    "; " and the setting to use instead. Return "" if neither is known."""
    choices = list(names)
    if similar := similar_name(name, choices):
        return f"; did you mean {prefix}{similar}?"
    flag, reason = _WITHOUT.get(_letters(name), ("", ""))
    return f"; {reason}" if flag in choices else ""


def similar_name(name: str, names: Iterable[str]) -> str:
    """Return the one of `names` that a wrong name probably means, or "".

    That is the name with the same letters; else the name that the table gives for it; else, for a name that is not in
    the table, the same key in another group, or the most similar name.
    """
    choices = list(names)
    whole_name, last = _letters(name), _letters(name.rpartition(".")[2])
    for choice in choices:
        if whole_name in (_letters(choice), _letters(choice.removeprefix(CONFIG_PREFIX))):
            return choice
    synonyms = _HERE.get(last, [])
    for candidate in synonyms:
        for choice in choices:
            if f".{choice}".endswith(f".{candidate}"):
                return choice
    ends = [choice for choice in choices if last == _letters(choice.rpartition(".")[2])]
    if synonyms and not ends:
        return ""
    return next(iter(get_close_matches(name, ends, 1, 0) or get_close_matches(name, choices, 1)), "")


def _letters(name: str) -> str:
    """Return a name in lower case, without "_" and "-", which libraries use differently."""
    return re.sub(r"[_-]", "", name).lower()
