"""Every config key with its meaning. The defaults are the dual encoder (DPR) on BERT-base.

Any key can be set on the command line: --config.optimizer.learning_rate=1e-5. An unknown key is an error, and so is
another value of a key that config.task does not read.
"""

from collections.abc import Iterable
from typing import Any

from ml_collections import ConfigDict


def require_suffix(file: str, suffix: str, suffixes: Iterable[str]) -> None:
    """Raise ValueError unless the suffix of --config=configs/FILE:SUFFIX is one of `suffixes`."""
    if suffix not in suffixes:
        raise ValueError(f"configs/{file}:{suffix}: the suffix must be one of {', '.join(suffixes)}")


def one_stage(suffix: str = "") -> tuple[dict[str, Any], ...]:
    """Return the only stage of a config that is trained once, on the data as it is; docs/mining.md has the keys of a
    stage."""
    return ({"name": "stage1"},)


def two_stages(
    depth: int = 200, keep: int = 30, draw: str = "sample", pools: tuple[str, ...] = ("stage1",)
) -> tuple[dict[str, Any], ...]:
    """Return two stages. The first trains on BM25's negatives, the second starts again and trains on negatives of other
    pools.

    Args:
        depth: ranks of a pool that negatives come from.
        keep: negatives kept for each query.
        draw: how the negatives are chosen among the candidates.
        pools: pools of the second stage, by default the first stage's run.
    """
    settings = {"depth": depth, "keep": keep, "draw": draw}
    return (
        {"name": "stage1", "mine": {"pools": ("bm25",), **settings}},
        {"name": "stage2", "mine": {"pools": pools, **settings}},
    )


