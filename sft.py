"""Supervised fine-tuning (SFT) of a language model on TL;DR summaries.

The first training stage of "The N+ Implementation Details of RLHF with PPO" (Details 7-9, Table 3):

    accelerate launch sft.py --model pythia-1b

Inputs:  a base model and a pre-tokenised dataset (tldr_dataset.py).
Outputs: models/<model>/sft_<seed>/ with safetensors, tokenizer, run.json, model card, samples_validation.jsonl.

Next-token cross-entropy on query and reference summary: [PAD] is ignored and EOS is trained, so that the policy learns
to end its summaries. A global batch is sorted by length and cut into micro-batches, trimmed to their longest row; its
loss is the mean over all its tokens on all ranks. Evaluation: validation loss, and ROUGE of near-greedy summaries.

Shapes: N rows of the dataset, B rows of a batch, Q query, T response, L = Q + T sequence, V vocabulary.
"""

import json
import math
import os
import resource
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import evaluate
import torch
import torch.nn.functional as F
import tyro
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, gather_object, set_seed
from datasets import load_dataset, load_from_disk
from huggingface_hub import HfApi
from rouge_score.rouge_scorer import RougeScorer
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

SIZES = ("70m", "160m", "410m", "1b", "1.4b", "2.8b", "6.9b", "12b")
PYTHIA = {f"pythia-{size}": f"EleutherAI/pythia-{size}-deduped" for size in SIZES}


@dataclass
class Args:
    # run
    model: str = "pythia-1b"
    """Base model: pythia-{70m,160m,410m,1b,1.4b,2.8b,6.9b,12b}, any Hub id, or a local folder."""
    seed: int = 44413
    """Seed of initialisation, data order and sampling. The paper's: 44413, 55513, 66613, 77713."""
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
    num_epochs: float = 1.0
    """Passes over the train split."""
    max_updates: int = 0
    """End the run, and its learning-rate schedule, after this many optimiser steps (0: num_epochs decides)."""
    batch_size: int = 128
    """Rows in one optimiser step, over all processes."""
    micro_batch_size: int = 8
    """Rows in one forward pass of one process; gradient accumulation follows from it."""
    lr: float = 3e-6
    """Learning rate of AdamW at the start; it follows a cosine to zero."""
    adam_eps: float = 1e-5
    """Epsilon of AdamW."""
    weight_decay: float = 0.01
    """Weight decay of AdamW (torch's default, which the paper's code leaves in place)."""
    # algorithm
    loss_on: Literal["query_response", "response"] = "query_response"
    """Tokens that are trained: query and response (the paper's code), or the response alone (trlX)."""
    # evaluation
    eval_rows: int = 0
    """Rows of each validation split that are evaluated (0: all)."""
    response_length: int = 53
    """Longest summary that is sampled, in tokens."""
    eval_temperature: float = 0.01
    """Sampling temperature of evaluations; 0.01 is all but greedy."""
    # logging
    save_every: int = 0
    """Updates between checkpoints of the whole training state, from which the same command goes on (0: none)."""
    track: bool = False
    """Log to Weights and Biases, besides TensorBoard (<output_dir>/runs)."""
    wandb_project: str = "tldr_rlhf"
    """Project in Weights and Biases."""


def load_tokenizer(path: str):
    """Tokenizer with a [PAD] of its own. Raises ValueError if it has no EOS, or if its PAD is its EOS.

    Detail 3 ([PAD] is not EOS): with PAD = EOS the EOS is masked as padding, never trained, and summaries never end.
    """
    tokenizer = AutoTokenizer.from_pretrained(path)
    eos, pad = tokenizer.eos_token, tokenizer.pad_token
    if eos is None or eos == pad:
        raise ValueError(f"tokenizer {path}: expected an EOS and another PAD (or none), found EOS {eos!r}, PAD {pad!r}")
    if pad is None or pad == tokenizer.unk_token:
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    return tokenizer


