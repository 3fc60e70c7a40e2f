"""Reward model (RM) for TL;DR summaries, trained on pairs of which people preferred one.

The second training stage of "The N+ Implementation Details of RLHF with PPO" (Details 10-16 and 18, Tables 4 and 5):

    accelerate launch reward.py --model pythia-1b

Inputs:  the SFT policy (sft.py) and the pre-tokenised comparisons (tldr_dataset.py).
Outputs: models/<model>/reward_<seed>/ with safetensors that AutoModelForSequenceClassification loads, tokenizer,
         probes.json, run.json, model card, and the evaluation: accuracy_<split>.csv, calibration_<split>.{csv,png}.

A linear head on the SFT policy reads one score per sequence at its EOS; chosen and rejected go through in one forward
pass, and the loss is -log sigmoid(score chosen - score rejected) (N+ eq. 1; Bradley and Terry). After training the
scores are shifted so that the references of the SFT train split score 0 on average.

Shapes: N rows of the dataset, B rows of a batch, L sequence, D hidden. Packed, a micro-batch is one row of P tokens.
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

import matplotlib.figure
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
import tyro
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import ProjectConfiguration, broadcast_object_list, gather_object, set_seed
from datasets import load_dataset, load_from_disk
from huggingface_hub import HfApi
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface
from transformers.utils import cached_file


@dataclass(config={"allow_inf_nan": False, "extra": "forbid"})
class Args:
    # run
    model: str = "pythia-1b"
    """Base model of the earlier stages. Only names the default folders, models/<model>/...; it is not loaded."""
    seed: NonNegativeInt = 44413
    """Seed of initialisation, data order and sampling in training. The paper's: 44413, 55513, 66613, 77713."""
    output_dir: str = ""
    """Folder that the run is written to. Empty: models/<model>/<stage>_<seed>."""
    overwrite: bool = False
    """Delete the run that is in the output folder."""
    push_to_hub: str = ""
    """Hub repository (user/name) that the finished folder is uploaded to. Empty: not uploaded."""
    # data
    dataset: str = "vwxyzjn/summarize_from_feedback_oai_preprocessing_1706381144"
    """Pre-tokenised comparisons: Hub id, save_to_disk folder, or folder of parquet/JSONL files named by split."""
    sft_dataset: str = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"
    """Pre-tokenised SFT dataset; the references of its train split score 0 on average after training."""
    eval_splits: tuple[str, ...] = ("validation", "validation_cnndm")
    """Splits of the comparisons that are evaluated."""
    # model
    sft_model: str = ""
    """SFT policy to start from: folder or Hub id. Empty: models/<model>/sft_<seed>."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    # optimiser (Detail 10, Table 4)
    num_epochs: PositiveFloat = 1.0
    """Passes over the train split."""
    max_updates: NonNegativeInt = 0
    """End the run, and its learning-rate schedule, after at most this many optimiser steps (0: num_epochs decides)."""
    batch_size: PositiveInt = 64
    """Rows in one update, over all processes."""
    micro_batch_size: PositiveInt = 8
    """Rows in one training pass of a process (up to 8 times as many without gradients); a step accumulates several."""
    lr: NonNegativeFloat = 3e-6
    """Learning rate of AdamW at the start; it follows a cosine to zero."""
    adam_eps: NonNegativeFloat = 1e-5
    """Epsilon of AdamW."""
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay of AdamW (torch's default, which the paper's code leaves in place)."""
    # evaluation
    eval_rows: NonNegativeInt = 0
    """Number of first rows of each validation split that are evaluated (0: all)."""
    normalisation_rows: NonNegativeInt = 0
    """Number of first rows of the SFT train split whose references set the zero of the scores (0: all)."""
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


