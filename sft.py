"""Supervised fine-tuning (SFT) of a language model on TL;DR summaries.

The first training stage of "The N+ Implementation Details of RLHF with PPO" (Details 7-9, Table 3):

    accelerate launch sft.py --model pythia-1b

Inputs:  a base model and a pre-tokenised dataset (tldr_dataset.py).
Outputs: models/<model>/sft_<seed>/ with safetensors, tokenizer, run.json, model card, samples_validation.jsonl.

Next-token cross-entropy on query and reference summary: [PAD] is ignored and EOS is trained, so that the policy learns
to end its summaries. A global batch is cut into micro-batches of like length that reach the model without padding; its
loss is the mean over all its tokens on all ranks. Evaluation: validation loss, and ROUGE of near-greedy summaries.

Shapes: N rows of the dataset, B rows of a batch, Q query, T response, L = Q + T sequence, V vocabulary. Packed, a
micro-batch is one row of P tokens, of which M are predicted.
"""

import atexit
import fcntl
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Literal

import evaluate
import torch
import torch.nn.functional as F
import tyro
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import ProjectConfiguration, broadcast_object_list, gather_object, set_seed
from datasets import load_dataset, load_from_disk
from huggingface_hub import HfApi
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from rouge_score.rouge_scorer import RougeScorer
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

SIZES = ("70m", "160m", "410m", "1b", "1.4b", "2.8b", "6.9b", "12b")
PYTHIA = {f"pythia-{size}": f"EleutherAI/pythia-{size}-deduped" for size in SIZES}