def load_split(source: str, split: str, columns: list[str], tokenizer, vocab_size: int, max_rows: int = 0):
    """One pre-tokenised split -> (Dataset, {column: (N, L) tokens}); its first `max_rows` rows, or all for 0.

    Raises FileNotFoundError if the folder or split is not there, ValueError for a missing column, rows of unequal
    length, another tokenizer's tokens, or a response without EOS.
    """
    folder, remedy = Path(source), "make the dataset with tldr_dataset.py and this model's tokenizer"
    if (folder / "dataset_dict.json").exists():
        dataset = load_from_disk(folder)[split]
    else:
        dataset = load_dataset(source, data_files={split: f"{split}[.-]*"} if folder.is_dir() else None, split=split)
    dataset = dataset.select(range(min(max_rows or len(dataset), len(dataset))))
    arrays, tokens, problem = dataset.with_format("numpy")[:], {}, ""
    for column in columns:
        if column not in arrays:
            problem = f"is missing among {dataset.column_names}"
        elif arrays[column].dtype == object:
            problem = f"has rows of {sorted({len(row) for row in arrays[column]})} tokens, not of one length"
        else:
            tokens[column] = rows = torch.from_numpy(arrays[column]).long()  # (N, L)
            is_pad, has_eos = rows == tokenizer.pad_token_id, (rows == tokenizer.eos_token_id).any(1)
            query = tokenizer(dataset[0]["query"]).input_ids if "query" in column else []
            foreign = rows[0][~is_pad[0]][: len(query)].tolist() != query
            if foreign or (rows < 0).any() or (rows[~is_pad] >= vocab_size).any():
                problem = "was tokenised with another tokenizer than the model's"
            elif column != "query_token" and not has_eos.all():
                problem = f"has no EOS in row {has_eos.int().argmin().item()}: summaries would never end"
        if problem:
            raise ValueError(f"dataset {source}, split {split}: column {column!r} {problem}; {remedy}")
    return dataset, tokens