def pair_attention(module, query, key, value, attention_mask, scaling=None, **kwargs) -> tuple:
    """Attention for sequences that lie end to end in one row, causal inside each; a sequence also sees the first so
    many tokens of the one before it: (1, heads, P, head size) -> (1, P, heads, head size). transformers calls it with
    the mask of `pair_inputs`, which holds lengths and those numbers, integers (1, 1, 2, 2B), or with lengths alone
    (1, 1, 1, B); attention with any other mask is left to transformers' own function."""
    if attention_mask is None or attention_mask.dtype != torch.long:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if kwargs.get("softcap") or kwargs.get("s_aux") is not None:
        raise ValueError("its attention caps scores or has sinks")
    lengths, *shared = attention_mask[0, 0].tolist()
    shared, outputs, before = shared[0] if shared else [0] * len(lengths), [], None
    group = query.shape[1] // key.shape[1]  # heads of queries that share one of keys
    for q, k, v, seen in zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), shared):
        if seen:
            k, v = (torch.cat([first[:, :, :seen], own], dim=2) for first, own in zip(before, (k, v)))
            # beside a mask, CUDA's fast kernels take no groups
            repeated = [x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v)]
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(seen)
            outputs.append(F.scaled_dot_product_attention(q, *repeated, attn_mask=mask, scale=scaling))
        else:
            options = {"is_causal": True, "scale": scaling, "enable_gqa": group > 1}
            outputs.append(F.scaled_dot_product_attention(q, k, v, **options))
        before = (k, v)
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register("pairs", pair_attention)
AttentionInterface.register("packed", pair_attention)
AttentionMaskInterface.register("pairs", sdpa_mask)
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


def apply_head(reward_model, hidden: torch.Tensor) -> torch.Tensor:
    """Score head with its normalisation bias: (..., D) -> (...) in fp32."""
    with torch.autocast(hidden.device.type, enabled=False):  # in bf16, scores that are close would tie
        scores = F.linear(hidden.float(), reward_model.score.weight.float()).squeeze(-1)
    return scores + getattr(reward_model.config, "score_bias", 0.0)


def get_scores(reward_model, tokens: torch.Tensor, pad_token_id: int) -> torch.Tensor:
    """Score of each sequence of (B, L), padded on whichever side -> (B,) in fp32."""
    hidden = get_hidden(reward_model, tokens, pad_token_id)  # (P, D)
    # Detail 12 (score at EOS): the last token before the padding; only there did training shape the head
    return apply_head(reward_model, hidden[(tokens != pad_token_id).sum(1).cumsum(0) - 1])


def load_reward_model(path: str, pad_token_id: int):
    """Reward model in fp32, with its head. Raises ValueError if the head or its normalisation got lost on the way."""
    reward_model, has_head = load_model(AutoModelForSequenceClassification, path, load_config(path, num_labels=1))
    if not has_head:
        raise ValueError(f"reward model {path}: expected a head (score.weight), found none; train it with reward.py")
    check_packing(reward_model, path)
    probes = cached_file(path, "probes.json", _raise_exceptions_for_missing_entries=False)
    for probe in json.loads(Path(probes).read_text()) if probes else []:
        with torch.no_grad():
            score = get_scores(reward_model.eval(), torch.tensor([probe["tokens"]]), pad_token_id).item()
        if abs(score - probe["score"]) > 0.02 * max(1.0, abs(probe["score"])):
            found = f"a probe scores {score:.4f}, and {probe['score']:.4f} when it was saved"
            raise ValueError(f"reward model {path}: {found}: weights or config.json changed; train it with reward.py")
    return reward_model