@dataclass(config={"allow_inf_nan": False, "extra": "forbid"})
class Args:
    # run
    model: str = "pythia-1b"
    """Base model: pythia-{70m,160m,410m,1b,1.4b,2.8b,6.9b,12b}, any Hub id, or a local folder."""
    seed: NonNegativeInt = 44413
    """Seed of initialisation, data order and sampling in training. The paper's: 44413, 55513, 66613, 77713."""
    output_dir: str = ""
    """Folder that the run is written to. Empty: models/<model>/<stage>_<seed>."""
    overwrite: bool = False
    """Delete the run that is in the output folder."""
    push_to_hub: str = ""
    """Hub repository (user/name) that the finished folder is uploaded to. Empty: not uploaded."""
    # data
    dataset: str = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"
    """Pre-tokenised SFT dataset: Hub id, save_to_disk folder, or folder of parquet/JSONL files named by split."""
    # model
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    # optimiser (Detail 9, Table 3)
    num_epochs: PositiveFloat = 1.0
    """Passes over the train split."""
    max_updates: NonNegativeInt = 0
    """End the run, and its learning-rate schedule, after at most this many optimiser steps (0: num_epochs decides)."""
    batch_size: PositiveInt = 128
    """Rows in one update, over all processes."""
    micro_batch_size: PositiveInt = 8
    """Rows in one training pass of a process (up to 8 times as many without gradients); a step accumulates several."""
    lr: NonNegativeFloat = 3e-6
    """Learning rate of AdamW at the start; it follows a cosine to zero."""
    adam_eps: NonNegativeFloat = 1e-5
    """Epsilon of AdamW."""
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay of AdamW (torch's default, which the paper's code leaves in place)."""
    # algorithm
    loss_on: Literal["query_response", "response"] = "query_response"
    """Tokens that are trained: query and response (the paper's code), or the response alone (trlX)."""
    # evaluation
    eval_rows: NonNegativeInt = 0
    """Number of first rows of each validation split that are evaluated (0: all)."""
    response_length: PositiveInt = 53
    """Longest summary that is sampled, in tokens."""
    eval_temperature: PositiveFloat = 0.01
    """Sampling temperature of evaluations; 0.01 is near-greedy."""
    # logging
    save_every: NonNegativeInt = 0
    """Updates between checkpoints of the whole training state (0: save_minutes alone decides)."""
    save_minutes: NonNegativeFloat = 30.0
    """Minutes between such checkpoints (0: save_every alone decides); there is one at the end in any case."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints that are kept."""
    resume: bool = True
    """Go on from the newest whole checkpoint where the output folder holds this very run, unfinished."""
    track: bool = False
    """Log to Weights and Biases (project $WANDB_PROJECT or tldr_rlhf), besides TensorBoard (<output_dir>/runs)."""


def load_tokenizer(path: str):
    """Tokenizer with a [PAD] of its own. Raises ValueError if it has no EOS, or if its PAD is its EOS."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    # Detail 3 ([PAD] is not EOS): else EOS is masked as padding, is never trained, and summaries never end
    eos, pad = tokenizer.eos_token, tokenizer.pad_token
    if eos in (None, pad):
        remedy = "set eos_token, and pad_token to null, in its tokenizer_config.json"
        raise ValueError(f"tokenizer {path}: expected an EOS and another PAD, found EOS {eos!r}, PAD {pad!r}; {remedy}")
    if pad != "[PAD]":  # transformers gives Pythia's a pad of its own choice, <|padding|>, which the datasets don't use
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    return tokenizer


def load_split(source: str, split: str, columns: list[str], tokenizer, config, max_rows: int = 0, sampled: int = 0):
    """One pre-tokenised split -> (Dataset, {column: (N, L) tokens}); its first `max_rows` rows, or all for 0.
    Raises FileNotFoundError for a missing or empty split, ValueError for a column that is missing or unfit, also if
    a query and its response, or `sampled` tokens, are more than the model has positions."""
    where, remedy = f"dataset {source}, split {split}", "make sft/ or comparisons/ for this model with tldr_dataset.py"
    try:
        if Path(source, "dataset_dict.json").exists():
            dataset = load_from_disk(f"{source}/{split}")
        else:
            data = "data/" if Path(source, "data").is_dir() else ""  # where a copy of a Hub repository has its files
            files = {split: f"{data}{split}[.-]*"} if Path(source).is_dir() else None
            dataset = load_dataset(source, data_files=files, split=split)
    except (FileNotFoundError, ValueError, IndexError) as error:  # ValueError: no such split; IndexError: no rows
        remedy += ", or leave the split out of --eval_splits" if split not in ("train", "validation") else ""
        raise FileNotFoundError(f"{where}: missing or empty: {error}; {remedy}") from error
    dataset = dataset.flatten().select(range(len(dataset))[: max_rows or None])  # flat: extra.confidence is a column
    if missing := sorted({"query", *columns} - set(dataset.column_names)):
        raise ValueError(f"{where}: column {missing[0]!r} is missing among {dataset.column_names}; {remedy}")
    # compare the first tokens only: the Hub's query texts have lost spaces in decoding, and newlines at the end
    start, tokens = tokenizer(dataset[0]["query"]).input_ids[:4], {}
    pad, eos, size = tokenizer.pad_token_id, tokenizer.eos_token_id, min(config.vocab_size, len(tokenizer))
    rotary = getattr(config, "rope_parameters", None)  # has no last position
    num_positions = math.inf if rotary else getattr(config, "max_position_embeddings", math.inf)
    num_positions = min(num_positions, getattr(config, "sliding_window", None) or math.inf)  # packed attention has none
    for column in columns:
        rows = tokens[column] = dataset.with_format("torch", columns=[column])[:][column]  # (N, L)
        if isinstance(rows, list):
            lengths = sorted({0 if row is None else len(row) for row in rows})
            raise ValueError(f"{where}: column {column!r} has rows of {lengths} tokens, not of one length; {remedy}")
        is_query, is_pad = column == "query_token", rows == pad
        lengths, begins = (~is_pad).sum(1), rows[0][~is_pad[0]][: len(start)].tolist()  # (N,), up to 4 tokens
        # a query shares the model's positions with its sample, a response with its query
        needs = lengths + (sampled * is_query if "query" in column else (tokens["query_token"] != pad).sum(1))
        # a query ends at the right, behind its padding; all else ends with EOS, before it
        misplaced = is_pad[:, -1] if is_query else rows.gather(1, lengths.clamp(min=1)[:, None] - 1)[:, 0] != eos
        foreign, begin = ((rows < 0) | (rows >= size) & ~is_pad).any(1), "query" in column and begins != start
        foreign[0] |= begin
        ids = f"row 0 begins {begins}, not {start}" if begin else f"ids {rows.min()} to {rows.max()} of {size}"
        limits = "a sliding window counts; --max_query_length, --max_cnndm_query_length of tldr_dataset.py"
        limits += ", --response_length" if sampled else ""
        problems = {  # and the rows that have them (N,)
            f"is of another tokenizer than the model's ({ids})": foreign,
            "is all padding": lengths == 0,
            f"needs {needs.max()} positions, the model has {num_positions} ({limits})": needs * (needs > num_positions),
            "ends with padding" if is_query else "has no EOS, or not right before its padding,": misplaced,
        }
        for problem, found in problems.items():
            if found.any():
                raise ValueError(f"{where}: column {column!r} {problem} in row {found.int().argmax()}; {remedy}")
        if "query" not in column and 0 < sampled < lengths.median():
            print(f"{where}: most of {column!r} is longer than --response_length {sampled}", file=sys.stderr)
    return dataset, tokens


def stream_rows(seed: int, num_rows: int, start: int, stop: int) -> torch.Tensor:
    """Rows start..stop of an endless stream of passes over the data, each a new permutation -> (stop - start,).
    A function of the seed alone, so all ranks see the same stream, whatever their number."""
    first = start // num_rows
    generators = [torch.Generator().manual_seed(seed * 1_000_003 + i) for i in range(first, (stop - 1) // num_rows + 1)]
    passes = torch.cat([torch.randperm(num_rows, generator=generator) for generator in generators])
    return passes[start - first * num_rows : stop - first * num_rows]


def make_micro_batches(rows: torch.Tensor, lengths: torch.Tensor, size: int, rank: int = 0, num_ranks: int = 1) -> list:
    """Cut a global batch into this rank's micro-batches -> [(rows, weight)], rows of like length together to pad less.
    rows (B,) index the dataset, whose lengths are (N,). Each row is on one rank, once, with weight 1. Ranks exchange
    gradients together, so all get equally many: a rank that would get fewer repeats another's row, with weight 0."""
    groups = rows[lengths[rows].argsort(stable=True)].split(size * num_ranks)
    return [(group[rank::num_ranks], 1.0) if rank < len(group) else (group[:1], 0.0) for group in groups]


def load_config(path: str, **overrides):
    """Model configuration with every dropout, and the noise of routers, at 0."""
    config = AutoConfig.from_pretrained(path, **overrides)
    for name, value in config.to_dict().items():
        # Detail 7 (no dropout): log-probabilities must repeat, or PPO's ratio is not 1 at its first step, KL is noise
        if ("drop" in name or "jitter" in name) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def load_model(auto_class, path: str, config) -> tuple:
    """Model in fp32, and whether it has its head: a reward model's (score.weight) may be missing, and is random then.
    Raises ValueError for another missing weight, or a head too many: the model is of another kind, or damaged."""
    model, info = auto_class.from_pretrained(path, config=config, dtype=torch.float32, output_loading_info=True)
    lost = sorted(info["missing_keys"] - {"score.weight"})
    if lost or "score.weight" in info["unexpected_keys"]:  # with tied embeddings a reward model's file lacks nothing
        found = f"none for {lost[0]} ({len(lost)} missing)" if lost else "the head of a reward model"
        raise ValueError(f"{path}: expected the weights of a {type(model).__name__}, found {found}; give such a model")
    return model, "score.weight" not in info["missing_keys"]


def model_inputs(tokens: torch.Tensor, pad_token_id: int) -> dict:
    """Left-padded tokens (B, L) -> what the model is fed to generate, each (B, L), so that padding changes no result:
    [PAD] [PAD] 17 23 -> input_ids 0 0 17 23, attention_mask 0 0 1 1, position_ids 0 0 0 1."""
    # Detail 3 ([PAD] has no embedding): the model is fed 0 there, and attends to none of it
    mask = tokens != pad_token_id
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": tokens * mask, "attention_mask": mask.long(), "position_ids": position_ids}


def packed_attention(module, query, key, value, attention_mask, scaling=None, **kwargs) -> tuple:
    """Attention for sequences that lie end to end in one row, causal inside each and blind to the others:
    (1, heads, P, head size) -> (1, P, heads, head size). transformers calls it with the mask of `packed_inputs`, which
    holds their lengths, integers (1, 1, 1, B); attention with any other mask is left to transformers' own function."""
    if attention_mask is None or attention_mask.dtype != torch.long:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if kwargs.get("softcap") or kwargs.get("s_aux") is not None:
        raise ValueError("its attention caps scores or has sinks")
    lengths = attention_mask.flatten().tolist()
    parts = (tensor.to(value.dtype).split(lengths, dim=2) for tensor in (query, key, value))  # autocast: cast once
    options = {"is_causal": True, "scale": scaling, "enable_gqa": key.shape[1] < query.shape[1]}
    outputs = [F.scaled_dot_product_attention(*sequence, **options) for sequence in zip(*parts)]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register("packed", packed_attention)
AttentionMaskInterface.register("packed", sdpa_mask)


def packed_inputs(model, tokens: torch.Tensor, pad_token_id: int) -> dict:
    """What the model is fed to see the P tokens of (B, L) that are not [PAD] end to end, each sequence by itself; its
    attention becomes ours. Padding, on whichever side, costs nothing and can't change a result."""
    if model.config._attn_implementation != "packed":
        model.set_attn_implementation("packed")
    # Detail 3 ([PAD] has no embedding): it does not reach the model
    mask = tokens != pad_token_id
    inputs = {"input_ids": tokens[mask][None], "position_ids": (mask.cumsum(1) - 1)[mask][None]}  # (1, P)
    lengths = mask.sum(1).cpu().view(1, 1, 1, -1)  # a mask of 4 dimensions reaches the attention as it is
    return inputs | {"attention_mask": lengths, "use_cache": False}


def get_hidden(model, tokens: torch.Tensor, pad_token_id: int) -> torch.Tensor:
    """Last hidden states of the P tokens of (B, L) that are not [PAD], row after row -> (P, D)."""
    return model.base_model(**packed_inputs(model, tokens, pad_token_id)).last_hidden_state[0]


@torch.no_grad()
def check_packing(model, path: str) -> None:
    """Raise ValueError for an architecture in which sequences end to end are not what they are alone: it has a state
    that goes from one to the next (Mamba, convolutions), or an attention or positions of its own."""
    tokens = torch.tensor([[2, 3, 4, 5, -1, -1], [7, 6, 5, 4, 3, 2]])  # -1: [PAD]
    try:
        rows = [model.base_model(input_ids=row[row >= 0][None], use_cache=False).last_hidden_state[0] for row in tokens]
        difference = (get_hidden(model, tokens, -1) - torch.cat(rows)).abs().max() / torch.cat(rows).std()
        if not difference < 1e-3:  # in fp32 it is some 1e-6
            raise ValueError(f"hidden states differ by {difference:.2g} standard deviations")
    except Exception as error:  # each architecture fails in a way of its own
        kind = f"{path}: {type(model).__name__} can't be used, sequences end to end are not what they are alone"
        raise ValueError(f"{kind}: {error}") from error


def truncate_after_eos(responses: torch.Tensor, eos_token_id: int, pad_token_id: int) -> torch.Tensor:
    """Put [PAD] in place of all that follows the first EOS of (B, T): [7, EOS, 9, EOS] -> [7, EOS, PAD, PAD]."""
    is_eos = responses == eos_token_id
    return responses.masked_fill((is_eos.cumsum(1) - is_eos.long()) > 0, pad_token_id)


class OnePrecisionCache(DynamicCache):
    """Keys and values of earlier tokens, in the precision of the values: autocast leaves keys in fp32 after a rotary
    embedding, and would cast all of them, and the values that are stored with them, at every token."""

    def update(self, key_states, value_states, *args, **kwargs) -> tuple:
        return super().update(key_states.to(value_states.dtype), value_states, *args, **kwargs)


@torch.no_grad()
def generate(model, queries: torch.Tensor, tokenizer, response_length: int, temperature: float) -> tuple:
    """Sample responses to left-padded queries (B, Q) -> responses (B, T), [PAD] after EOS, and log-probabilities (B, T)
    of their tokens over the whole vocabulary, which mean nothing after EOS. Ends as soon as every row has its EOS.
    [PAD], and rows of the vocabulary that no token owns, are never sampled."""
    B, eos, pad, V = len(queries), tokenizer.eos_token_id, tokenizer.pad_token_id, model.config.vocab_size
    inputs = model_inputs(queries[:, (queries != pad).any(0)], pad)  # trimmed to the longest of these queries
    vocabulary, cache = torch.arange(V, device=queries.device), OnePrecisionCache()
    never = (vocabulary >= len(tokenizer)) | (vocabulary == pad)  # (V,)
    responses = queries.new_full((B, response_length), pad)  # (B, T)
    logprobs = torch.zeros(responses.shape, device=queries.device)  # (B, T)
    for t in range(response_length):
        outputs = model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits = outputs.logits[:, -1].float() / temperature  # (B, V)
        # by the inverse of the cumulative distribution: one random number a row, where multinomial draws V
        cumulative = logits.masked_fill(never, -math.inf).softmax(1).cumsum(1, dtype=torch.float64)  # (B, V)
        threshold = torch.rand(B, 1, dtype=torch.float64, device=queries.device) * cumulative[:, -1:]
        responses[:, t : t + 1] = tokens = torch.searchsorted(cumulative, threshold, right=True)  # (B, 1)
        logprobs[:, t] = logits.gather(1, tokens)[:, 0] - logits.logsumexp(1)
        if (responses[:, : t + 1] == eos).any(1).all():
            break
        mask = F.pad(inputs["attention_mask"], (0, 1), value=1)
        inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": inputs["position_ids"][:, -1:] + 1}
    return truncate_after_eos(responses, eos, pad), logprobs


def get_logits(policy, tokens: torch.Tensor, kept: torch.Tensor, pad_token_id: int) -> torch.Tensor:
    """Logits from which the M kept tokens of (B, L) are predicted, one position before each -> (M, V) in fp32.
    kept (B, L) is no [PAD] and no first token; at no other position do logits exist."""
    index = kept[tokens != pad_token_id].nonzero()[:, 0]  # (M,) of the P that are not [PAD]
    inputs = packed_inputs(policy, tokens, pad_token_id)
    # made by the model itself, since some scale or cap theirs; the backward pass of squeeze is a view, of [0] a copy
    return policy(**inputs, logits_to_keep=index - 1).logits.squeeze(0).float()


def sft_loss(policy, tokens: torch.Tensor, target_mask: torch.Tensor, pad_token_id: int) -> torch.Tensor:
    """Next-token cross-entropy, summed over the trained tokens: tokens and target_mask (B, L) -> scalar.

    tokens       17 23 EOS [PAD]
    target_mask   0  1  1    0    (nothing predicts the first token)
    """
    logits = get_logits(policy, tokens, target_mask, pad_token_id)  # (M, V)
    return F.cross_entropy(logits, tokens[target_mask], reduction="sum")


class TokenLoss(torch.nn.Module):
    """Policy whose forward pass is `sft_loss`, so that DDP and DeepSpeed see all of it."""

    def __init__(self, policy, pad_token_id: int):
        super().__init__()
        self.policy, self.pad_token_id = policy, pad_token_id

    def forward(self, tokens: torch.Tensor, target_mask: torch.Tensor) -> torch.Tensor:
        return sft_loss(self.policy, tokens, target_mask, self.pad_token_id)


@torch.no_grad()
def map_rows(accelerator, function, lengths: torch.Tensor, micro_batch_size: int) -> torch.Tensor:
    """Share N rows of these lengths among the ranks; function(rows) gives one result a row -> (N, ...) in row order.
    It has its own random numbers, at every call the same: evaluating more often does not change the training run."""
    pieces, rank, num_ranks = [], accelerator.process_index, accelerator.num_processes
    with torch.random.fork_rng([accelerator.device] * (accelerator.device.type == "cuda")), accelerator.autocast():
        torch.manual_seed(rank)
        for rows, weight in make_micro_batches(torch.arange(len(lengths)), lengths, micro_batch_size, rank, num_ranks):
            pieces += zip(rows.tolist(), function(rows).tolist()) if weight else []
    return torch.tensor([result for _, result in sorted(gather_object(pieces))])


def write_samples(path: Path, **columns) -> str:
    """Write columns (query, response, reference, ...) as one JSON object a line -> table of the first four, to log."""
    write_text(path, "".join(json.dumps(dict(zip(columns, row))) + "\n" for row in zip(*columns.values())))
    rows = [columns, ["---"] * len(columns), *list(zip(*columns.values()))[:4]]
    cells = [[str(cell).replace("\n", "<br>").replace("|", "&#124;") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def compute_rouge(predictions: list[str], references: list[str]) -> dict:
    """Mean ROUGE-1/2/L F-measure over the corpus: by `evaluate`, or without a Hub by rouge_score, on which it rests."""
    names = ("rouge1", "rouge2", "rougeL")
    try:
        rouge = evaluate.load("rouge")  # the metric's module comes from the Hub
        rows, source = rouge.compute(predictions=predictions, references=references, use_aggregator=False), "evaluate"
    except (OSError, ImportError):
        source = "rouge_score, since the module of evaluate could not be loaded"
        scores = list(map(RougeScorer(names).score, references, predictions))
        rows = {name: [score[name].fmeasure for score in scores] for name in names}
    print(f"ROUGE by {source}", file=sys.stderr)
    return {f"eval/validation/{name}": float(sum(rows[name]) / len(predictions)) for name in names}


# What follows, up to main, keeps a run in its folder: arguments, checkpoints, results. It is the same in every script.


def write_text(path: Path, text: str) -> None:
    """Write a file, and its folder, whole or not at all; what was written before is on the disk when it appears."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = Path(f"{path}.tmp")
    new.write_text(text)
    os.sync()
    os.replace(new, path)


def start_run(args, folder: Path, datasets: list, stages: list) -> tuple:
    """Claim the output folder, write run.json, open the trackers -> (Accelerator, Checkpoints). datasets and stages
    (paths of models) are what the result depends on. Raises ValueError for a batch that can't be shared out, for fp16,
    ZeRO-3 and FSDP, FileExistsError for a folder that holds something else."""
    logging = ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder / "runs"))
    handlers = [InitProcessGroupKwargs(timeout=timedelta(hours=3))]  # ranks wait while one reads or writes checkpoints
    torch.backends.cuda.enable_cudnn_sdp(False)  # beside a mask its gradients can be NaN; it plans each length anew
    trackers = ["tensorboard", "wandb"] if args.track else ["tensorboard"]
    accelerator = Accelerator(log_with=trackers, project_config=logging, kwargs_handlers=handlers)
    # keep gloo's group alive until the exit: DDP would end it while holding the GIL, for which gloo's thread may wait
    atexit.register(id, torch.distributed.group.WORLD)
    plugin, path = accelerator.state.deepspeed_plugin, folder / "run.json"
    share = args.micro_batch_size * accelerator.num_processes * getattr(args, "num_minibatches", 1)
    if args.batch_size % share:
        expected = f"a multiple of --micro_batch_size x processes (x --num_minibatches) = {share}"
        raise ValueError(f"--batch_size: expected {expected}, found {args.batch_size}")
    if any(Path(s).exists() and Path(s).resolve().is_relative_to(folder.resolve()) for s in stages):  # not on the Hub
        raise FileExistsError(f"--output_dir {folder} holds the model that this run starts from; give another")
    if accelerator.mixed_precision == "fp16":  # while the loss scale is found
        raise ValueError("fp16: gradients overflow in the first updates, which stops a run; launch in bf16 or fp32")
    if (plugin and plugin.zero_stage == 3) or accelerator.distributed_type == "FSDP":
        raise ValueError("ZeRO-3 and FSDP shard the weights that are sampled from; launch with benchmark/zero2.yaml")
    if plugin:  # the scripts accumulate gradients themselves, and never clip them
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = args.micro_batch_size
        plugin.deepspeed_config |= {"gradient_accumulation_steps": 1, "gradient_clipping": 1e9}
    if accelerator.is_main_process:
        if args.push_to_hub:  # now, lest a name or a token turn out to be wrong after the training
            HfApi().create_repo(args.push_to_hub, exist_ok=True)
        git = ["git", "-C", Path(__file__).parent, *"describe --always --dirty --abbrev=40 --exclude *".split()]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
        run = {"command": "accelerate launch " + shlex.join(sys.argv), "args": vars(args), "finished": False}
        run |= {"git_commit": commit, "processes": accelerator.num_processes, "precision": accelerator.mixed_precision}
        run |= {"deepspeed": plugin is not None, "dataset_fingerprint": " ".join(d._fingerprint for d in datasets)}
        run["stage_ids"] = [
            read_run(path).get("tracker_id") or hashlib.sha256(json.dumps(checksums(path, "*")).encode()).hexdigest()
            for path in map(Path, stages)  # a folder of another program has no id; our runs may be in folders below it
        ]
        run["tracker_id"] = os.urandom(4).hex()
        run["versions"] = {name: version(name) for name in ("torch", "transformers", "accelerate", "datasets")}
        claim_folder(folder, json.loads(json.dumps(run)))
    accelerator.wait_for_everyone()
    if not any(path.exists() or time.sleep(1) for _ in range(60)):  # wait: NFS remembers for a while that it was absent
        raise FileNotFoundError(f"{path} is not there for this process: all must share the folder and its file system")
    checkpoints, tracker_id = Checkpoints(accelerator, args, folder), read_run(folder)["tracker_id"]
    options = {"tensorboard": {"purge_step": checkpoints.updates * args.batch_size + 1}}  # later points are replaced
    options["wandb"] = {"name": folder.name, "dir": str(folder), "id": tracker_id, "resume": "allow"}
    config = {key: str(value) for key, value in vars(args).items()}
    accelerator.init_trackers(os.environ.get("WANDB_PROJECT", "tldr_rlhf"), config, options)
    set_seed(args.seed, device_specific=True)
    return accelerator, checkpoints


def read_run(folder: Path) -> dict:
    """run.json of a folder, or {} if there is none. Raises ValueError if it is damaged."""
    path = folder / "run.json"
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError:
        raise ValueError(f"{path} is damaged; restore it, or delete the folder") from None


def lock_folder(folder: Path) -> None:
    """Keep other processes out of the folder for as long as this one lives. Raises FileExistsError if one is in it."""
    folder.resolve().mkdir(parents=True, exist_ok=True)  # where a link leads to, if it is one
    lock = os.open(folder / "run.lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileExistsError(f"{folder}: another process is training there; wait for it, or stop it") from None
    except OSError as error:  # some parallel file systems
        print(f"{folder} can't be locked ({error}); see to it that no other run writes there", file=sys.stderr)


def claim_folder(folder: Path, run: dict) -> None:
    """Lock a new folder, or one of the same run, which goes on; write run.json. Raises FileExistsError for another."""
    old, args = read_run(folder), run["args"]
    if args["overwrite"] and "finished" in old:  # never the folder of another program
        lock_folder(folder)
        folder = folder.resolve()  # a link stays
        shutil.rmtree(folder.rename(f"{folder}.deleted_{os.urandom(4).hex()}"))  # half-deleted, it is no run
    elif folder.exists() and set(os.listdir(folder)) - {"run.json.tmp", "run.lock"}:
        # how a run is saved, logged, sampled from and evaluated does not change what it trains; all else does
        free = r"output_dir|overwrite|push_to_hub|track|save_\w+|keep_checkpoints|resume|sample_every|eval_\w+"
        checked = ("processes", "precision", "deepspeed", "dataset_fingerprint", "stage_ids")
        was, now = (r.get("args", {}) | {k: r.get(k) for k in checked} for r in (old, run))
        names = [name for name in now if not re.fullmatch(free, name) and was.get(name) != now[name]]
        problems = [f"{k} {was.get(k)!r}, now {now[k]!r}" for k in names] if old else ["files of another program"]
        problems += ["finished"] * old.get("finished", False) + ["--no-resume"] * (not args["resume"])
        if problems:
            remedy = " or --overwrite; only an unfinished run, given its own arguments, goes on" if old else ""
            raise FileExistsError(f"{folder} is taken ({'; '.join(problems)}); give another --output_dir{remedy}")
        for name in ("versions", "git_commit"):
            if old.get(name) != run[name]:
                print(f"{folder} goes on with {name} {run[name]}; it had {old.get(name)}", file=sys.stderr)
        run["tracker_id"] = old["tracker_id"]
    lock_folder(folder)
    write_text(folder / "run.json", json.dumps(run, indent=2))


def checksums(folder: Path, pattern: str = "**/*") -> dict[str, str]:
    """SHA-256 of a folder's files, by name; hidden ones, which file managers and NFS leave behind, do not count."""
    paths = [p for p in sorted(folder.glob(pattern)) if p.is_file() and p.name[0] != "." and p.name != "sha256.json"]
    with ThreadPoolExecutor() as pool:  # models and optimiser states are large, and hashing leaves Python to others
        sums = pool.map(lambda path: hashlib.file_digest(path.open("rb"), "sha256").hexdigest(), paths)
        return {str(path.relative_to(folder)): digest for path, digest in zip(paths, sums)}


class Checkpoints:
    """Training state in <folder>/checkpoints/<updates>: models, optimiser, and the random numbers of each rank.
    All else (data order, learning rate, minibatches) is a function of the seed and of the number of updates. Where an
    update has several optimiser steps on what it sampled, a signal may end it in between; <updates>_<steps> then holds
    also `inside`, its samples and the metrics of its steps."""

    def __init__(self, accelerator, args, folder: Path):
        self.accelerator, self.args, self.folder = accelerator, args, folder / "checkpoints"
        self.saved_at, self.signalled_at, self.newest, self.inside = time.monotonic(), 0.0, None, None
        for path in reversed(self.paths()) if accelerator.is_main_process else []:
            with suppress(FileNotFoundError, ValueError):  # where there are no sums, or damaged ones
                sums = json.loads((path / "sha256.json").read_text())
                if path.suffix == "" and sums.items() <= checksums(path).items():  # files of others do no harm
                    self.newest = path
                    break  # older ones are not read
            print(f"{path} is incomplete or damaged; the one before it is used, if there is one", file=sys.stderr)
            shutil.rmtree(path)
        self.newest = broadcast_object_list([self.newest])[0]
        self.updates = int(self.newest.name[:8]) if self.newest else 0

    def paths(self) -> list[Path]:
        """Checkpoints from old to new, then unfinished (.tmp) ones; what else is in their folder is not ours."""
        ours = [path for path in self.folder.glob("*") if re.fullmatch(r"\d{8}(_\d{4})?(\.tmp)?", path.name)]
        return sorted(ours, key=lambda path: (path.suffix, path.name))

    def on_signal(self, number, frame) -> None:
        """End the run after this optimiser step; a second signal, over a second after the first, ends it at once."""
        if self.signalled_at and time.monotonic() > self.signalled_at + 1:
            os._exit(128 + number)
        self.signalled_at = self.signalled_at or time.monotonic()

    def load(self, num_updates: int) -> range:
        """Go back to the newest whole checkpoint, if there is one, and heed signals -> the updates that are left."""
        if self.newest:
            inside = self.newest / f"inside_{self.accelerator.process_index}.pt"
            self.inside = torch.load(inside, self.accelerator.device.type) if inside.exists() else None
            self.accelerator.load_state(str(self.newest))
            states = self.newest / f"random_states_{self.accelerator.process_index}.pkl"
            if not torch.load(states, weights_only=False)["torch_manual_seed"].equal(torch.get_rng_state()):
                raise RuntimeError(f"{states} can't be restored; go on with the library versions of the run so far")
        if self.updates < num_updates:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self.on_signal)
        return range(self.updates, num_updates)

    def save(self, update: int, num_updates: int, inside: tuple = ()) -> None:
        """After each update: save when it is due, at the end, and on a signal, which then ends the run (SystemExit);
        after each of several optimiser steps, with inside = (samples, metrics of its steps), on a signal alone."""
        args, accelerator = self.args, self.accelerator
        new = self.folder / (f"{update:08d}_{len(inside[1]):04d}" if inside else f"{update:08d}")
        new_tmp, late = Path(f"{new}.tmp"), 0 < args.save_minutes < (time.monotonic() - self.saved_at) / 60
        wanted = torch.tensor([self.signalled_at > 0, late], device=accelerator.device)
        stop, late = accelerator.reduce(wanted.float()).tolist()  # on any rank
        due = late or update == num_updates or (args.save_every and update % args.save_every == 0)
        if stop or (due and not inside):
            accelerator.save_state(str(new_tmp))
            if inside:
                torch.save(inside, new_tmp / f"inside_{accelerator.process_index}.pt")
            os.sync()  # on the disk, of each host, before it counts
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                accelerator.get_tracker("tensorboard", unwrap=True).flush()
                write_text(new_tmp / "sha256.json", json.dumps(checksums(new_tmp)))
                os.replace(new_tmp, new)
                for old in [path for path in self.paths() if not path.suffix][: -args.keep_checkpoints]:
                    shutil.rmtree(old.rename(f"{old}.tmp"))  # half-deleted, it is none
            # DeepSpeed's own process group waits ten minutes only, and torchrun ends all ranks when one has gone
            accelerator.wait_for_everyone()
            self.saved_at = time.monotonic()
        if update == num_updates:  # all is saved
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            stop += accelerator.reduce(torch.tensor(self.signalled_at, device=accelerator.device)).item()  # during it
        if stop:
            accelerator.end_training()
            command = "the same command, without --overwrite or --no-resume, goes on from there"
            raise SystemExit(f"stopped by a signal; {new} is saved; {command}")


def step(accelerator, model, optimizer, metrics: dict, batch: dict, update: int) -> dict:
    """One optimiser step -> metrics, with the norm of the gradient. Raises FloatingPointError, before the weights
    change (DeepSpeed: right after), where loss or gradient is NaN or infinite; batch and metrics are then saved."""
    norm = accelerator.clip_grad_norm_(model.parameters(), math.inf)  # measured, not clipped
    metrics = metrics | {"train/grad_norm": float(norm or 0)}
    if not all(map(math.isfinite, metrics.values())):
        path = Path(accelerator.project_dir) / f"not_finite_{accelerator.process_index}.pt"
        torch.save({"update": update, "metrics": metrics, "batch": batch}, path)
        remedy = f"the batch is in {path}, checkpoints/ has what was saved before; lower --lr in another --output_dir"
        raise FloatingPointError(f"update {update}: not finite: {metrics}; {remedy}")
    optimizer.step()
    optimizer.zero_grad()
    return metrics


def finish_run(args, folder: Path, accelerator, metrics: dict, end: int) -> None:
    """Log the final metrics, write the model card, then "finished" into run.json, for the next stage; upload. They are
    logged at `end`, one past the last checkpoint's step, so that after a kill the metrics are replaced."""
    accelerator.print(json.dumps(metrics, indent=2))
    accelerator.log(metrics, step=end)
    if accelerator.is_main_process:
        run = read_run(folder) | {"metrics": metrics, "finished": True}
        card = f"---\nlibrary_name: transformers\n---\n\n# {folder.name}\n\n    {run['command']}\n\n"
        table = "| metric | value |\n| --- | --- |\n" + "".join(f"| {k} | {v:.4f} |\n" for k, v in metrics.items())
        write_text(folder / "README.md", f"{card}{table}\nAll arguments and versions are in run.json.\n")
        write_text(folder / "run.json", json.dumps(run, indent=2))
        if args.push_to_hub:
            private = ["checkpoints/*", "runs/*", "wandb/*", "run.lock", "not_finite_*", "*.tmp"]
            HfApi().upload_folder(repo_id=args.push_to_hub, folder_path=folder, ignore_patterns=private)
    accelerator.end_training()


def main(args: Args) -> dict:
    """Train, evaluate, save; returns the final metrics."""
    base = PYTHIA.get(args.model, args.model)
    folder = Path(args.output_dir or f"models/{Path(args.model).name}/sft_{args.seed}")
    tokenizer, config = load_tokenizer(base), load_config(base)
    columns, pad = ["query_token", "reference_response_token", "query_reference_response_token"], tokenizer.pad_token_id
    needed = (columns, tokenizer, config)
    dataset, train = load_split(args.dataset, "train", *needed)
    eval_dataset, validation = load_split(args.dataset, "validation", *needed, args.eval_rows, args.response_length)
    for split in (train, validation):
        split["lengths"] = (split["query_reference_response_token"] != pad).sum(1)  # (N,)
        # counted from the end: before the response, the Hub's sequences do not always hold the tokens of query_token
        start = split["lengths"] - (split["reference_response_token"] != pad).sum(1)  # of the response
        split["first_target"] = start if args.loss_on == "response" else torch.ones_like(start)
    policy, _ = load_model(AutoModelForCausalLM, base, config)
    check_packing(policy, base)

    # Detail 8 (stack): DDP, DeepSpeed ZeRO-2 and bf16 come from the configuration of `accelerate launch`
    accelerator, checkpoints = start_run(args, folder, [dataset], [base])
    rank, num_ranks, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    if args.gradient_checkpointing:
        policy.gradient_checkpointing_enable()
    # Detail 9 (setups): AdamW with eps 1e-5, lr 3e-6 on a cosine, batch 128, one epoch
    adamw = {"lr": args.lr, "eps": args.adam_eps, "weight_decay": args.weight_decay, "fused": True}
    optimizer = torch.optim.AdamW(policy.parameters(), **adamw)
    model, optimizer = accelerator.prepare(TokenLoss(policy.train(), pad), optimizer)

    def batch_loss(split: dict, rows: torch.Tensor) -> float:
        """Token mean of the loss over a global batch; its gradient is left in the model, unless under no_grad."""
        num_targets, total = (split["lengths"] - split["first_target"])[rows].sum(), torch.zeros((), device=device)
        micro_batches = make_micro_batches(rows, split["lengths"], args.micro_batch_size, rank, num_ranks)
        for i, (micro_rows, weight) in enumerate(micro_batches):
            tokens = split["query_reference_response_token"][micro_rows].to(device)  # (B, L)
            position, first_target = torch.arange(tokens.shape[1]), split["first_target"][micro_rows, None]
            target_mask = (tokens != pad) & (position >= first_target).to(device)
            # DDP exchanges gradients, and DeepSpeed steps, in the last micro-batch only
            accelerator.sync_gradients = last = i + 1 == len(micro_batches)
            with nullcontext() if last else accelerator.no_sync(model):
                loss = weight * model(tokens, target_mask) / num_targets
                if torch.is_grad_enabled():
                    accelerator.backward(loss * num_ranks)  # ranks average gradients, the loss is a sum over them
            total += loss.detach()
        return accelerator.reduce(total).item()

    # updates = ceil(epochs x N / batch_size), the last batch is smaller; batch = micro_batch x ranks x accumulation
    num_rows, start_time = max(1, int(args.num_epochs * len(dataset))), time.time()
    num_updates = min(math.ceil(num_rows / args.batch_size), args.max_updates or num_rows)
    progress = tqdm(checkpoints.load(num_updates), disable=not accelerator.is_main_process, desc="sft")
    for update in progress:
        first, episodes = update * args.batch_size, min((update + 1) * args.batch_size, num_rows)
        optimizer.param_groups[0]["lr"] = lr = args.lr * 0.5 * (1 + math.cos(math.pi * update / num_updates))
        rows = stream_rows(args.seed, len(dataset), first, episodes)
        metrics = {"train/loss": batch_loss(train, rows)}  # and its gradient, for the step
        metrics = step(accelerator, model, optimizer, metrics, {k: v[rows] for k, v in train.items()}, update)
        rate = (episodes - checkpoints.updates * args.batch_size) / (time.time() - start_time)
        memory = torch.cuda.max_memory_allocated() / 2**30 or getrusage(RUSAGE_SELF).ru_maxrss / 2**20
        metrics |= {"train/lr": lr, "perf/episodes_per_second": rate, "perf/peak_memory_gib": memory}
        accelerator.log(metrics, step=episodes)
        progress.set_postfix(loss=f"{metrics['train/loss']:.3f}", lr=f"{lr:.1e}")
        checkpoints.save(update + 1, num_updates)

    policy.eval()
    queries, sampling = validation["query_token"], (tokenizer, args.response_length, args.eval_temperature)
    work = (lambda rows: generate(policy, queries[rows].to(device), *sampling)[0], validation["lengths"])
    responses = map_rows(accelerator, *work, 4 * args.micro_batch_size)  # (N, T); more rows fit without gradients
    tokens = (responses, validation["reference_response_token"])
    texts, references = (tokenizer.batch_decode(rows, skip_special_tokens=True) for rows in tokens)
    with torch.no_grad():
        metrics = {"eval/validation/loss": batch_loss(validation, torch.arange(len(eval_dataset)))}
    metrics |= compute_rouge(texts, references) if accelerator.is_main_process else {}
    end = num_updates * args.batch_size + 1
    if accelerator.is_main_process:
        policy.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        samples = {"query": eval_dataset["query"], "response": texts, "reference": references}
        accelerator.log({"samples": write_samples(folder / "samples_validation.jsonl", **samples)}, step=end)
    finish_run(args, folder, accelerator, metrics, end)
    return metrics


if __name__ == "__main__":
    main(tyro.cli(Args))