def stream_rows(seed: int, num_rows: int, start: int, stop: int) -> torch.Tensor:
    """Rows start..stop of an endless stream of passes over the data, each pass a new permutation -> (stop - start,).

    A function of the seed alone, so all ranks see the same stream, whatever their number.
    """
    first = start // num_rows
    generators = [torch.Generator().manual_seed(seed * 1_000_003 + i) for i in range(first, (stop - 1) // num_rows + 1)]
    passes = torch.cat([torch.randperm(num_rows, generator=generator) for generator in generators])
    return passes[start - first * num_rows : stop - first * num_rows]


def make_micro_batches(rows: torch.Tensor, lengths: torch.Tensor, size: int, rank: int, num_ranks: int) -> list:
    """Cut a global batch into this rank's micro-batches -> [(rows, weight)], rows of like length together to pad less.

    rows (B,) index the dataset, lengths (N,) are its. Each row is on one rank, once, with weight 1. The ranks meet in
    every micro-batch, so all get as many: where none is left for a rank, another row stands in, with weight 0.
    """
    groups = rows[lengths[rows].argsort(stable=True)].split(size * num_ranks)
    return [(group[rank::num_ranks], 1.0) if rank < len(group) else (group[:1], 0.0) for group in groups]


def trim(tokens: torch.Tensor, pad_token_id: int) -> torch.Tensor:
    """Drop the columns of (B, L) that are [PAD] in every row."""
    return tokens[:, (tokens != pad_token_id).any(0)]


def load_config(path: str, **overrides):
    """Model configuration with every dropout at 0.

    Detail 7 (no dropout): log-probabilities must repeat, or PPO's ratio is not 1 at its first step and KL is noise.
    """
    config = AutoConfig.from_pretrained(path, **overrides)
    for name, value in config.to_dict().items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def model_inputs(tokens: torch.Tensor, pad_token_id: int) -> dict:
    """Padded tokens (B, L) -> input_ids, attention_mask, position_ids, each (B, L), so that padding changes no result.

    Detail 3 ([PAD] has no embedding): the model is fed 0 there, and attends to none of it.
        tokens [PAD] [PAD] 17 23 EOS -> input_ids 0 0 17 23 EOS, attention_mask 0 0 1 1 1, position_ids 0 0 0 1 2
    """
    mask = tokens != pad_token_id
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": tokens * mask, "attention_mask": mask.long(), "position_ids": position_ids}


def truncate_after_eos(responses: torch.Tensor, eos_token_id: int, pad_token_id: int) -> torch.Tensor:
    """Put [PAD] in place of all that follows the first EOS of (B, T): [7, EOS, 9, EOS] -> [7, EOS, PAD, PAD]."""
    is_eos = responses == eos_token_id
    return responses.masked_fill((is_eos.cumsum(1) - is_eos.long()) > 0, pad_token_id)


@torch.no_grad()
def generate(model, queries: torch.Tensor, tokenizer, response_length: int, temperature: float) -> torch.Tensor:
    """Sample responses to left-padded queries (B, Q) -> (B, response_length), [PAD] after EOS.

    Ends as soon as every row has its EOS. [PAD], and rows of the vocabulary that no token owns, are never sampled.
    """
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    inputs = model_inputs(queries, pad)
    settings = GenerationConfig(
        **{"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, "max_new_tokens": response_length},
        **{"eos_token_id": eos, "pad_token_id": eos, "bos_token_id": None},
        suppress_tokens=sorted({pad, *range(len(tokenizer), model.config.vocab_size)}),
    )
    responses = model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], generation_config=settings)
    responses = F.pad(responses[:, queries.shape[1] :], (0, response_length), value=eos)[:, :response_length]
    return truncate_after_eos(responses, eos, pad)


def sft_loss(logits: torch.Tensor, tokens: torch.Tensor, target_mask: torch.Tensor) -> torch.Tensor:
    """Next-token cross-entropy, summed over the trained tokens: logits (B, L, V), tokens and target_mask (B, L).

    tokens       17 23 EOS [PAD]
    target_mask   1  1  1    0    (nothing predicts the first token, so it is trained in no case)
    """
    labels = tokens.masked_fill(~target_mask, -100).roll(-1, dims=1)  # position i predicts token i + 1
    labels[:, -1] = -100
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


@torch.no_grad()
def map_rows(accelerator, function, lengths: torch.Tensor, micro_batch_size: int) -> torch.Tensor:
    """function(rows) -> one result a row, for all N rows, the work shared by all ranks -> results in order (N, ...).

    It has its own random numbers, so that evaluating more often does not change the training run.
    """
    pieces, rank, num_ranks = [], accelerator.process_index, accelerator.num_processes
    with torch.random.fork_rng(), accelerator.autocast():
        torch.manual_seed(rank)
        for rows, weight in make_micro_batches(torch.arange(len(lengths)), lengths, micro_batch_size, rank, num_ranks):
            results = function(rows).tolist()
            pieces += list(zip(rows.tolist(), results)) if weight else []
    return torch.tensor([result for _, result in sorted(gather_object(pieces))])


def write_samples(path: Path, **columns) -> None:
    """Write columns (query, response, reference, ...) as one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(dict(zip(columns, row))) + "\n" for row in zip(*columns.values())))


def compute_rouge(predictions: list[str], references: list[str]) -> dict:
    """Mean ROUGE-1/2/L F-measure over the corpus: by `evaluate`, or without a Hub by rouge_score, on which it rests."""
    names = ("rouge1", "rouge2", "rougeL")
    try:
        rouge = evaluate.load("rouge")  # the metric's module comes from the Hub
        rows = rouge.compute(predictions=predictions, references=references, use_aggregator=False)
    except (OSError, ImportError):
        print("ROUGE by rouge_score, since the module of evaluate is not to be had", file=sys.stderr)
        scores = [RougeScorer(names).score(*pair) for pair in zip(references, predictions)]
        rows = {name: [score[name].fmeasure for score in scores] for name in names}
    return {f"eval/validation/{name}": float(sum(rows[name]) / len(predictions)) for name in names}


def start_run(args, folder: Path, dataset) -> Accelerator:
    """Claim the output folder, write run.json, open the trackers.

    Raises ValueError for a batch that can't be shared out and for ZeRO-3, FileExistsError for another run's folder.
    """
    logging = ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder / "runs"))
    accelerator = Accelerator(log_with=["tensorboard"] + ["wandb"] * args.track, project_config=logging)
    share, plugin = args.micro_batch_size * accelerator.num_processes, accelerator.state.deepspeed_plugin
    if args.batch_size % share:
        raise ValueError(
            f"--batch_size {args.batch_size} must be a multiple of --micro_batch_size x processes = {share}"
        )
    if plugin and plugin.zero_stage == 3:
        raise ValueError("ZeRO-3 shards the weights that are sampled from; launch with benchmark/zero2.yaml")
    if plugin:
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = args.micro_batch_size
    if accelerator.is_main_process:
        git = subprocess.run(["git", "-C", Path(__file__).parent, "rev-parse", "HEAD"], capture_output=True, text=True)
        versions = {name: version(name) for name in ("torch", "transformers", "accelerate", "datasets")}
        run = {"command": " ".join(["accelerate launch", *sys.argv]), "args": asdict(args), "versions": versions}
        run |= {"git_commit": git.stdout.strip(), "dataset_fingerprint": dataset._fingerprint, "finished": False}
        run = json.loads(json.dumps(run))
        old = json.loads((folder / "run.json").read_text()) if (folder / "run.json").exists() else {}
        if args.overwrite and old:
            shutil.rmtree(folder)
        same = not old.get("finished") and all(old.get(key) == run[key] for key in ("args", "dataset_fingerprint"))
        if folder.exists() and any(folder.iterdir()) and not same:
            raise FileExistsError(
                f"{folder} holds another run, or a finished one: give another --output_dir, or --overwrite"
            )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").write_text(json.dumps(run, indent=2))
    accelerator.wait_for_everyone()
    config = {key: str(value) for key, value in asdict(args).items()}
    accelerator.init_trackers(args.wandb_project, config, {"wandb": {"name": folder.name, "dir": str(folder)}})
    set_seed(args.seed, device_specific=True)
    return accelerator


def save_checkpoint(accelerator, folder: Path, update: int) -> None:
    """State of models, optimiser and random numbers after `update` updates; replaces the last one once it is whole."""
    new = folder / "checkpoints" / f"{update:08d}"
    accelerator.save_state(f"{new}.tmp")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.replace(f"{new}.tmp", new)
        for old in set(new.parent.iterdir()) - {new}:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def load_checkpoint(accelerator, folder: Path) -> int:
    """Go back to the checkpoint in `folder`, if there is one -> number of updates that are done."""
    checkpoints = sorted(path for path in (folder / "checkpoints").glob("*") if path.suffix != ".tmp")
    if checkpoints:
        accelerator.load_state(str(checkpoints[-1]))
    return int(checkpoints[-1].name) if checkpoints else 0


def finish_run(args, folder: Path, accelerator, metrics: dict) -> None:
    """Write the model card and, last of all, "finished" into run.json, which tells the next stage that all is there."""
    if accelerator.is_main_process:
        run = json.loads((folder / "run.json").read_text()) | {"metrics": metrics, "finished": True}
        card = f"---\nlibrary_name: transformers\n---\n\n# {folder.name}\n\n    {run['command']}\n\n"
        table = "| metric | value |\n| --- | --- |\n" + "".join(f"| {k} | {v:.4f} |\n" for k, v in metrics.items())
        (folder / "README.md").write_text(f"{card}{table}\nAll arguments and versions are in run.json.\n")
        (folder / "run.json.tmp").write_text(json.dumps(run, indent=2))
        os.replace(folder / "run.json.tmp", folder / "run.json")
        if args.push_to_hub:
            HfApi().create_repo(args.push_to_hub, exist_ok=True)
            ignored = ["checkpoints/*", "runs/*", "wandb/*"]
            HfApi().upload_folder(folder_path=folder, repo_id=args.push_to_hub, ignore_patterns=ignored)
    accelerator.end_training()


def check_finite(folder: Path, update: int, metrics: dict) -> None:
    """Stop before the optimiser uses a loss or gradient that is NaN or infinite. Raises FloatingPointError."""
    if not all(map(math.isfinite, metrics.values())):
        kept = f"the last checkpoint, if --save_every was given, is in {folder / 'checkpoints'}"
        raise FloatingPointError(f"update {update}: not finite: {metrics}; {kept}; try a lower --lr")


def main(args: Args) -> dict:
    """Train, evaluate, save; returns the final metrics."""
    base = PYTHIA.get(args.model, args.model)
    folder = Path(args.output_dir or f"models/{Path(args.model).name}/sft_{args.seed}")
    tokenizer, config = load_tokenizer(base), load_config(base)
    columns, pad = ["query_token", "reference_response_token", "query_reference_response_token"], tokenizer.pad_token_id
    checks = (columns, tokenizer, config.vocab_size)
    dataset, train = load_split(args.dataset, "train", *checks)
    eval_dataset, validation = load_split(args.dataset, "validation", *checks, args.eval_rows)
    for split in (train, validation):
        query_lengths = (split["query_token"] != pad).sum(1)  # (N,)
        split["lengths"] = (split["query_reference_response_token"] != pad).sum(1)
        split["first_target"] = query_lengths if args.loss_on == "response" else torch.ones_like(query_lengths)
        split["num_targets"] = split["lengths"] - split["first_target"]

    # Detail 8 (stack): DDP, DeepSpeed ZeRO-2 and bf16 come from the configuration of `accelerate launch`
    accelerator = start_run(args, folder, dataset)
    rank, num_ranks, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    model = AutoModelForCausalLM.from_pretrained(base, config=config, dtype=torch.float32)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    # Detail 9 (setups): AdamW with eps 1e-5, lr 3e-6 on a cosine, batch 128, one epoch
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=args.adam_eps, weight_decay=args.weight_decay)
    model, optimizer = accelerator.prepare(model, optimizer)

    def micro_losses(split: dict, rows: torch.Tensor):
        """Loss of each micro-batch; over all micro-batches and ranks they add up to the token mean of the batch."""
        micro_batches = make_micro_batches(rows, split["lengths"], args.micro_batch_size, rank, num_ranks)
        for i, (micro_rows, weight) in enumerate(micro_batches):
            tokens = trim(split["query_reference_response_token"][micro_rows], pad).to(device)  # (B, L)
            first_target = split["first_target"][micro_rows, None].to(device)
            target_mask = (tokens != pad) & (torch.arange(tokens.shape[1], device=device) >= first_target)
            # gradients are exchanged, and DeepSpeed steps, in the last micro-batch only
            accelerator.sync_gradients = last = i + 1 == len(micro_batches)
            with nullcontext() if last else accelerator.no_sync(model):
                logits = model(**model_inputs(tokens, pad)).logits  # (B, L, V)
                yield weight * sft_loss(logits, tokens, target_mask) / split["num_targets"][rows].sum()

    # updates = ceil(epochs x N / batch_size), the last batch is smaller; batch = micro_batch x ranks x accumulation
    num_rows, start_time = int(args.num_epochs * len(dataset)), time.time()
    num_updates = min(math.ceil(num_rows / args.batch_size), args.max_updates or num_rows)
    first_update = load_checkpoint(accelerator, folder)
    progress = tqdm(range(first_update, num_updates), disable=not accelerator.is_main_process, desc="sft")
    for update in progress:
        lr = args.lr * 0.5 * (1 + math.cos(math.pi * update / num_updates))
        optimizer.param_groups[0]["lr"] = lr
        episodes = min((update + 1) * args.batch_size, num_rows)
        loss = torch.zeros((), device=device)
        for micro_loss in micro_losses(train, stream_rows(args.seed, len(dataset), update * args.batch_size, episodes)):
            accelerator.backward(
                micro_loss * num_ranks
            )  # ranks average their gradients, and the loss is a sum over them
            loss += micro_loss.detach()
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), math.inf)
        metrics = {"train/loss": accelerator.reduce(loss).item(), "train/grad_norm": float(grad_norm or 0)}
        check_finite(folder, update, metrics)
        optimizer.step()
        optimizer.zero_grad()
        done = episodes - first_update * args.batch_size
        metrics |= {"train/lr": lr, "perf/episodes_per_second": done / (time.time() - start_time)}
        metrics["perf/peak_memory_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        accelerator.log(metrics, step=episodes)
        progress.set_postfix(loss=f"{metrics['train/loss']:.3f}", lr=f"{lr:.1e}")
        if args.save_every and (update + 1) % args.save_every == 0:
            save_checkpoint(accelerator, folder, update + 1)

    def sample(rows: torch.Tensor) -> torch.Tensor:
        queries = trim(validation["query_token"][rows], pad).to(device)
        return generate(
            accelerator.unwrap_model(model), queries, tokenizer, args.response_length, args.eval_temperature
        )

    responses = map_rows(accelerator, sample, validation["lengths"], args.micro_batch_size)  # (N, T)
    with torch.no_grad():
        eval_loss = accelerator.reduce(sum(micro_losses(validation, torch.arange(len(eval_dataset))))).item()
    texts, references = (
        tokenizer.batch_decode(tokens, skip_special_tokens=True)
        for tokens in (responses, validation["reference_response_token"])
    )
    metrics = {"eval/validation/loss": eval_loss} | compute_rouge(texts, references)
    accelerator.log(metrics | {"samples": "\n\n".join(texts[:4])}, step=num_rows)
    accelerator.print(json.dumps(metrics, indent=2))
    state_dict = accelerator.get_state_dict(model)  # on all ranks: under DeepSpeed each holds a part
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(folder, state_dict=state_dict)
        tokenizer.save_pretrained(folder)
        samples = {"query": eval_dataset["query"], "response": texts, "reference": references}
        write_samples(folder / "samples_validation.jsonl", **samples)
    finish_run(args, folder, accelerator, metrics)
    return metrics


if __name__ == "__main__":
    main(tyro.cli(Args))