def get_config() -> ConfigDict:
    config = ConfigDict()

    # What is trained: retrieval (one model for vectors of queries and passages), or reranking (a cross-encoder, which
    # reads a query and a passage together and returns a score; it does not read `head`, `pooling` and `normalize`).
    config.task = "retrieval"

    config.encoder = ConfigDict()  # The transformer that turns text into hidden states.
    # A Hugging Face directory, a hub name (looked up in the local cache), or package:NAME/FOLDER for weights in an
    # installed Python package. A sentence-transformers or PyLate directory also sets keys of `head` and `tokens`,
    # `normalize` and encode.dimension where these have their defaults; a contradicting value is an error
    # (docs/models.md).
    config.encoder.checkpoint = "bert-base-uncased"
    config.encoder.download = False  # True: download a hub name that is not in the local cache
    # SHA-256 of model.safetensors, verified before training, also with train.start_from. For several weight files: the
    # SHA-256 of the output of sha256sum for them. "": no check.
    config.encoder.sha256 = ""
    # Name prefixes of tensors in the file that the model may leave unused, such as poolers, classifiers, MLM heads and
    # decoders. Any other unused tensor is an error.
    config.encoder.ignore = ("pooler", "classifier", "cls", "lm_head", "vocab_", "decoder", "c_head", "head.")
    config.encoder.tied = False  # True: queries and passages share one encoder
    config.encoder.layers = 0  # number of layers to use, from the first one; 0: all
    # Attention of language models: causal (a token sees itself and earlier ones) or bidirectional; "": as in the
    # checkpoint.
    config.encoder.direction = ""
    # Precision of matrix products: float32 or bfloat16. Parameters, sums, norms and hidden states stay in float32.
    config.encoder.dtype = "float32"
    # T5, ModernBERT and language models. True: apply the final norm to every layer above the embeddings, so that layers
    # are comparable. False: no norm on intermediate layers, as in transformers and in MLR's T5 runs (configs/t5.py).
    # It has no effect on BERT, whose layers end with a norm.
    config.encoder.normalize_intermediate = True
    # Activations to recompute in the backward pass, to save memory: none, cheap (activation functions, attention
    # weights, norms: half of the memory for 1 % more arithmetic) or layer (whole layers: a third more arithmetic).
    config.encoder.recompute = "cheap"
    # Self-attention: plain, or a fused kernel: flash (TPU) or cudnn (NVIDIA GPU; needs encoder.dtype bfloat16 and no
    # attention dropout). T5 has only plain attention. An unavailable kernel is an error.
    config.encoder.attention = "plain"
    config.encoder.attention_dropout = -1.0  # dropout rate of attention weights; -1: the checkpoint's rate

    # The family: turns hidden states into V vectors per text. A head reads head.token and its own group.
    config.head = ConfigDict()
    config.head.name = "dual_encoder"  # one of dual_encoder, mlr, me_bert, colbert, mvr, aggretriever, i3 or splade
    # State that represents a text: cls (first token), mean (over all tokens; T5 needs it), last (last token) or
    # mean_without_first (over the tokens after the first; for language models, whose first state is very large).
    # ME-BERT and Aggretriever take cls or mean.
    config.head.token = "cls"
    config.head.dual_encoder = ConfigDict()  # Dual encoder: V = 1.
    # Output sizes of linear layers after the encoder (Dense modules of sentence-transformers, as in EmbeddingGemma).
    config.head.dual_encoder.dense = ()
    config.head.mlr = ConfigDict()  # MLR: V = number of layers.
    config.head.mlr.chosen = ()  # layer numbers, the last layer included; 0 is the output of the embeddings
    config.head.me_bert = ConfigDict()  # ME-BERT: V = count.
    config.head.me_bert.count = 8  # vectors of a passage
    # With head.token mean. True: the mean and the first count - 1 tokens; False: the first count tokens.
    config.head.me_bert.mean_vector = True
    config.head.colbert = ConfigDict()  # ColBERT: V = number of tokens.
    config.head.colbert.projection = 0  # vector size after a linear layer; 0: no layer, the encoder's size
    # True: late interaction. Every query token has a vector, and the score is the sum of their maxima. The keys below
    # need it, and a PyLate directory sets them (docs/models.md).
    config.head.colbert.late = False
    config.head.colbert.query_marker = -1  # token id after [CLS] of a query, such as 1 (BERT's [unused0]); -1: none
    config.head.colbert.passage_marker = -1  # token id after [CLS] of a passage; -1: none
    # Query augmentation: none, or fill queries with [MASK] tokens, each with a vector. The other tokens attend to them
    # (attended) or do not (unattended).
    config.head.colbert.expansion = "none"
    config.head.colbert.mask_id = 103  # id of [MASK]; used only with an expansion
    config.head.colbert.skiplist = ()  # ids of passage tokens without a vector, such as punctuation; the encoder reads them
    config.head.mvr = ConfigDict()  # MVR: V = count.
    config.head.mvr.count = 8  # viewer tokens, the vectors of a passage
    # First of `count` consecutive vocabulary ids that no text contains, used as viewers; -1: a new embedding table.
    config.head.mvr.first_id = -1
    # Standard deviation of the new table's initial values. With small values the viewers stay alike (docs/methods.md).
    config.head.mvr.deviation = 1.0
    config.head.aggretriever = ConfigDict()  # Aggretriever: V = 1, of size lexical_dim + cls_dim.
    config.head.aggretriever.lexical_dim = 640  # size of the lexical part, pruned from the vocabulary
    config.head.aggretriever.cls_dim = 128  # size of the [CLS] part, after a linear layer
    # How the vocabulary becomes lexical_dim numbers: full (two halves, with a sign), semi, linear (learned), or
    # average, which uses no vocabulary: a learned projection of the mean over all tokens but [CLS].
    config.head.aggretriever.pruning = "full"
    config.head.aggretriever.mlm = True  # False: no MLM head; a token adds weight to its own word only
    config.head.aggretriever.term_weights = True  # learn a weight for each token; False: all weights are 1
    config.head.aggretriever.chunk = 16  # tokens projected to the vocabulary at a time: more is faster and takes more memory
    config.head.aggretriever.parts_weight = 0.5  # weight of the losses of the lexical part alone and of the [CLS] part alone
    config.head.i3 = ConfigDict()  # I3: V = 1.
    config.head.i3.variant = "paper"  # cross-attention to all tokens (paper), or to [CLS] only (released, as in its code)
    config.head.i3.reconstructor_layers = 1  # layers that reconstruct the pseudo-query from the passage
    config.head.i3.interactor_layers = 1  # layers that combine the passage with the reconstruction
    config.head.i3.pseudo_length = 32  # tokens of a pseudo-query
    config.head.i3.mask_id = 103  # id of [MASK]
    # The reconstruction loss is multiplied by reconstruction_weight * reconstruction_decay^epoch, from epoch 0.
    config.head.i3.reconstruction_weight = 1.0
    config.head.i3.reconstruction_decay = 0.1  # factor per epoch

    config.head.splade = ConfigDict()  # SPLADE and uniCOIL: V = 1, a sparse vector with a weight for each word.
    config.head.splade.expansion = True  # False: uniCOIL, where only words of the text have a weight
    # Weights of a query's words: encoded (as for passages), words (1 for each word), or learned (one weight for each
    # word of the vocabulary). The last two do not run the encoder on queries.
    config.head.splade.queries = "encoded"
    config.head.splade.special_ids = (0, 101, 102)  # token ids that are not words: BERT's [PAD], [CLS], [SEP]
    config.head.splade.chunk = 16  # tokens projected to the vocabulary at a time: more is faster and takes more memory

    # How the V vectors of a passage are combined: none (the score is their maximum), average, scalar_mix (learned
    # weights) or self_contrastive (trained with all, searched with one).
    config.pooling = "none"
    config.normalize = False  # True: scale every vector to length 1, so that scores are cosines

    # How text becomes tokens. Longer texts are cut; every command prints how many.
    config.tokens = ConfigDict()
    config.tokens.query_length = 256  # tokens of a query, at most
    config.tokens.passage_length = 256  # tokens of a passage, at most, title included
    # Text in front of every query, tokenized with it, such as "query: " for E5. {task} is replaced by the instruction
    # of the query's record, or else by tokens.task.
    config.tokens.query_prompt = ""
    # Text in front of every passage, tokenized with it, such as "passage: " for E5. {title} is replaced by the passage's
    # title, or by "none" (EmbeddingGemma), and the title is not put before the text again.
    config.tokens.passage_prompt = ""
    # Name of published prompts for queries and passages: qwen3, e5_mistral, bge_gemma2, gritlm, repllama, tevatron_mistral,
    # embedding_gemma or e5 (docs/language-models.md). "": the two keys above apply.
    config.tokens.prompts = ""
    config.tokens.task = ""  # instruction that replaces {task}; "": with tokens.prompts, the one for web search
    # False: the mean (head.token mean and mean_without_first) leaves out the prompt and the [CLS] or <s> before it.
    config.tokens.prompt_in_mean = True
    # Between title and text: "[SEP]" ([CLS] title [SEP] text [SEP]), or any other text: title, separator and text are
    # then tokenized as one text. " " is used by BEIR, mteb and Tevatron. "auto": " " for a sentence-transformers or
    # PyLate directory, else "[SEP]".
    config.tokens.title_separator = "auto"
    # For language models whose tokenizer.json appends no token to a text. True: append eos_token, whose state is
    # head.token="last". False: append nothing (GritLM, LLM2Vec; `jaxret open`).
    config.tokens.end_token = True
    config.tokens.length_multiple = 32  # training batches are padded to a multiple of this, to compile fewer programs
    # True: put several training texts into one row instead of padding each to the longest: about 1.06 tokens are computed
    # for each real one (docs/scale.md). Losses and gradients change only by rounding.
    config.tokens.packing = False

    # Data. A source is a file or folder in any format of docs/data.md (FORMAT:PATH forces one), or a data set of a
    # library: tfds:NAME, irds:NAME, hf:NAME.
    config.data = ConfigDict()
    config.data.train = ""  # training examples (of pre-training: a corpus)
    config.data.train_split = "train"  # split to train on, if data.train is a folder
    config.data.dev = ""  # validation examples; "": no validation, and the best checkpoint is the last one
    config.data.dev_split = "dev"  # split to validate on, if data.dev is a folder
    config.data.negatives = 1  # hard negatives per query and step, besides the other passages of the batch
    # Train on this many random queries, chosen by seed.data and the queries' ids; 0: on all. A larger subset contains a
    # smaller one.
    config.data.subset = 0
    # Rankings for the training queries of a folder with judgements: ranked passages that are not judged relevant are
    # the hard negatives.
    config.data.negatives_run = ""
    # Rankings for the queries of data.dev, used like data.negatives_run. A reranker ranks the relevant passages among
    # the ranked ones.
    config.data.dev_negatives_run = ""
    # Rankings with a teacher's scores, for loss.kl and loss.margin_mse, matched by ids; `jaxret rerank` writes such
    # files. "": the scores in data.train.
    config.data.teacher_run = ""
    # Pseudo-queries for I3: a JSONL file of {"_id": passage id, "text": query}, or "query" (the training query of its
    # positive). "": none, and no reconstruction loss.
    config.data.pseudo_queries = ""
    # Folder for tokenized texts, which are made once and mapped into memory. "": jaxret/tokens in the user's cache
    # ($XDG_CACHE_HOME, else ~/.cache). It may be deleted when no job runs. For several hosts, use a shared disk.
    config.data.store = ""
    config.data.on_error = "error"  # bad records: error (stop), skip (leave out and count) or keep (keep empty passages)

    config.loss = ConfigDict()  # The terms of the loss, which are added (docs/training.md).
    config.loss.temperature = 1.0  # scores are divided by it: 1 for raw inner products, about 0.05 for cosines
    config.loss.local_temperature = 1.0  # temperature of the local term: the softmax over the vectors of one passage
    config.loss.local_weight = 0.0  # weight (lambda) of the local term, which self_contrastive pooling and MVR have
    # Annealing: both temperatures are multiplied by max(annealing_floor, exp(-annealing_rate * epoch)), from epoch 0.
    # 0: off.
    config.loss.annealing_rate = 0.0
    config.loss.annealing_floor = 0.3  # smallest factor of the temperatures
    # Weight of the contrastive loss, the local term included. 0: only the terms below and the losses of the head.
    config.loss.contrastive_weight = 1.0
    # False: the softmax covers only the query's own passages, its positive and hard negatives (I3, equation 9), and not
    # passages of other queries; the measures nll and average_rank do the same.
    config.loss.in_batch_negatives = True
    config.loss.false_negatives = ConfigDict()  # Negatives that are probably relevant.
    # True: leave a negative out of the softmax if its score exceeds the positive's by more than the margin.
    config.loss.false_negatives.masked = False
    config.loss.false_negatives.margin = 0.1  # difference of scores before the temperature; 0.1 suits cosines
    # Distillation by KL(teacher || student) over the query's own passages, mean over queries. The teacher's scores are
    # in data.train or data.teacher_run (docs/training.md).
    config.loss.kl = ConfigDict()
    config.loss.kl.weight = 0.0  # 0: off
    config.loss.kl.temperature = 1.0  # student's temperature, instead of loss.temperature: about 0.05 for cosines
    config.loss.kl.teacher_temperature = 1.0  # temperature of the teacher
    config.loss.kl.scaled = False  # True: multiply by the square of the student's temperature
    # Distillation by margins: the squared difference between student and teacher of (positive's score - negative's
    # score), mean over the hard negatives.
    config.loss.margin_mse = ConfigDict()
    config.loss.margin_mse.weight = 0.0  # 0: off
    # Distillation from train.teacher: KL(teacher || student) of each query's scores with all passages of the batch,
    # over all devices.
    config.loss.in_batch_kl = ConfigDict()
    config.loss.in_batch_kl.weight = 0.0  # 0: off
    config.loss.in_batch_kl.temperature = 1.0  # student's, instead of loss.temperature: about 0.05 for cosines
    config.loss.in_batch_kl.teacher_temperature = 1.0  # temperature of the teacher
    config.loss.in_batch_kl.scaled = False  # True: multiply by the square of the student's temperature
    # Sigmoid cross-entropy of each of the query's own passages.
    config.loss.binary = ConfigDict()
    config.loss.binary.weight = 0.0  # 0: off
    config.loss.binary.positive_weight = 1.0  # factor of the positive's term

    # Matryoshka: the loss is a weighted sum over vector sizes. A size keeps the first dimensions of every vector, scaled
    # to length 1 (needs `normalize`); it has every term that compares queries with passages (docs/training.md).
    config.loss.matryoshka = ConfigDict()
    config.loss.matryoshka.sizes = ()  # such as (768, 256, 64), with the size of the whole vector; (): off
    config.loss.matryoshka.weights = ()  # one for each size; (): all 1

    # SPLADE and uniCOIL: penalties on the weights of words over all texts of a batch. Good values depend on the loss
    # and on the batch size.
    config.loss.sparsity = ConfigDict()
    config.loss.sparsity.query = 0.0  # weight of the penalty on queries
    config.loss.sparsity.passage = 0.0  # weight of the penalty on passages
    config.loss.sparsity.query_norm = "flops"  # penalty; flops: sum_j (mean_i |w_ij|)^2; l1: mean_i sum_j |w_ij|
    config.loss.sparsity.passage_norm = "flops"  # penalty on passages, flops or l1
    # Number of first steps in which both weights rise quadratically from 0; a third of all steps is usual. 0: constant
    # weights.
    config.loss.sparsity.steps = 0

    config.optimizer = ConfigDict()
    config.optimizer.name = "adamw"  # one of adamw, lamb (optax), lamb_reference (no bias correction, weight norms up to 10)
    config.optimizer.learning_rate = 2e-5  # the highest rate, after warm-up
    config.optimizer.head_learning_rate = 0.0  # rate of the parameters that head_parameters matches; 0: learning_rate
    # Regular expression for parameter paths. The default matches the layers of heads, except projections to the
    # vocabulary.
    config.optimizer.head_parameters = r"^(\w+_)?head/(?!vocabulary)"
    # After warm-up: linear or cosine (to 0 at the last step) or none (constant). A run that is extended takes the rates
    # of the longer schedule from there on (docs/training.md).
    config.optimizer.decay = "linear"
    config.optimizer.warmup_fraction = 0.05  # part of all steps
    config.optimizer.warmup_steps = -1  # steps; -1: use warmup_fraction
    # Decay of a moving average of the weights: ema * average + (1 - ema) * weights after every step. Validation,
    # checkpoints, encoding and search use the average, which covers about the last 1 / (1 - ema) steps. 0: off.
    config.optimizer.ema = 0.0
    # Regular expression for paths of parameters that are not trained, such as "encoder/". "": all are trained.
    config.optimizer.frozen = ""
    config.optimizer.b1 = 0.9  # Adam's decay of the first moment
    config.optimizer.b2 = 0.999  # Adam's decay of the second moment
    config.optimizer.eps = 1e-8  # added to the denominator of the update
    config.optimizer.weight_decay = 0.0  # not applied to biases and layer norms
    config.optimizer.clip_norm = 2.0  # largest norm of the gradient; 0: no clipping
    # Factor of clip_norm. Some trainers average gradients of a gathered loss over W processes, which multiplies their
    # clip norm by W: for "2.0 on 4 GPUs" of such a trainer set 4.
    config.optimizer.reference_processes = 1

    # LoRA: the encoder's weights are frozen; low-rank adapters of its dense layers and the head are trained
    # (docs/language-models.md). Checkpoints hold adapters and head; every command that opens the run reads
    # encoder.checkpoint again and adds the adapters to its weights.
    config.lora = ConfigDict()
    config.lora.rank = 0  # rank of the adapters; 0: no adapters, and the whole encoder is trained
    config.lora.alpha = 16.0  # the output of an adapter is multiplied by alpha / rank
    config.lora.rslora = False  # True: the output of an adapter is multiplied by alpha / sqrt(rank) instead
    config.lora.dropout = 0.0  # rate at which values of an adapter's input are dropped
    # Dense layers that get an adapter: names in the Hugging Face model, such as ("q_proj", "v_proj"), or regular
    # expressions of whole names, as in PEFT; ("all-linear",): all of the encoder's layers.
    config.lora.targets = ("all-linear",)
    config.lora.layers = ()  # numbers of the encoder's layers, from 1, that get adapters; (): all
    config.lora.adapters = ""  # directory of PEFT's adapters to start from; "": new adapters, whose output is 0 at the start
    # Name of the base in adapter_config.json of lora.adapters, if its last part differs from that of encoder.checkpoint.
    config.lora.base = ""
    # Type of the encoder's kernels and tables in memory: bfloat16 or float32. bfloat16 rounds weights that are float32 in
    # the file.
    config.lora.base_dtype = "bfloat16"

    # Pre-training: only `jaxret pretrain` reads this group (docs/pretraining.md). data.train is then a corpus,
    # train.batch_size counts spans (for cocondenser: passages), and encoder.checkpoint="" starts from random weights.
    config.pretraining = ConfigDict()
    config.pretraining.method = "mlm"  # one of mlm, condenser, cocondenser or retromae
    # Tokens of a span, at most, special tokens included. A passage is cut into the fewest spans, of about equal length.
    config.pretraining.length = 256
    config.pretraining.shortest = 8  # spans with fewer tokens of text are left out
    config.pretraining.mask_rate = 0.15  # part of a span's tokens to mask, in whole words
    config.pretraining.head_layers = 2  # condenser, cocondenser: layers of the head
    config.pretraining.skip_from = 6  # condenser, cocondenser: the head reads the tokens of this encoder layer
    config.pretraining.late_mlm = True  # condenser, cocondenser: also train the last layer as a masked language model
    config.pretraining.contrast_weight = 1.0  # cocondenser: weight of the contrastive loss between spans of one passage
    config.pretraining.decoder_rate = 0.5  # retromae: part of the tokens hidden from a decoder position, in whole words
    config.pretraining.decoder_masks = 256  # retromae: different masks of a span, one of which each position uses
    config.pretraining.seed = 12345  # seed of the masks
    # The BERT to start from if encoder.checkpoint is empty.
    config.pretraining.scratch = ConfigDict()
    config.pretraining.scratch.tokenizer = ""  # directory of a tokenizer; "": train WordPiece on the corpus
    config.pretraining.scratch.vocabulary = 30522  # largest size of the trained vocabulary
    config.pretraining.scratch.lowercase = True  # the trained tokenizer lower-cases texts
    config.pretraining.scratch.hidden_size = 768  # width of hidden states
    config.pretraining.scratch.layers = 12  # number of layers
    config.pretraining.scratch.heads = 12  # attention heads of a layer
    config.pretraining.scratch.intermediate_size = 3072  # width of the feed-forward layers
    config.pretraining.scratch.positions = 512  # longest input, in tokens

    config.train = ConfigDict()  # Length, batches and log of training (docs/training.md).
    config.train.batch_size = 128  # queries of a batch, over all devices
    config.train.epochs = 40.0  # passes over the training examples
    config.train.steps = -1  # steps; -1: use train.epochs; 0: write the untrained model as a checkpoint
    config.train.start_from = ""  # folder of a finished run of the same model: start from its best checkpoint
    # Rounds: several runs that form one training with one schedule, each on its own data (docs/training.md). Round 2
    # and later continue from the last checkpoint of the run in train.start_from, optimizer state included.
    config.train.rounds = 1
    config.train.round = 1  # number of this round, from 1
    # Folder of a finished retriever that reads the same tokens: its best checkpoint encodes every batch, and
    # loss.in_batch_kl learns from its scores.
    config.train.teacher = ""
    # Gradient caching: queries (with their passages) encoded at a time, over all devices; 0: all at once. Rounded up to
    # a divisor of the batch size that gives every device a part. Validation uses the same chunks.
    config.train.chunk_size = 0
    # Gradient accumulation: batches per step, whose gradients are averaged. Each batch has only its own in-batch
    # negatives, and one batch is in memory at a time.
    config.train.accumulate = 1
    # Skip up to this many steps whose loss, gradient or update is not finite; the next one stops the run. A skipped
    # step changes only the step number, and metrics.jsonl counts it.
    config.train.skip_nonfinite = 0
    config.train.log_every = 10  # steps between lines of metrics.jsonl
    # Experiment trackers that get every logged line during training: "trackio", "wandb", "mlflow". They must be
    # installed. If one fails, training continues, and `jaxret track` sends the rest later.
    config.train.trackers = ()
    config.train.tracker_project = "jaxret"  # project at the trackers (mlflow: experiment)
    # First and last step of a trace in the run's folder profile/, for XProf and Perfetto, such as (20, 25); (): none.
    # These steps take longer.
    config.train.profile = ()
    config.train.checkpoint_every = 0  # steps between validations and checkpoints; 0: an epoch

    config.validation = ConfigDict()  # Validation during training; needs data.dev (docs/training.md).
    config.validation.batch_size = 128  # queries of a batch for nll, average_rank and accuracy
    # Number of passages to retrieve from: all relevant dev passages, then their hard negatives, then training passages.
    config.validation.pool_size = 2000
    # Retrieve from a whole corpus instead of the pool: a source with passages, judged by data.dev; or "train": all
    # training and dev passages. Each validation encodes the corpus; vectors are not stored.
    config.validation.corpus = ""
    # Metric that selects the best checkpoint: RR@10, Success@5, Success@20; with a corpus also nDCG@10 and R@100; or
    # nll or average_rank inside a batch, as in MLR's published code.
    config.validation.metric = "RR@10"
    # Another metric, from epoch validation.then_from on; "": none. From this epoch on, only checkpoints with the new
    # metric can be the best.
    config.validation.then = ""
    config.validation.then_from = 32.0  # epoch
    # Which checkpoint is the best one: metric (the best by the metric), or last (the last one). Encoding, search,
    # mining, train.teacher and train.start_from use it.
    config.validation.best = "metric"

    # Seeds: separate keys, so that one can be varied alone.
    config.seed = ConfigDict()
    config.seed.init = 12345  # initial values of new parameters
    config.seed.data = 12345  # order of the examples, and data.subset
    config.seed.dropout = 12345  # dropout masks
    config.seed.negatives = 12345  # choice of hard negatives

    # Devices and processes (docs/clusters.md).
    config.mesh = ConfigDict()
    # Devices to split the parameters over; 0: all devices. The batch is always split over all devices.
    config.mesh.fsdp = 1
    # Devices of a process that share the products of each layer of a language model, if one layer is too large for a
    # device. These devices have the same part of the batch.
    config.mesh.tensor = 1
    # Precision of the sum of gradients over devices: float32, or bfloat16 for half the traffic.
    config.mesh.reduce_dtype = "float32"
    # Several hosts: "auto" on a TPU pod or under Slurm, else HOST:PORT of process 0. "": one process.
    config.mesh.coordinator = ""
    config.mesh.num_processes = 1  # with HOST:PORT: number of processes
    config.mesh.process_id = 0  # with HOST:PORT: number of this process, from 0
    config.mesh.initialization_timeout = 300  # seconds that processes wait for each other at the start
    # Required platform: tpu, gpu or cpu; an error if it is absent. "": JAX's default, which is the CPU without an
    # accelerator. `jaxret encode` and `jaxret search` have a flag --platform instead.
    config.mesh.platform = ""

    config.encode = ConfigDict()  # Encoding of a corpus (docs/encoding.md).
    config.encode.tokens_per_batch = 16384  # about this many tokens per batch, over all devices
    # Passages of a shard, at most; a killed job loses the shards that it was computing. A shard also has at most about a
    # minute's work (docs/files.md).
    config.encode.shard_rows = 8192
    config.encode.shard_mb = 64  # MB (10^6 bytes) of vectors in a shard, at most
    config.encode.words = 0  # SPLADE and uniCOIL: words of a passage to store, those with the largest weights; 0: all
    # Numbers of a vector to keep, from the first one, scaled to length 1 again with `normalize`; 0: all. For models
    # trained with loss.matryoshka. The truncate_dim of a sentence-transformers directory sets it.
    config.encode.dimension = 0
    config.encode.dtype = "float32"  # type of the vectors on disk: float32 or float16

    return config