def pair_inputs(model, chosen: torch.Tensor, rejected: torch.Tensor, pad_token_id: int) -> tuple[dict, torch.Tensor]:
    """What the model is fed to see pairs (B, L), (B, L), padded on whichever side, end to end, and where in that row
    each token of both is -> (2, B, L). The post is most of a pair, and goes through once: of `rejected` the row holds
    what follows its common beginning with `chosen`.
    chosen 5 6 7 0, rejected 5 6 8 9 0 -> 5 6 7 0 8 9 0, positions 0 1 2 3 2 3 4"""
    if model.config._attn_implementation != "pairs":
        model.set_attn_implementation("pairs")
    masks = torch.stack([chosen, rejected]) != pad_token_id  # (2, B, L)
    positions = masks.cumsum(2) - 1
    is_last = positions == masks.sum(2, keepdim=True) - 1  # (2, B, L), and the padding after it
    same = ((chosen == rejected) & ~is_last.any(0)).cumprod(1).bool()  # (B, L): all but the last token may be shared
    is_tail = masks[1] & ~same
    kept = torch.cat([masks[0], is_tail], dim=1)  # (B, 2L)
    lengths, shared = torch.stack([masks[0], is_tail], dim=1).sum(2), (masks[1] & same).sum(1)  # (B, 2), (B,)
    mask = torch.stack([lengths, F.pad(shared[:, None], (1, 0))]).view(1, 1, 2, -1).cpu()
    inputs = {"input_ids": torch.cat([chosen, rejected], dim=1)[kept][None], "attention_mask": mask, "use_cache": False}
    index = (kept.flatten().cumsum(0) - 1).view(kept.shape).chunk(2, dim=1)
    index = torch.stack([index[0], torch.where(same, *index)])  # (2, B, L): what is shared lies in the chosen part
    return inputs | {"position_ids": torch.cat([*positions], dim=1)[kept][None]}, index


