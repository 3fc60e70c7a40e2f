"""PPO for language models: tune the SFT policy to a reward model, on TL;DR summaries.

The last training stage of "The N+ Implementation Details of RLHF with PPO" (Details 20-25, Table 7, appendix F):

    accelerate launch ppo.py --model pythia-1b

Inputs:  the SFT policy (sft.py), the reward model (reward.py), the pre-tokenised posts (tldr_dataset.py).
Outputs: models/<model>/ppo_<seed>/: the policy, its value model in value_model/, tokenizer, run.json, model card,
         samples_training/ (the same posts through training) and samples_validation.jsonl (`query, response, reference,
         score, reference_score` for the whole validation split, to be judged).

Each update samples summaries of a batch of posts and scores them. The reward of a token is -kl_coef times the log-ratio
of policy and SFT policy (N+ eq. 3), plus the score at the end. GAE turns rewards and values into advantages
(Schulman et al. 2016), and some epochs of clipped policy and value losses over the batch follow (Schulman et al. 2017).

Shapes: N rows of the dataset, B rows of a batch, Q query, T response, L = Q + T, V vocabulary, D hidden. Packed, a
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
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

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
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.cache_utils import DynamicCache
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
    dataset: str = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"
    """Pre-tokenised SFT dataset: Hub id, save_to_disk folder, or folder of parquet/JSONL files named by split."""
    # model
    sft_model: str = ""
    """SFT policy to start from: folder or Hub id. Empty: models/<model>/sft_<seed>."""
    reward_model: str = ""
    """Reward model: folder or Hub id. Empty: models/<model>/reward_<seed>."""
    offload: bool = False
    """Keep the SFT policy and the reward model on the CPU while they are not in use (the paper does so at 6.9B)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    # optimiser (Detail 20, Table 7)
    total_episodes: NonNegativeInt = 1_000_000
    """Summaries sampled in the whole run; total_episodes // batch_size updates."""
    batch_size: PositiveInt = 512
    """Rows in one update, over all processes."""
    micro_batch_size: PositiveInt = 8
    """Rows in one training pass of a process (up to 8 times as many without gradients); a step accumulates several."""
    num_ppo_epochs: PositiveInt = 4
    """Passes over each batch of summaries."""
    num_minibatches: PositiveInt = 1
    """Optimiser steps in one such pass."""
    lr: NonNegativeFloat = 3e-6
    """Learning rate of AdamW at the start; it falls linearly to zero."""
    adam_eps: NonNegativeFloat = 1e-5
    """Epsilon of AdamW."""
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay of AdamW (torch's default, which the paper's code leaves in place)."""
    # algorithm
    response_length: PositiveInt = 53
    """Longest summary that is sampled, in tokens."""
    temperature: PositiveFloat = 0.7
    """Sampling temperature of rollouts; log-probabilities are those of the tempered distribution."""
    kl_coef: NonNegativeFloat = 0.05
    """Weight of the KL penalty in the reward (beta of N+ eq. 3)."""
    missing_eos_score: float = -1.0
    """Score of a summary without EOS within response_length tokens (Detail 23); choose it below that of most others."""
    gamma: NonNegativeFloat = 1.0
    """Discount factor."""
    gae_lambda: NonNegativeFloat = 0.95
    """Lambda of generalised advantage estimation."""
    cliprange: NonNegativeFloat = 0.2
    """The policy's ratio is clipped to 1 +- this."""
    cliprange_value: NonNegativeFloat = 0.2
    """New values are clipped to the old value +- this."""
    vf_coef: NonNegativeFloat = 0.1
    """Weight of the value loss."""
    whiten_rewards: bool = False
    """Scale the rewards of a batch to variance 1, their mean unchanged (Detail 24)."""
    # evaluation
    eval_rows: NonNegativeInt = 0
    """Number of first rows of each validation split that are evaluated (0: all)."""
    eval_temperature: PositiveFloat = 0.01
    """Sampling temperature of evaluations; 0.01 is near-greedy."""
    sample_every: NonNegativeInt = 0
    """Updates between the samples in samples_training/, the first taken before training (0: a tenth of the run)."""
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


