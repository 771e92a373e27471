"""All keys with their meaning; the defaults are the plain dual encoder (DPR) on BERT-base.

Any key can be set on the command line: --config.optimizer.learning_rate=1e-5. An unknown key is an error.
"""

from collections.abc import Iterable
from typing import Any

from ml_collections import ConfigDict


def require_suffix(file: str, suffix: str, allowed: Iterable[str]) -> None:
    """Raise ValueError unless the suffix of --config=configs/FILE:SUFFIX is one of `allowed`."""
    if suffix not in allowed:
        raise ValueError(f"configs/{file}:{suffix}: the suffix must be one of {', '.join(allowed)}")


def one_stage(suffix: str = "") -> tuple[dict[str, Any], ...]:
    """Return the only stage of a config that is trained once, on the data as it is; docs/mining.md has the keys of a
    stage."""
    return ({"name": "stage1"},)


def two_stages(
    depth: int = 200, keep: int = 30, draw: str = "sample", pools: tuple[str, ...] = ("stage1",)
) -> tuple[dict[str, Any], ...]:
    """Return two stages: trained on BM25's negatives; then from the start again on those of other pools.

    Args:
      depth: ranks of a pool that negatives come from.
      keep: negatives kept for each query.
      draw: how they are chosen among the candidates.
      pools: of the second stage, by default the first stage's run.
    """
    settings = {"depth": depth, "keep": keep, "draw": draw}
    return (
        {"name": "stage1", "mine": {"pools": ("bm25",), **settings}},
        {"name": "stage2", "mine": {"pools": pools, **settings}},
    )