class Scorer(torch.nn.Module):
    """Reward model whose forward pass gives the scores of pairs (2, B), so that DDP and DeepSpeed see all of it."""

    def __init__(self, reward_model, pad_token_id: int):
        super().__init__()
        self.reward_model, self.pad_token_id = reward_model, pad_token_id

    def forward(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        inputs, index = pair_inputs(self.reward_model, chosen, rejected, self.pad_token_id)
        hidden = self.reward_model.base_model(**inputs).last_hidden_state[0]  # (P, D)
        last = index.masked_fill(torch.stack([chosen, rejected]) == self.pad_token_id, 0).amax(2)  # (2, B)
        return apply_head(self.reward_model, hidden[last])


def reward_loss(chosen_scores: torch.Tensor, rejected_scores: torch.Tensor) -> torch.Tensor:
    """-log sigmoid(r_chosen - r_rejected), summed over pairs: (B,), (B,) -> scalar (N+ eq. 1)."""
    return -F.logsigmoid(chosen_scores - rejected_scores).sum()


@torch.no_grad()
def shift_scores(reward_model, mean: float) -> None:
    """Lower every score by `mean`, for good: the shift is saved with the model and adds to any shift that is there.
    Where the final norm has a bias b, b - mean w / |w|^2 (w: weight of the head) does it for every user of the weights;
    else config.score_bias does it for `apply_head`, and plain transformers ranks alike."""
    weight, base = reward_model.score.weight[0], reward_model.base_model
    norm = next((getattr(base, name) for name in ("final_layer_norm", "ln_f", "norm") if hasattr(base, name)), None)
    if getattr(norm, "bias", None) is not None:
        norm.bias -= mean * weight / weight.square().sum()
    else:
        reward_model.config.score_bias = getattr(reward_model.config, "score_bias", 0.0) - mean


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


def accuracy_table(dataset, chosen_scores: torch.Tensor, rejected_scores: torch.Tensor) -> pd.DataFrame:
    """Accuracy and number of pairs, overall and by batch, split, confidence and policy pair, from the scores (N,)."""
    names = [name for name in ("batch", "split", "extra.confidence", "policies") if name in dataset.column_names]
    # Detail 16 (accuracy differs by batch and confidence): the rows of Table 5; a tie is an error
    frame = dataset.select_columns(names).to_pandas().assign(correct=(chosen_scores > rejected_scores).numpy())
    groups = {"overall": ["all"] * len(frame)} | {name: frame[name] for name in names}
    correct = {name: frame.groupby(values, dropna=False).correct for name, values in groups.items()}
    tables = {name: group.agg(pairs="size", accuracy="mean") for name, group in correct.items()}
    return pd.concat(tables, names=["group", "value"]).reset_index()


def calibration_table(margins: np.ndarray, num_bins: int = 10) -> tuple[pd.DataFrame, float]:
    """Accuracy against the confidence that the scores claim, in bins of |score difference|, and the ECE.
    ECE (expected calibration error): mean of |accuracy - confidence| over bins, weighted by their pairs."""
    # Detail 18 (calibration): by margins r_chosen - r_rejected (N,) the model claims to be right in sigmoid(|margin|)
    size, quantiles = np.abs(margins), np.linspace(0, 1, num_bins + 1)[1:-1]
    bin_index = np.searchsorted(np.unique(np.quantile(size, quantiles)), size, side="right")  # ties share a bin
    frame = pd.DataFrame({"margin": size, "confidence": 1 / (1 + np.exp(-size)), "accuracy": margins > 0, "pairs": 1})
    bins = frame.groupby(bin_index)
    table = bins[["margin", "confidence", "accuracy"]].mean().assign(pairs=bins.pairs.sum()).reset_index(drop=True)
    return table, float(np.average((table.accuracy - table.confidence).abs(), weights=table.pairs))


def plot_calibration(table: pd.DataFrame, path: Path) -> None:
    """Accuracy against score difference, with the curve of perfect calibration 1 / (1 + e^-x) (N+ Figure 5, right)."""
    figure = matplotlib.figure.Figure(figsize=(5, 4), layout="constrained")
    axes, x = figure.subplots(), np.linspace(0, table.margin.max(), 100)
    axes.plot(x, 1 / (1 + np.exp(-x)), "k", table.margin, table.accuracy, "o-")
    axes.set(xlabel="score difference", ylabel="accuracy", ylim=(min(0.4, table.accuracy.min() - 0.02), 1.02))
    axes.legend(["perfect calibration", "model"])
    figure.savefig(path, dpi=120)


def evaluate_preferences(folder: Path, split: str, dataset, chosen: torch.Tensor, rejected: torch.Tensor) -> dict:
    """Write accuracy and calibration of a split's scores (N,) to `folder`; returns the metrics (Figure 5)."""
    accuracies, scores = accuracy_table(dataset, chosen, rejected), torch.cat([chosen, rejected])
    calibration, error = calibration_table((chosen - rejected).numpy())
    accuracies.to_csv(folder / f"accuracy_{split}.csv", index=False)
    calibration.to_csv(folder / f"calibration_{split}.csv", index=False)
    plot_calibration(calibration, folder / f"calibration_{split}.png")
    metrics = {"accuracy": float(accuracies.accuracy[0]), "ece": error}
    metrics |= {f"score_{name}": getattr(scores, name)().item() for name in ("mean", "std", "min", "max")}
    return {f"eval/{split}/{name}": value for name, value in metrics.items()}


def require_stage(path: str, command: str) -> None:
    """Raise FileNotFoundError, with the command to run first, if a folder holds no finished stage.
    A Hub id (user/name), or a folder that another program wrote, is left to transformers."""
    folder = Path(path)
    local = folder.exists() or path.count("/") > 1 or ("/" in path and folder.parent.exists())
    finished = read_run(folder).get("finished", (folder / "config.json").exists())
    if local and not finished:
        first = f"{command} --output_dir {shlex.quote(path)}, or, if it stopped, run.json's command less --overwrite"
        raise FileNotFoundError(f"{path}: expected a finished run or config.json, found none; run this first: {first}")


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
    """Train, normalise, evaluate, save; returns the final metrics."""
    name = Path(args.model).name
    folder = Path(args.output_dir or f"models/{name}/reward_{args.seed}")
    sft_path = args.sft_model or f"models/{name}/sft_{args.seed}"
    require_stage(sft_path, f"accelerate launch sft.py --model {args.model} --seed {args.seed}")
    tokenizer, config = load_tokenizer(sft_path), load_config(sft_path, num_labels=1)
    pad, needed = tokenizer.pad_token_id, (tokenizer, config)
    columns, sft_column = ["query_chosen_token", "query_rejected_token"], "query_reference_response_token"
    dataset, train = load_split(args.dataset, "train", columns, *needed)
    evals = {split: load_split(args.dataset, split, columns, *needed, args.eval_rows) for split in args.eval_splits}
    sft_dataset, sft = load_split(args.sft_dataset, "train", [sft_column], *needed, args.normalisation_rows)
    references = sft[sft_column]  # (N, L)

    def pair_lengths(pairs: dict) -> torch.Tensor:
        """Tokens of the longer sequence -> (N,)."""
        return torch.maximum(*((pairs[column] != pad).sum(1) for column in columns))

    lengths = pair_lengths(train)
    reward_model, has_head = load_model(AutoModelForSequenceClassification, sft_path, config)
    check_packing(reward_model, sft_path)

    accelerator, checkpoints = start_run(args, folder, [dataset, sft_dataset], [sft_path])
    rank, num_ranks, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    reward_model.config.pad_token_id = pad if pad < config.vocab_size else None  # not EOS: transformers would skip it
    if not has_head:  # unless training goes on from a reward model
        # Detail 11 (head initialisation): standard deviation 1 / sqrt(D + 1), so that scores start near 0
        torch.nn.init.normal_(reward_model.score.weight, std=1 / math.sqrt(config.hidden_size + 1))
    if args.gradient_checkpointing:
        reward_model.gradient_checkpointing_enable()
    # Detail 10 (setups): as SFT, but batch 64
    scorer = Scorer(reward_model, pad).train()
    adamw = {"lr": args.lr, "eps": args.adam_eps, "weight_decay": args.weight_decay, "fused": True}
    optimizer = torch.optim.AdamW(scorer.parameters(), **adamw)
    model, optimizer = accelerator.prepare(scorer, optimizer)

    def forward_backward(rows: torch.Tensor) -> dict:
        """Leave the gradient of the loss of a global batch in the model -> means over its pairs."""
        names, totals = ("loss", "accuracy", "chosen_score", "rejected_score"), torch.zeros(4, device=device)
        micro_batches = make_micro_batches(rows, lengths, args.micro_batch_size, rank, num_ranks)
        for i, (micro_rows, weight) in enumerate(micro_batches):
            pairs = [train[column][micro_rows].to(device) for column in columns]  # (B, L), (B, L)
            # DDP exchanges gradients, and DeepSpeed steps, in the last micro-batch only
            accelerator.sync_gradients = last = i + 1 == len(micro_batches)
            with nullcontext() if last else accelerator.no_sync(model):
                chosen, rejected = model(*pairs)  # (B,), (B,)
                loss = weight * reward_loss(chosen, rejected) / len(rows)
                accelerator.backward(loss * num_ranks)  # ranks average gradients, the loss is a sum over them
            sums = torch.stack([(chosen > rejected).sum(), chosen.sum(), rejected.sum()]).detach()
            totals += torch.cat([loss.detach()[None], weight * sums / len(rows)])
        return {f"train/{name}": mean for name, mean in zip(names, accelerator.reduce(totals).tolist())}

    # updates = ceil(epochs x N / batch_size), the last batch is smaller; batch = micro_batch x ranks x accumulation
    num_rows, start_time = max(1, int(args.num_epochs * len(dataset))), time.time()
    num_updates = min(math.ceil(num_rows / args.batch_size), args.max_updates or num_rows)
    progress = tqdm(checkpoints.load(num_updates), disable=not accelerator.is_main_process, desc="reward")
    for update in progress:
        first, episodes = update * args.batch_size, min((update + 1) * args.batch_size, num_rows)
        optimizer.param_groups[0]["lr"] = lr = args.lr * 0.5 * (1 + math.cos(math.pi * update / num_updates))
        rows = stream_rows(args.seed, len(dataset), first, episodes)
        metrics = forward_backward(rows)
        metrics = step(accelerator, model, optimizer, metrics, {k: v[rows] for k, v in train.items()}, update)
        rate = (episodes - checkpoints.updates * args.batch_size) / (time.time() - start_time)
        memory = torch.cuda.max_memory_allocated() / 2**30 or getrusage(RUSAGE_SELF).ru_maxrss / 2**20
        metrics |= {"train/lr": lr, "perf/episodes_per_second": rate, "perf/peak_memory_gib": memory}
        accelerator.log(metrics, step=episodes)
        progress.set_postfix(loss=f"{metrics['train/loss']:.3f}", accuracy=f"{metrics['train/accuracy']:.2f}")
        checkpoints.save(update + 1, num_updates)

    def score(tokens: torch.Tensor) -> torch.Tensor:
        """Scores of sequences (N, L) -> (N,)."""
        work = (lambda rows: get_scores(reward_model, tokens[rows].to(device), pad), (tokens != pad).sum(1))
        return map_rows(accelerator, *work, 2 * args.micro_batch_size)

    def score_pairs(pairs: dict) -> torch.Tensor:
        """Scores of chosen and rejected sequences, by the forward pass of training but without DDP -> (2, N)."""
        work = (lambda rows: scorer(*(pairs[column][rows].to(device) for column in columns)).T, pair_lengths(pairs))
        return map_rows(accelerator, *work, 2 * args.micro_batch_size).T

    reward_model.eval()
    # Detail 15 (normalisation): references of the SFT data score 0 on average, so PPO's -1 for "no EOS" is a penalty
    shift_scores(reward_model, score(references).mean().item())
    # Detail 14 (padding side): PPO scores left-padded queries, training saw sequences padded on the right
    left_padded = references[:64].gather(1, (references[:64] != pad).int().argsort(dim=1, stable=True))
    difference = score(left_padded) - score(references[:64])
    metrics = {"eval/left_minus_right_padding": difference.mean().item()}
    for split, (eval_dataset, pairs) in evals.items():
        scores = score_pairs(pairs)  # (2, N)
        metrics |= evaluate_preferences(folder, split, eval_dataset, *scores) if accelerator.is_main_process else {}

    if accelerator.is_main_process:
        # Detail 13 (only EOS is valid): what the head says at other tokens, mostly negative, means nothing (Figure 3)
        with torch.no_grad(), accelerator.autocast():
            hidden = get_hidden(reward_model, references[:1].to(device), pad)  # (P, D)
            logits = apply_head(reward_model, hidden).tolist()
        tokens = tokenizer.convert_ids_to_tokens(references[0][references[0] != pad])
        example = {"token": tokens, "reward_logit": logits}
        pd.DataFrame(example).to_csv(folder / "reward_logits_example.csv", index=False)
        reward_model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "probes.json").unlink(missing_ok=True)  # of a run that was killed here
        saved = load_reward_model(str(folder), pad).eval()  # scored as when they are checked: in fp32, on the CPU
        shortest = references[(references != pad).sum(1).argsort()[:4]]
        with torch.no_grad():
            scores = get_scores(saved, shortest, pad).tolist()
        probes = [{"tokens": row[row != pad].tolist(), "score": score} for row, score in zip(shortest, scores)]
        write_text(folder / "probes.json", json.dumps(probes))
    finish_run(args, folder, accelerator, metrics, num_updates * args.batch_size + 1)
    return metrics


if __name__ == "__main__":
    main(tyro.cli(Args))