def get_logprobs(policy, queries, responses, pad_token_id: int, temperature: float, entropy=False) -> tuple:
    """Log-probabilities of the response tokens (B, T), 0 at [PAD]; and the entropy (B, T) where it is asked for.
    queries (B, Q), responses (B, T). Logits are divided by the temperature at which the tokens were sampled."""
    tokens, mask = torch.cat([queries, responses], dim=1), responses != pad_token_id  # (B, Q + T), (B, T)
    index = F.pad(mask, (queries.shape[1], 0))[tokens != pad_token_id].nonzero()[:, 0]  # (M,) of the P not [PAD]
    inputs, zeros = packed_inputs(policy, tokens, pad_token_id), torch.zeros(mask.shape, device=mask.device)
    # logits only one position before each response token; made by the model itself, since some scale or cap theirs
    # (the backward pass of squeeze is a view, that of [0] a copy)
    logits = policy(**inputs, logits_to_keep=index - 1).logits.squeeze(0).float().div_(temperature)  # (M, V)
    logprobs = zeros.masked_scatter(mask, -F.cross_entropy(logits, responses[mask], reduction="none"))  # (B, T)
    entropies = -(logits.log_softmax(1) * logits.softmax(1)).sum(1) if entropy else None  # (M,)
    return logprobs, (zeros.masked_scatter(mask, entropies) if entropy else None)


def get_values(value_model, queries, responses, pad_token_id: int) -> torch.Tensor:
    """Values (B, T) in fp32: column t is of the state in which response token t was chosen, the column after EOS of the
    state that EOS led to; the columns after that repeat it, and value_mask drops them."""
    tokens, num_tokens = torch.cat([queries, responses], dim=1), (responses != pad_token_id).sum(1, keepdim=True)
    last = (tokens != pad_token_id).sum(1, keepdim=True).cumsum(0) - 1  # (B, 1) of the P that are not [PAD]
    steps_to_last = (num_tokens - torch.arange(responses.shape[1], device=tokens.device)).clamp(min=0)  # (B, T)
    return apply_head(value_model, get_hidden(value_model, tokens, pad_token_id)[last - steps_to_last])


class ActorCritic(torch.nn.Module):
    """Policy and value model side by side: one optimiser, and one module for DDP and DeepSpeed to wrap."""

    def __init__(self, policy, value_model):
        super().__init__()
        self.policy, self.value_model = policy, value_model

    def forward(self, queries, responses, pad_token_id: int, temperature: float | None = None) -> torch.Tensor:
        """queries (B, Q), responses (B, T) -> log-probabilities (B, T) at a temperature; without one, values (B, T)."""
        if temperature:
            return get_logprobs(self.policy, queries, responses, pad_token_id, temperature)[0]
        return get_values(self.value_model, queries, responses, pad_token_id)