def get_config() -> ConfigDict:
    c = ConfigDict()

    # What is trained: retrieval (vectors of queries and of passages), or reranking (a cross-encoder, which reads both
    # together and gives a score; it has nothing of `head`, `pooling` and `normalize`).
    c.task = "retrieval"

    # The encoder. checkpoint: a Hugging Face directory, a hub name (looked up in the local cache), or
    # package:NAME/FOLDER for weights in an installed Python package. The modules of a sentence-transformers directory
    # set head.token, normalize, tokens.query_length, passage_length and the prompts where these have the defaults;
    # another value that contradicts them is an error (docs/models.md).
    c.encoder = ConfigDict()
    c.encoder.checkpoint = "bert-base-uncased"
    c.encoder.download = False  # True: fetch a hub name that is not in the cache
    c.encoder.sha256 = ""  # of model.safetensors (of parts: of their lines of sha256sum); verified if given
    # Name prefixes of tensors that may stay unused: poolers, classifiers, MLM heads, T5's and the pre-trainers'
    # decoders. Anything else in the file that the encoder does not need is an error.
    c.encoder.ignore = ("pooler", "classifier", "cls", "lm_head", "vocab_", "decoder", "c_head", "head.")
    c.encoder.tied = False  # True: one encoder for queries and passages
    c.encoder.layers = 0  # use only the first layers; 0: all
    # Language models: causal (a token sees itself and those before it) or bidirectional; "": as the checkpoint says.
    c.encoder.direction = ""
    # Of the operands of products, float32 or bfloat16; parameters, sums, norms and hidden states are always float32.
    # The papers' configs in this folder, which are for accelerators, use bfloat16.
    c.encoder.dtype = "float32"
    # T5, ModernBERT and language models: apply the final norm to every layer above the embeddings, so that layers can be compared.
    # False: no norm, as in transformers and in MLR's T5 runs (configs/t5.py). Layers of BERT end with a norm of their
    # own.
    c.encoder.normalize_intermediate = True
    # Recomputation in the backward pass to save memory: none, cheap (of activations, attention weights, norms; about
    # half of the memory for 1 % more arithmetic) or layer (of whole layers; a third more arithmetic).
    c.encoder.recompute = "cheap"
    # Self-attention: plain, or a kernel that keeps no attention weights in memory: flash on TPUs, cudnn on NVIDIA GPUs
    # (encoder.dtype bfloat16, no attention_dropout). BERT, RoBERTa and DistilBERT only. There is no fallback.
    c.encoder.attention = "plain"
    c.encoder.attention_dropout = -1.0  # of attention weights; -1: the checkpoint's rate

    # The family, which makes vectors of hidden states. It reads `token` and the keys of its own group, no others.
    c.head = ConfigDict()
    c.head.name = "dual_encoder"  # dual_encoder, mlr, me_bert, colbert, mvr, aggretriever, i3 or splade
    # What represents the text: cls, its first token; mean, the mean over its tokens (needed for T5); last, its last
    # token; mean_without_first, the mean over the tokens after the first (language models, whose first state is huge).
    # ME-BERT and Aggretriever: cls or mean.
    c.head.token = "cls"
    # Dual encoder: sizes of linear layers after it, as in EmbeddingGemma's Dense modules; a sentence-transformers
    # directory sets them.
    c.head.dual_encoder = ConfigDict()
    c.head.dual_encoder.dense = ()
    # MLR: V = number of layers
    c.head.mlr = ConfigDict()
    c.head.mlr.chosen = ()  # layer numbers, with the last one; 0 is the output of the embeddings
    # ME-BERT: V = count
    c.head.me_bert = ConfigDict()
    c.head.me_bert.count = 8
    c.head.me_bert.mean_vector = True  # with token mean: the mean and the first count - 1 tokens; False: the first count
    # ColBERT: V = number of tokens
    c.head.colbert = ConfigDict()
    c.head.colbert.projection = 0  # vector size after a linear layer; 0: the encoder's size
    c.head.colbert.late = False  # True: late interaction: every query token is a vector; score = sum of their maxima
    # The other keys need late interaction. A PyLate directory sets all of them (docs/models.md).
    c.head.colbert.query_marker = -1  # id of a token after [CLS], such as 1, BERT's [unused0]; -1: none
    c.head.colbert.passage_marker = -1
    # Query augmentation: none; or queries are filled up with [MASK]s, which are vectors like the others, and which
    # other tokens attend to (attended) or not (unattended).
    c.head.colbert.expansion = "none"
    c.head.colbert.mask_id = 103  # [MASK] in the vocabulary; read if there is an expansion
    c.head.colbert.skiplist = ()  # ids of passage tokens that are read but are no vectors: punctuation
    # MVR: V = count
    c.head.mvr = ConfigDict()
    c.head.mvr.count = 8
    c.head.mvr.first_id = -1  # -1: a new table; else the first of `count` vocabulary ids that no text has
    c.head.mvr.deviation = 1.0  # of the table's initial values; with a small one viewers stay alike (docs/methods.md)
    # Aggretriever: V = 1, of lexical_dim + cls_dim numbers
    c.head.aggretriever = ConfigDict()
    c.head.aggretriever.lexical_dim = 640
    c.head.aggretriever.cls_dim = 128
    c.head.aggretriever.pruning = "full"  # of the vocabulary: full (two halves with a sign), semi, linear (learned)
    # or average, which has no vocabulary: the mean over tokens other than [CLS], projected (learned).
    c.head.aggretriever.mlm = True  # False: a token weighs its own word alone, without the MLM head
    c.head.aggretriever.term_weights = True
    c.head.aggretriever.chunk = 16  # tokens projected to the vocabulary at a time: memory against speed
    c.head.aggretriever.parts_weight = 0.5  # of the losses of each of the two parts alone
    # I3: V = 1
    c.head.i3 = ConfigDict()
    c.head.i3.variant = "paper"  # paper: cross-attention to all tokens; released: to [CLS], as in its code
    c.head.i3.reconstructor_layers = 1
    c.head.i3.interactor_layers = 1
    c.head.i3.pseudo_length = 32  # tokens of a pseudo-query
    c.head.i3.mask_id = 103  # [MASK] in the vocabulary
    # The reconstruction loss is multiplied by weight * decay^epoch, epochs counted from 0.
    c.head.i3.reconstruction_weight = 1.0
    c.head.i3.reconstruction_decay = 0.1

    # SPLADE: V = 1, a weight for each word of the vocabulary, stored as the words that have one
    c.head.splade = ConfigDict()
    c.head.splade.expansion = True  # False: only words of the text have a weight, a scalar for each token (uniCOIL)
    # Weights of a query's words: encoded, as a passage's; words, 1 for each; or learned, one for each word of the
    # vocabulary. The last two search without the encoder.
    c.head.splade.queries = "encoded"
    c.head.splade.special_ids = (0, 101, 102)  # BERT's [PAD], [CLS], [SEP], which are no words of a text
    c.head.splade.chunk = 16  # tokens projected to the vocabulary at a time: memory against speed

    c.pooling = "none"  # of the V vectors: none (score = max), average, scalar_mix, self_contrastive
    c.normalize = False  # scale every vector to length 1

    # How text becomes tokens. Longer texts are cut; how many is printed before training and encoding.
    c.tokens = ConfigDict()
    c.tokens.query_length = 256
    c.tokens.passage_length = 256
    # Text in front of every query and passage, tokenised with it: "query: " and "passage: " for E5.
    # {task} in the query's stands for the instruction of the query, where its record has one, else for `task`.
    c.tokens.query_prompt = ""
    c.tokens.passage_prompt = ""
    # Both as published, by name: qwen3, e5_mistral, bge_gemma2, gritlm, repllama, tevatron_mistral, embedding_gemma, e5
    # (docs/language-models.md); "": those above.
    c.tokens.prompts = ""
    c.tokens.task = ""  # "": with `prompts`, that of a web search
    # False: tokens of a prompt, and [CLS] or <s> before it, do not count in head.token mean and mean_without_first.
    c.tokens.prompt_in_mean = True
    # Between title and text: "[SEP]", the tokenizer's own marker ([CLS] title [SEP] text [SEP]); or any text, and both
    # are tokenised as one with it: " " is Tevatron's, BEIR's and mteb's. A passage without a title has none. "auto" is
    # " " for a sentence-transformers or PyLate directory, else "[SEP]".
    c.tokens.title_separator = "auto"
    c.tokens.length_multiple = 32  # training batches are padded to a multiple of this: one program per shape
    # Encode training texts side by side in rows, instead of each padded to the longest: about 1.06 tokens computed for
    # each real one, in at most 4 programs (docs/scale.md). Losses and gradients are the same but for rounding.
    c.tokens.packing = False

    # Training data. train and dev: a folder (with the split's name) or a file, in any format of docs/data.md. The
    # format is recognised by the content; FORMAT:PATH sets it. Or a data set of a library, by name: tfds:, irds:, hf:.
    c.data = ConfigDict()
    c.data.train = ""
    c.data.train_split = "train"
    c.data.dev = ""  # empty: no validation, the last checkpoint is the best
    c.data.dev_split = "dev"
    c.data.negatives = 1  # hard negatives per query, next to all other documents of the batch
    # Train on a random subset of this many queries, which depends on seed.data and the queries' ids; 0: on all. A
    # larger subset contains a smaller one.
    c.data.subset = 0
    # For a folder with judgements: a run, whose passages that are not judged relevant are hard negatives.
    c.data.negatives_run = ""
    c.data.dev_negatives_run = ""  # the same for data.dev: a reranker ranks the relevant passages among these
    # Distillation (loss.kl, loss.margin_mse): a run with a teacher's scores, by ids of queries and passages, as `jaxret
    # rerank` writes them; "": the scores in the records of data.train.
    c.data.teacher_run = ""
    # Pseudo-queries for a head that learns from them (I3): "" (no loss), "query" (the training query, for its
    # positive), or a JSONL file of {"_id": passage id, "text": query}.
    c.data.pseudo_queries = ""
    # Folder of tokenised texts: text is tokenised once, and later jobs map it into memory. "": jaxret/tokens in the
    # user's cache ($XDG_CACHE_HOME, else ~/.cache). May be deleted at any time. Several hosts: a shared disk.
    c.data.store = ""
    c.data.on_error = "error"  # bad records: error (stop with file and line), skip (counted) or keep (empty passages)

    c.loss = ConfigDict()
    c.loss.temperature = 1.0  # scores are divided by it; 1 for raw dot products, about 0.05 if normalize
    c.loss.local_temperature = 1.0  # the same for the softmax over one document's vectors
    c.loss.local_weight = 0.0  # lambda of the local term, where pooling or head have one (self_contrastive, mvr)
    # Annealing: both temperatures are multiplied by max(floor, exp(-rate * epoch)), epochs counted from 0; rate 0: off.
    c.loss.annealing_rate = 0.0
    c.loss.annealing_floor = 0.3
    c.loss.contrastive_weight = 1.0  # also of the local term; 0: only the terms below, or what a head adds
    # False: a query's positive competes with the query's own hard negatives alone (I3's equation 9), not with the
    # documents of other queries. Measures inside a dev batch (nll, average_rank) follow.
    c.loss.in_batch_negatives = True
    # True: a negative that scores above the query's positive by more than the margin is left out of the softmax, for it
    # is probably relevant. The margin is one of scores, before the temperature: of cosines, if normalize.
    c.loss.false_negatives = ConfigDict()
    c.loss.false_negatives.masked = False
    c.loss.false_negatives.margin = 0.1
    # Distillation, from a teacher's scores of each query with its own documents: data.train must have some
    # (docs/training.md). KL(teacher || student), mean over queries; each side's scores are divided by a temperature of
    # its own.
    c.loss.kl = ConfigDict()
    c.loss.kl.weight = 0.0
    c.loss.kl.temperature = 1.0  # of the student, in place of loss.temperature; about 0.05 if normalize
    c.loss.kl.teacher_temperature = 1.0
    c.loss.kl.scaled = False  # True: times the square of the student's temperature
    # Squared difference of the student's and the teacher's margins of the positive over each hard negative.
    c.loss.margin_mse = ConfigDict()
    c.loss.margin_mse.weight = 0.0
    # Distillation within the batch, from train.teacher: KL(teacher || student) of each query's scores with all documents
    # of the batch, those of other queries and other devices too.
    c.loss.in_batch_kl = ConfigDict()
    c.loss.in_batch_kl.weight = 0.0
    c.loss.in_batch_kl.temperature = 1.0  # of the student, in place of loss.temperature; about 0.05 if normalize
    c.loss.in_batch_kl.teacher_temperature = 1.0
    c.loss.in_batch_kl.scaled = False  # True: times the square of the student's temperature
    # Yes or no for each of a query's own documents: cross-entropy of sigmoid(score).
    c.loss.binary = ConfigDict()
    c.loss.binary.weight = 0.0
    c.loss.binary.positive_weight = 1.0

    # Matryoshka: the loss is summed over sizes of vectors, of which the whole size is one. A size is the first numbers
    # of every vector, scaled to length 1 (normalize); every term that compares queries with documents has each of them.
    c.loss.matryoshka = ConfigDict()
    c.loss.matryoshka.sizes = ()  # as (768, 256, 64); (): off
    c.loss.matryoshka.weights = ()  # of these sizes; (): 1 for each

    # Penalties on the weights of words, over all texts of the batch, where vectors are such weights (splade):
    # flops, sum_j (mean_i |w_ij|)^2, or l1, mean_i sum_j |w_ij|. Their weights suit one loss and one batch size only.
    c.loss.sparsity = ConfigDict()
    c.loss.sparsity.query = 0.0  # weight of the queries' penalty
    c.loss.sparsity.passage = 0.0  # of the passages'
    c.loss.sparsity.query_norm = "flops"
    c.loss.sparsity.passage_norm = "flops"
    # Both weights grow as the square of the step in so many steps, about a third of all; 0: they do not grow.
    c.loss.sparsity.steps = 0

    c.optimizer = ConfigDict()
    # adamw, lamb (as in optax), or lamb_reference (without bias correction, weight norms clamped at 10).
    c.optimizer.name = "adamw"
    c.optimizer.learning_rate = 2e-5  # the maximum, after warm-up
    c.optimizer.head_learning_rate = 0.0  # of the parameters below; 0: the same
    # A pattern of parameter paths: the layers of heads, without projections to the vocabulary.
    c.optimizer.head_parameters = r"^(\w+_)?head/(?!vocabulary)"
    # After warm-up: linear or cosine, to 0 at the end, or none (constant). A run that is extended to more steps
    # continues with the rate of the longer schedule at that step: linear and cosine rise again; none is constant,
    # unless the longer warm-up is not over yet.
    c.optimizer.decay = "linear"
    c.optimizer.warmup_fraction = 0.05  # of all steps
    c.optimizer.warmup_steps = -1  # if >= 0, used instead of the fraction
    # Moving average of the weights, ema * average + (1 - ema) * weights after every step, starting from the initial
    # weights. Validation, checkpoints, encoding and search use the average. 0: none. It covers about the last
    # 1 / (1 - ema) steps, so 0.999 is for runs of many thousands.
    c.optimizer.ema = 0.0
    # A pattern of parameter paths that are not trained, as "encoder/". They have neither gradients nor moments.
    c.optimizer.frozen = ""
    c.optimizer.b1 = 0.9
    c.optimizer.b2 = 0.999
    c.optimizer.eps = 1e-8
    c.optimizer.weight_decay = 0.0  # not applied to biases and layer norms
    c.optimizer.clip_norm = 2.0  # of the true gradient; 0: no clipping
    # Trainers that average the gradients of a gathered loss over W processes clip at W times their setting: to
    # reproduce "2.0 on 4 GPUs" write 4 here.
    c.optimizer.reference_processes = 1

    # Pre-training for retrieval (docs/pretraining.md): `jaxret pretrain` alone reads this group. data.train is a
    # corpus, train.batch_size counts its spans (documents, under cocondenser), and encoder.checkpoint="" starts
    # from a BERT with random weights.
    c.pretraining = ConfigDict()
    c.pretraining.method = "mlm"  # mlm, condenser, cocondenser or retromae
    # Documents are cut into the fewest spans of at most this many tokens, markers included, of about equal length;
    # spans with fewer tokens of text than `shortest` are left out.
    c.pretraining.length = 256
    c.pretraining.shortest = 8
    c.pretraining.mask_rate = 0.15  # of a span's tokens, in whole words
    # condenser, cocondenser: layers of the head, the layer whose tokens it reads, and whether the last layer is trained
    # as a masked language model too.
    c.pretraining.head_layers = 2
    c.pretraining.skip_from = 6
    c.pretraining.late_mlm = True
    c.pretraining.contrast_weight = 1.0  # cocondenser: of the contrast of a document's two spans against all others
    # retromae: rate of tokens that a decoder position does not attend to, in whole words; masks drawn for each span,
    # one of which each position has.
    c.pretraining.decoder_rate = 0.5
    c.pretraining.decoder_masks = 256
    c.pretraining.seed = 12345  # of the masks
    # The BERT to start from if there is no checkpoint. tokenizer: a directory with one; "": WordPiece is trained on the
    # corpus, for a vocabulary of at most `vocabulary` words and pieces.
    c.pretraining.scratch = ConfigDict()
    c.pretraining.scratch.tokenizer = ""
    c.pretraining.scratch.vocabulary = 30522
    c.pretraining.scratch.lowercase = True
    c.pretraining.scratch.hidden_size = 768
    c.pretraining.scratch.layers = 12
    c.pretraining.scratch.heads = 12
    c.pretraining.scratch.intermediate_size = 3072
    c.pretraining.scratch.positions = 512

    c.train = ConfigDict()
    c.train.batch_size = 128  # queries of a batch, over all devices
    c.train.epochs = 40.0
    c.train.steps = -1  # if >= 0, used instead of epochs; 0 writes the untrained encoder as a checkpoint
    c.train.start_from = ""  # the workdir of a finished run of the same model, to begin with its best checkpoint
    # Rounds: runs of train.steps (or train.epochs) each that make one training, on data of their own, with one schedule
    # (docs/mining.md). Every round but the first goes on from the last checkpoint of the round before, which
    # train.start_from names: with its optimiser, its moving average and the numbers of its steps.
    c.train.rounds = 1
    c.train.round = 1  # of these, from 1
    # The workdir of a finished retriever that reads the same tokens: its best checkpoint encodes every batch too, and
    # loss.in_batch_kl learns from its scores. Its parameters are split over devices as the model's are.
    c.train.teacher = ""
    # Gradient caching: queries encoded at a time, over all devices, with their documents; 0: all at once. Rounded up to
    # a divisor of the batch that gives every device a part. Validation encodes in the same chunks.
    c.train.chunk_size = 0
    # Batches per step (update), which averages their gradients. Each batch has its own in-batch negatives, while the
    # chunks above share those of the whole batch. One batch is in memory at a time, and nothing is computed twice.
    c.train.accumulate = 1
    # Steps with a loss, gradient or update that is not finite: this many of a run are skipped (only the step number
    # changes) and counted in metrics.jsonl; the next one stops the run and names the source. 0: the first one does.
    c.train.skip_nonfinite = 0
    c.train.log_every = 10  # steps
    # Experiment trackers that get every logged step while it trains: "trackio", "wandb", "mlflow", which must be
    # installed; a failure of one ends no training. `jaxret track` sends a run afterwards.
    c.train.trackers = ()
    c.train.tracker_project = "jaxret"  # the project there (of mlflow: the experiment)
    c.train.checkpoint_every = 0  # steps between validations and checkpoints; 0: once an epoch

    c.validation = ConfigDict()
    c.validation.batch_size = 128
    # Passages to retrieve from: all relevant dev passages, filled up to this number with their hard negatives, then
    # with training passages.
    c.validation.pool_size = 2000
    # A whole corpus to retrieve from instead, at every validation: a folder or file with passages, judged by
    # the judgements of data.dev; or "train": all training and dev passages. Vectors are not stored:
    # passages are encoded and scored a batch at a time, on the devices.
    c.validation.corpus = ""
    # Metric of the best checkpoint: RR@10, Success@5, Success@20, with a corpus also nDCG@10 and R@100; nll or
    # average_rank inside a batch, as in MLR's published code (128 queries with two documents each).
    c.validation.metric = "RR@10"
    # Another metric from epoch `then_from` on; "": none. From there the best checkpoint is the best by the new metric,
    # however good earlier ones were: different metrics are not compared.
    c.validation.then = ""
    c.validation.then_from = 32.0
    # Which checkpoint counts as the best: that with the best metric, or "last", whatever is measured. Encoding, search,
    # mining, teaching and train.start_from use it.
    c.validation.best = "metric"

    # Separate seeds, so that one can be varied alone.
    c.seed = ConfigDict()
    c.seed.init = 12345
    c.seed.data = 12345
    c.seed.dropout = 12345
    c.seed.negatives = 12345

    c.mesh = ConfigDict()
    c.mesh.fsdp = 1  # parameters are split over this many devices, the batch over all
    # Dtype of the sum of gradients over devices: float32, or bfloat16 for half the traffic and less precision.
    c.mesh.reduce_dtype = "float32"
    c.mesh.coordinator = ""  # several hosts: "auto" on a TPU pod or under Slurm, else host:port of process 0
    c.mesh.num_processes = 1
    c.mesh.process_id = 0
    c.mesh.initialization_timeout = 300  # seconds that processes wait for each other at the start
    # tpu, gpu or cpu: an error if there is none. "": JAX's default, the CPU if there is no accelerator. `jaxret encode`
    # and `search` have a --platform of their own.
    c.mesh.platform = ""

    c.encode = ConfigDict()
    c.encode.tokens_per_batch = 16384
    # Passages per shard, and MB (10^6 bytes) of vectors, whichever is less: the work that a killed job loses. On a CPU
    # also no more than a minute's work at 50 GFLOP/s, by the sizes of the encoder. The same on every such machine.
    c.encode.shard_rows = 8192
    c.encode.shard_mb = 64
    c.encode.words = 0  # splade: words of a passage to store at most, the heaviest ones; 0: all that have a weight
    # Numbers of a vector that encoding and search keep: its first ones, scaled to length 1 again if `normalize`; 0: all.
    # For models trained with loss.matryoshka. A sentence-transformers directory sets it (truncate_dim).
    c.encode.dimension = 0
    c.encode.dtype = "float32"  # of the vectors on disk: float32 or float16

    return c