def make_masks(num_tokens: torch.Tensor, response_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of response tokens with EOS (B,) -> response_mask and value_mask, both (B, T).

    response       17  23 EOS [PAD] [PAD]
    response_mask   1   1   1    0     0     where the policy acted
    value_mask      1   1   1    1     0     the same and the state after EOS, whose reward is the score
    """
    position = torch.arange(response_length, device=num_tokens.device)
    return position < num_tokens[:, None], position < num_tokens[:, None] + 1


def compute_rewards(logprobs, ref_logprobs, scores, num_tokens, kl_coef: float) -> torch.Tensor:
    """Reward of each token (N+ eq. 3): logprobs, ref_logprobs (B, T), 0 at [PAD], scores, num_tokens (B,) -> (B, T).
    The score is added one position after EOS, or at the last position T - 1 if EOS is the last token or is missing."""
    rewards = -kl_coef * (logprobs - ref_logprobs)
    end = num_tokens.clamp(max=rewards.shape[1] - 1)  # (B,): where the score is paid
    rewards[torch.arange(len(rewards), device=rewards.device), end] += scores
    return rewards


def masked_mean(values: torch.Tensor, mask: torch.Tensor, reduce_sum) -> torch.Tensor:
    """Mean over what the mask keeps, on all ranks: reduce_sum adds a tensor up over them."""
    return reduce_sum((values * mask).sum()) / reduce_sum(mask.sum().float())


def whiten(values: torch.Tensor, mask: torch.Tensor, reduce_sum, shift_mean: bool = True) -> torch.Tensor:
    """Scale what the mask keeps of (B, T) to variance 1, and to mean 0 if shift_mean; 0 elsewhere."""
    mean = masked_mean(values, mask, reduce_sum)
    variance = masked_mean((values - mean).square(), mask, reduce_sum)
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    return (whitened if shift_mean else whitened + mean) * mask


def compute_gae(rewards: torch.Tensor, values: torch.Tensor, gamma: float, gae_lambda: float) -> tuple:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16): (B, T), (B, T) -> advantages, returns (B, T).
    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lambda A_{t+1};  R_t = A_t + V_t; V = 0 past the end."""
    advantages, advantage, next_value = torch.zeros_like(rewards), 0.0, 0.0
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = advantage = delta + gamma * gae_lambda * advantage
        next_value = values[:, t]
    return advantages, advantages + values


def policy_loss(new_logprobs, logprobs, advantages, mask, cliprange: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped objective (Schulman et al. 2017, eq. 7), summed over the mask's tokens; all inputs (B, T).
    Also the sums of ratio, of approximate KL (half the squared log-ratio), and of clipped tokens -> (), (3,)."""
    log_ratio = (new_logprobs - logprobs) * mask
    ratio = log_ratio.exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    sums = torch.stack([(x * mask).sum() for x in (ratio, 0.5 * log_ratio.square(), (clipped > plain).float())])
    return (torch.maximum(plain, clipped) * mask).sum(), sums.detach()


def value_loss(new_values, values, returns, mask, cliprange_value: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the larger of plain and clipped squared error, summed over the mask; all inputs (B, T). Also the number of
    clipped values -> (), ()."""
    clipped_values = values + (new_values - values).clamp(-cliprange_value, cliprange_value)
    plain, clipped = (new_values - returns).square(), (clipped_values - returns).square()
    return 0.5 * (torch.maximum(plain, clipped) * mask).sum(), ((clipped > plain) * mask).sum().detach()


@contextmanager
def visiting(model, device):
    """Move a frozen model to the device for a while. Weights kept on the CPU stay there, too: none are copied back."""
    home = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
    for tensor, data in home:
        tensor.data = data.to(device)
    yield
    for tensor, data in home:
        tensor.data = data


@torch.no_grad()
def collect_rollout(model: ActorCritic, ref_policy, reward_model, queries: torch.Tensor, tokenizer, args: Args) -> dict:
    """Sample a summary of each left-padded query (B, Q), and compute all that the update does not change.
    Returns queries (B, Q), responses, sampled_logprobs, logprobs, ref_logprobs, values, entropies (B, T), scores,
    num_tokens, has_eos (B,)."""
    pad, eos, T, B = tokenizer.pad_token_id, tokenizer.eos_token_id, args.response_length, len(queries)
    policy, temperature = model.policy, args.temperature
    names = ("sampled_logprobs", "logprobs", "ref_logprobs", "values", "entropies")
    rollout = {name: torch.zeros(B, T, device=queries.device) for name in names}
    responses, lengths = queries.new_full((B, T), pad), (queries != pad).sum(1).cpu()
    # without gradients and activations to keep, 8 micro-batches fit into memory together
    for rows, _ in make_micro_batches(torch.arange(B), lengths, 8 * args.micro_batch_size):
        # Detail 23 (EOS trick): what follows EOS is cut off before it is scored
        responses[rows], rollout["sampled_logprobs"][rows] = generate(policy, queries[rows], tokenizer, T, temperature)
    rollout |= {"queries": queries, "responses": responses, "num_tokens": (responses != pad).sum(1)}
    rollout |= {"has_eos": (responses == eos).any(1), "scores": torch.zeros(B, device=queries.device)}
    micro_batches = make_micro_batches(torch.arange(B), lengths + rollout["num_tokens"].cpu(), args.micro_batch_size)
    batches = [(rows, (queries[rows], responses[rows], pad)) for rows, _ in micro_batches]
    for rows, inputs in batches:
        rollout["logprobs"][rows], rollout["entropies"][rows] = get_logprobs(policy, *inputs, temperature, entropy=True)
        rollout["values"][rows] = get_values(model.value_model, *inputs)
    with visiting(ref_policy, queries.device):
        for rows, inputs in batches:
            rollout["ref_logprobs"][rows], _ = get_logprobs(ref_policy, *inputs, temperature)
    with visiting(reward_model, queries.device):
        for rows, inputs in batches:
            rollout["scores"][rows] = get_scores(reward_model, torch.cat(inputs[:2], dim=1), pad)
    return rollout


def add_advantages(rollout: dict, args: Args, reduce_sum) -> dict:
    """Add masks, advantages and returns, each (B, T), and the scores that count, to a rollout."""
    response_mask, value_mask = make_masks(rollout["num_tokens"], rollout["responses"].shape[1])
    # Detail 23 (EOS trick): without EOS the reward model has no say, the score is a constant
    scores = torch.where(rollout["has_eos"], rollout["scores"], args.missing_eos_score)
    rewards = compute_rewards(rollout["logprobs"], rollout["ref_logprobs"], scores, rollout["num_tokens"], args.kl_coef)
    if args.whiten_rewards:
        # Detail 24 (reward whitening): optional; it keeps the mean, and makes summaries shorter
        rewards = whiten(rewards, value_mask, reduce_sum, shift_mean=False)
    values = rollout["values"] * value_mask
    advantages, returns = compute_gae(rewards, values, args.gamma, args.gae_lambda)
    # Detail 25 (advantage whitening): over all response tokens of the batch, on all ranks, with the mean shifted
    advantages = whiten(advantages, response_mask, reduce_sum)
    masks = {"response_mask": response_mask, "value_mask": value_mask}
    return rollout | masks | {"scores": scores, "values": values, "advantages": advantages, "returns": returns}


def update_model(accelerator, model, optimizer, rollout: dict, pad: int, args: Args, update: int, done: int = 0):
    """num_ppo_epochs x num_minibatches optimiser steps on a rollout, but for the first `done` of them.
    Yields the metrics of each step, masked means over its minibatch."""
    names = ("policy/loss", "policy/ratio", "policy/approxkl", "policy/clipfrac", "value/loss", "value/clipfrac")
    lengths = ((rollout["queries"] != pad).sum(1) + rollout["num_tokens"]).cpu()  # (B,)
    generator = torch.Generator().manual_seed(args.seed + update)
    epochs = [torch.randperm(len(lengths), generator=generator) for _ in range(args.num_ppo_epochs)]
    for minibatch in [rows for epoch in epochs for rows in epoch.chunk(args.num_minibatches)][done:]:
        counts = torch.stack([rollout[name][minibatch].sum() for name in ("response_mask", "value_mask")])
        num_response, num_value = accelerator.reduce(counts.float())  # tokens of the minibatch, on all ranks
        micro_batches = make_micro_batches(minibatch, lengths, args.micro_batch_size)
        sums = torch.zeros(6, device=accelerator.device)
        for i, (rows, _) in enumerate(micro_batches):
            old = {name: tensor[rows] for name, tensor in rollout.items() if tensor.dim() == 2}
            inputs, num_ranks = (old["queries"], old["responses"], pad), accelerator.num_processes
            # a backward pass for each part of the loss: one model's activations are gone when the other's are made
            accelerator.sync_gradients = False
            with accelerator.no_sync(model):
                logprobs, mask = model(*inputs, args.temperature), old["response_mask"]  # (B, T), (B, T)
                pg_loss, policy_sums = policy_loss(logprobs, old["logprobs"], old["advantages"], mask, args.cliprange)
                accelerator.backward(pg_loss / num_response * num_ranks)  # ranks average; the loss is their sum
            # DDP exchanges gradients, and DeepSpeed steps, after the last micro-batch; optimisers step if this is True
            accelerator.sync_gradients = last = i + 1 == len(micro_batches)
            with nullcontext() if last else accelerator.no_sync(model):
                values, mask = model(*inputs), old["value_mask"]  # (B, T), (B, T)
                vf_loss, num_clipped = value_loss(values, old["values"], old["returns"], mask, args.cliprange_value)
                # DDP waits for a gradient of every weight: the policy's, which are there, get one of 0 on top
                nothing = 0 * sum(parameter.sum() for parameter in model.parameters()) if last else 0
                accelerator.backward((args.vf_coef * vf_loss / num_value + nothing) * num_ranks)
            sums[:4] += torch.cat([pg_loss.detach()[None], policy_sums]) / num_response
            sums[4:] += torch.stack([vf_loss.detach(), num_clipped]) / num_value
        metrics = dict(zip(names, accelerator.reduce(sums).tolist()))
        yield step(accelerator, model, optimizer, metrics, rollout, update)


def check_first_update(metrics: dict, steps: list[dict], optimizer, planned_steps: int, tolerance: float) -> None:
    """What must hold while policy, old policy and SFT policy are one. Raises RuntimeError if it does not."""
    kl, ratio = metrics["objective/kl"] / metrics["objective/response_length"], steps[0]["policy/ratio"]
    gap = metrics["policy/sampling_kl"]  # not policy/sampling_gap: rounding in bf16 goes both ways
    taken = next((int(state["step"]) for state in optimizer.state.values() if "step" in state), 0)
    checks = {f"KL from the SFT policy is {kl:.5f} a token, expected 0": abs(kl) <= tolerance}
    checks[f"tokens are {gap:.5f} nats less likely when scored than when sampled, expected 0"] = abs(gap) <= tolerance
    checks[f"the first ratio of new and old policy is {ratio:.5f}, expected 1"] = abs(ratio - 1) <= tolerance
    checks[f"{taken} optimiser steps were taken, expected {planned_steps}"] = taken == planned_steps
    if failed := [found for found, holds in checks.items() if not holds]:
        raise RuntimeError(f"first update: {'; '.join(failed)}; check --sft_model, precision and library versions")


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


def summarise_rollout(rollout: dict, kl_coef: float, reduce_sum) -> dict:
    """Metrics of the whole batch, on all ranks: means over its summaries, or masked means over its tokens."""
    mean, scores, value_mask = partial(masked_mean, reduce_sum=reduce_sum), rollout["scores"], rollout["value_mask"]
    kl, values, returns = (rollout["logprobs"] - rollout["ref_logprobs"]).sum(1), rollout["values"], rollout["returns"]
    summaries = {"score": scores, "kl": kl, "rlhf_reward": scores - kl_coef * kl, "eos_rate": rollout["has_eos"]}
    summaries["response_length"] = rollout["num_tokens"]
    metrics = {f"objective/{name}": mean(x, torch.ones_like(scores)) for name, x in summaries.items()}
    gap = rollout["sampled_logprobs"] - rollout["logprobs"]  # of two kernels, with a cache and without
    tokens = {"objective/entropy": rollout["entropies"], "policy/sampling_gap": gap.abs(), "policy/sampling_kl": gap}
    metrics |= {name: mean(x, rollout["response_mask"]) for name, x in tokens.items()}
    metrics["value/mean"] = mean(values, value_mask)
    unexplained, total = (mean((x - mean(x, value_mask)).square(), value_mask) for x in (returns - values, returns))
    metrics["value/explained_variance"] = 1 - unexplained / total.clamp(min=1e-8)
    return {name: value.item() for name, value in metrics.items()}


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
    """Train, evaluate, save; returns the final metrics."""
    models, which = f"models/{Path(args.model).name}", f"--model {args.model} --seed {args.seed}"
    folder = Path(args.output_dir or f"{models}/ppo_{args.seed}")
    sft_path = args.sft_model or f"{models}/sft_{args.seed}"
    reward_path = args.reward_model or f"{models}/reward_{args.seed}"
    require_stage(sft_path, f"accelerate launch sft.py {which}")
    require_stage(reward_path, f"accelerate launch reward.py {which}")
    tokenizer, config = load_tokenizer(sft_path), load_config(sft_path)
    if load_tokenizer(reward_path).get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"{reward_path} and {sft_path} have different tokenizers; train the one from the other")
    columns, pad, eos = ["query_token", "reference_response_token"], tokenizer.pad_token_id, tokenizer.eos_token_id
    needed = (columns, tokenizer, config)
    dataset, train = load_split(args.dataset, "train", *needed, sampled=args.response_length)
    eval_dataset, validation = load_split(args.dataset, "validation", *needed, args.eval_rows, args.response_length)
    query_lengths, eval_lengths = ((split["query_token"] != pad).sum(1) for split in (train, validation))  # (N,)
    # one update: batch_size episodes, then epochs x minibatches optimiser steps of micro_batch x ranks x accumulation
    num_updates, steps_per_update = args.total_episodes // args.batch_size, args.num_ppo_epochs * args.num_minibatches
    if num_updates < 1:
        raise ValueError(f"--total_episodes {args.total_episodes} is less than --batch_size {args.batch_size}")
    policy, _ = load_model(AutoModelForCausalLM, sft_path, config)
    check_packing(policy, sft_path)
    # Detail 22 (value model): it starts as a copy of the reward model, since values predict its scores
    value_model = load_reward_model(reward_path, pad)

    accelerator, checkpoints = start_run(args, folder, [dataset], [sft_path, reward_path])
    rank, num_ranks, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    if args.gradient_checkpointing:
        policy.gradient_checkpointing_enable()
        value_model.gradient_checkpointing_enable()
    # Detail 20 (setups): AdamW with eps 1e-5, lr 3e-6 falling linearly, batch 512, 4 epochs of 1 minibatch
    actor_critic = ActorCritic(policy, value_model)
    adamw = {"lr": args.lr, "eps": args.adam_eps, "weight_decay": args.weight_decay, "fused": True}
    optimizer = torch.optim.AdamW(actor_critic.parameters(), **adamw)
    model, optimizer = accelerator.prepare(actor_critic, optimizer)
    # read again, now that the trained models are on their device: where a file is fp32, weights are views of it, and
    # ranks share them; where it is bf16, as DeepSpeed leaves it, each rank has fp32 copies until they are converted
    ref_policy, _ = load_model(AutoModelForCausalLM, sft_path, config)
    reward_config, home = load_config(reward_path, num_labels=1), "cpu" if args.offload else device
    reward_model, _ = load_model(AutoModelForSequenceClassification, reward_path, reward_config)
    for frozen in (ref_policy, reward_model):
        for parameter in frozen.parameters():  # in the policy's precision (DeepSpeed: bf16), else KL is not 0 at first
            parameter.data = parameter.data.to(home, policy.dtype, copy=True)  # the file may change during the run
        frozen.eval().requires_grad_(False).to(home)

    def evaluate(rows: torch.Tensor) -> torch.Tensor:
        """Near-greedy summaries of validation rows, their scores, the references', in one tensor -> (B, T + 2)."""
        queries, references = (validation[column][rows].to(device) for column in columns)
        responses, _ = generate(policy, queries, tokenizer, args.response_length, args.eval_temperature)
        scores = [get_scores(reward_model, torch.cat([queries, x], dim=1), pad) for x in (responses, references)]
        return torch.column_stack([responses, *scores])

    def sample(episodes: int) -> str:
        """Write summaries of the first four validation posts -> the same as a table, on the main process."""
        actor_critic.eval()
        with visiting(reward_model, device):
            samples = map_rows(accelerator, evaluate, eval_lengths[:4], args.micro_batch_size)
        texts = tokenizer.batch_decode(samples[:, :-2].long(), skip_special_tokens=True)
        table = {"query": eval_dataset["query"][:4], "response": texts, "score": samples[:, -2].tolist()}
        path = folder / f"samples_training/{episodes:08d}.jsonl"
        return write_samples(path, **table) if accelerator.is_main_process else ""

    if not checkpoints.newest:
        accelerator.log({"samples": sample(0)}, step=0)  # of the SFT policy
    progress = tqdm(checkpoints.load(num_updates), disable=not accelerator.is_main_process, desc="ppo")
    for update in progress:
        start_time, episodes = time.time(), (update + 1) * args.batch_size
        optimizer.param_groups[0]["lr"] = lr = args.lr * (1 - update / num_updates)
        rollout, steps = checkpoints.inside or ({}, [])  # of this update, if a signal ended the run in its middle
        checkpoints.inside = None
        # Detail 21 (prompts): those of the SFT train split, without replacement, shuffled anew in each pass
        rows = stream_rows(args.seed, len(dataset), episodes - args.batch_size, episodes)
        rows = rows[query_lengths[rows].argsort(stable=True)][rank::num_ranks]  # short and long ones on each rank
        queries = train["query_token"][rows].to(device)  # (B, Q)
        if not rollout:
            with accelerator.autocast():
                rollout = collect_rollout(actor_critic.eval(), ref_policy, reward_model, queries, tokenizer, args)
            rollout = add_advantages(rollout, args, accelerator.reduce)
        metrics = summarise_rollout(rollout, args.kl_coef, accelerator.reduce)
        rollout_time = time.time()
        actor_critic.train()
        for step_metrics in update_model(accelerator, model, optimizer, rollout, pad, args, update, len(steps)):
            steps.append(step_metrics)
            checkpoints.save(update, num_updates, (rollout, steps))
        if update == 0:
            tolerance = 1e-3 if accelerator.mixed_precision == "no" else 0.05
            check_first_update(metrics, steps, optimizer, steps_per_update, tolerance)
        metrics |= {name: sum(taken[name] for taken in steps) / len(steps) for name in steps[0]}
        seconds = (rollout_time - start_time, time.time() - rollout_time)
        memory = torch.cuda.max_memory_allocated() / 2**30 or getrusage(RUSAGE_SELF).ru_maxrss / 2**20
        metrics |= {"train/lr": lr, "perf/seconds_rollout": seconds[0], "perf/seconds_update": seconds[1]}
        metrics |= {"perf/episodes_per_second": args.batch_size / sum(seconds), "perf/peak_memory_gib": memory}
        progress.set_postfix(score=f"{metrics['objective/score']:.2f}", kl=f"{metrics['objective/kl']:.2f}")
        if (update + 1) % (args.sample_every or max(1, num_updates // 10)) == 0:
            metrics["samples"] = sample(episodes)
        accelerator.log(metrics, step=episodes)
        checkpoints.save(update + 1, num_updates)

    actor_critic.eval()
    with visiting(reward_model, device):
        results = map_rows(accelerator, evaluate, eval_lengths, 4 * args.micro_batch_size)  # (N, T + 2)
    responses, (scores, reference_scores) = results[:, :-2].long(), results[:, -2:].T
    means = {"score": scores, "reference_score": reference_scores, "score_win_rate": scores > reference_scores}
    means |= {"eos_rate": (responses == eos).any(1), "response_length": (responses != pad).sum(1)}
    metrics = {f"eval/validation/{name}": values.float().mean().item() for name, values in means.items()}
    if accelerator.is_main_process:
        for trained, path in ((policy, folder), (value_model, folder / "value_model")):
            trained.save_pretrained(path)
            tokenizer.save_pretrained(path)
        tokens = (responses, validation["reference_response_token"])
        texts, references = (tokenizer.batch_decode(rows, skip_special_tokens=True) for rows in tokens)
        table = {"query": eval_dataset["query"], "response": texts, "reference": references}
        all_scores = {"score": scores.tolist(), "reference_score": reference_scores.tolist()}
        write_samples(folder / "samples_validation.jsonl", **table, **all_scores)
    finish_run(args, folder, accelerator, metrics, num_updates * args.batch_size + 1)
    return metrics


if __name__ == "__main__":
    main(tyro.cli(Args))
