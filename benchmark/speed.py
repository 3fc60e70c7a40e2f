"""Speed and memory of every stage, side by side with its peer, and against what the machine can do.

    python benchmark/speed.py --quick                      the same in short, once the peers' environments exist
    python benchmark/speed.py                              everything on this processor
    python benchmark/speed.py --device cuda --precision bf16 --models 410m 1b 2.8b --batch_size 64

Inputs:  raw TL;DR posts and comparisons with Pythia's tokenizer in ../shared/data (where they are absent, words drawn
         to the same lengths), and models with random weights and Pythia's vocabulary, made here.
Outputs: <output>.csv and .md, a table that grows with each row measured.

Ours and the peer are two processes that take turns: one update of ours, one of the peer's, and so on, after a warm-up
each, with the same weights and the same posts. PPO's peer is TRL 1.12.0, the last with a PPO trainer; those of SFT,
reward and DPO are TRL 1.16.0; that of tldr_dataset.py is a map of one row at a time. A row is measured as glibc comes
(`plain`), and with an allocator that keeps large tensors (`tuned`, as our launch scripts have it), on both sides.
"""

import csv
import json
import math
import os
import random
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import tyro
from transformers import AutoTokenizer, GPTNeoXConfig, GPTNeoXForCausalLM, GPTNeoXForSequenceClassification

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import tldr_dataset  # noqa: E402

SHAPES = {"d128": (4, 128, 4), "d256": (6, 256, 8), "410m": (24, 1024, 16), "1b": (16, 2048, 8), "2.8b": (32, 2560, 32)}
VOCAB_SIZE, RESPONSE_LENGTH, TEMPERATURE, PPO_EPOCHS = 50304, 53, 0.7, 4
TUNED = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "17179869184"}
TUNED["MALLOC_TOP_PAD_"] = "67108864"
PEERS = {"ppo": "1.12.0", "sft": "1.16.0", "reward": "1.16.0", "dpo": "1.16.0"}
COLUMNS = "stage model precision allocator".split()
COLUMNS += [f"{side}_{x}" for side in ("ours", "peer") for x in ("median", "min", "max")] + ["ratio", "ratio_cpu"]
COLUMNS += [f"{side}_{x}" for side in ("ours", "peer") for x in ("generation_s", "scoring_s", "update_s")]
COLUMNS += ["ours_peak_gib", "peer_peak_gib", "memory_ratio", "gflop", "gflops_limit", "ours_fraction", "peer_fraction"]
COLUMNS += ["ours_update_fraction", "ours_scoring_fraction", "ours_busy", "peer_busy"]
COLUMNS += ["ours_response_length", "peer_response_length", "repetitions"]


@dataclass
class Args:
    quick: bool = False
    """Two measured updates a side, of PPO one of one micro-batch; tuned allocator; but for PPO the first model
    alone."""
    stages: tuple[str, ...] = ("ppo", "sft", "reward", "dpo", "dataset")
    """Stages that are measured."""
    models: tuple[str, ...] = ("d128", "d256")
    """Shapes of models: d128, d256, 410m, 1b, 2.8b."""
    allocators: tuple[str, ...] = ("plain", "tuned")
    """Settings of glibc's allocator."""
    trl: str = ""
    """Version of TRL. Empty: 1.12.0 for PPO, 1.16.0 for SFT, reward model and DPO."""
    precision: str = "fp32"
    """fp32, or bf16: autocast on both sides (in TRL's PPO around the update only), weights in fp32."""
    device: str = "cpu"
    """cpu or cuda."""
    batch_size: int = 16
    """Rows in one update."""
    micro_batch_size: int = 8
    """Rows in one forward pass."""
    repetitions: int = 3
    """Measured updates of each side, after one that warms up."""
    threads: int = 1
    """Threads of each side; for `dataset` its processes."""
    dataset_rows: int = 4000
    """Rows of raw data for `dataset`."""
    data: str = str(ROOT.parent / "shared" / "data")
    """Folder with tldr/ and tokenizers/pythia."""
    folder: str = str(ROOT / "benchmark" / "out" / "speed")
    """Folder for models, data and logs; the peers' environments are in `peers` beside it."""
    output: str = ""
    """Table to write, without .csv and .md; rows that are there and not measured now are kept.
    Empty: docs/performance/speed, or <folder>/quick with --quick."""


# ------------------------------------------------------------------------------------------------------------ workload


def make_raw(num_rows: int, seed: int = 0) -> tuple[list[dict], list[dict]]:
    """Raw posts and comparisons of drawn words, as long as the real ones are in Pythia's tokens (mean, sd):
    queries 346, 94, summaries 34, 6.5."""
    rng = random.Random(seed)

    def words(mean: float, sd: float, low: int, high: int) -> str:
        return " ".join(f"w{rng.randrange(50_000)}" for _ in range(round(min(high, max(low, rng.gauss(mean, sd))))))

    posts = [{"id": str(i), "subreddit": "tifu", "title": words(10, 3, 3, 20)} for i in range(num_rows)]
    # the template and the title take about 24 tokens of a query
    posts = [post | {"post": words(322, 94, 50, 480), "summary": words(33, 6.5, 15, 49)} for post in posts]
    comparisons = []
    for post in posts:
        texts = [f" {words(36, 6.7, 23, 50)}" for _ in range(2)]
        summaries = [{"text": text, "policy": name, "note": None} for text, name in zip(texts, ("ref", "sup"))]
        row = {"info": post | {"article": None, "site": None}, "summaries": summaries, "choice": rng.randrange(2)}
        comparisons.append(row | {"worker": "", "batch": "batch3", "split": "train", "extra": {"confidence": None}})
    return posts, comparisons


def make_tokenizer(folder: Path):
    """Tokenizer of 50,277 words, for where Pythia's is absent: one token each, EOS 0."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<|endoftext|>": 0, "[UNK]": 1} | {f"w{i}": i + 2 for i in range(50_275)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def pick_rows(lengths: list[int], num_rows: int) -> list[int]:
    """Rows at evenly spaced quantiles of the length, so that few rows stand for the whole."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return [order[int((i + 0.5) * len(order) / num_rows)] for i in range(num_rows)]


def make_workload(args: Args, max_query_length: int = 512) -> dict:
    """Write raw rows, the tokenizer, one batch of each kind and the peer's rows -> their paths, and token lengths."""
    folder, data = Path(args.folder), Path(args.data)
    tokenizer_path = data / "tokenizers" / "pythia"
    real = (data / "tldr" / "sft" / "train.jsonl").exists() and tokenizer_path.exists()
    if real:
        names = ("sft", "comparisons")
        files = [(data / "tldr" / name / "train.jsonl").read_text().splitlines() for name in names]
        raw = [[json.loads(line) for line in lines] for lines in files]
    else:
        tokenizer_path, raw = folder / "tokenizer", make_raw(800)
        make_tokenizer(tokenizer_path)
    tokenizer = tldr_dataset.load_tokenizer(str(tokenizer_path))
    paths = {"tokenizer": str(tokenizer_path), "source": "real posts" if real else "drawn words"}
    for kind, rows in zip(("sft", "comparisons"), raw):
        queries = [tldr_dataset.TLDR_TEMPLATE.format(**row.get("info", row)) for row in rows]
        picked = pick_rows([len(tokens) for tokens in tokenizer(queries).input_ids], args.batch_size)
        repeated = [rows[i % len(rows)] for i in range(args.dataset_rows)]
        for name, chosen in (("batch", [rows[i] for i in picked]), ("rows", repeated)):
            for split, part in (("train", chosen), ("validation", rows[:4])):
                path = folder / "raw" / name / kind / f"{split}.jsonl"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("".join(json.dumps(row) + "\n" for row in part))
        paths[f"raw_{kind}"] = str(folder / "raw" / "rows" / kind)
    fields = {"sft": str(folder / "raw/batch/sft"), "comparisons": str(folder / "raw/batch/comparisons")}
    fields |= {"tokenizer": str(tokenizer_path), "output_dir": str(folder / "data"), "num_proc": 1}
    fields["max_query_length"] = max_query_length
    made = tldr_dataset.main(tldr_dataset.Args(**fields, overwrite=True))
    paths["data"], pad = str(folder / "data"), tokenizer.pad_token_id
    columns = {"ppo": {"input_ids": "query_token"}, "sft": {"input_ids": "query_reference_response_token"}}
    columns["reward"] = {f"{side}_ids": f"query_{side}_token" for side in ("chosen", "rejected")}
    columns["dpo"] = {"prompt_ids": "query_token", "chosen_ids": "chosen_token", "rejected_ids": "rejected_token"}
    for stage, names in columns.items():
        dataset = made["comparisons" if stage in ("reward", "dpo") else "sft"]["train"]
        rows = [{name: [t for t in row[column] if t != pad] for name, column in names.items()} for row in dataset]
        if stage == "sft":
            rows = [row | {"labels": row["input_ids"]} for row in rows]
        paths[stage] = str(folder / f"{stage}.json")
        Path(paths[stage]).write_text(json.dumps(rows))
    return paths


def eos_logit(hidden_size: int, num_words: int, mean_length: float = 35.0) -> float:
    """Logit of EOS, among num_words whose logits are N(0, 0.02 sqrt(D)), at which responses have a mean length, cut at
    RESPONSE_LENGTH: a geometric law, mean (1 - (1 - p)^53) / p."""
    low, high = 1e-6, 1.0
    for _ in range(60):
        p = (low + high) / 2
        longer = (1 - (1 - p) ** RESPONSE_LENGTH) / p > mean_length
        low, high = (p, high) if longer else (low, p)
    deviation = 0.02 * math.sqrt(hidden_size) / TEMPERATURE
    return TEMPERATURE * (math.log(p / (1 - p)) + math.log(num_words) + deviation**2 / 2)


def make_models(shape: str, folder: Path, tokenizer_path: str, mean_length: float = 35.0) -> dict:
    """Random policy whose responses end, and reward model, with Pythia's vocabulary -> their folders."""
    layers, hidden, heads = SHAPES[shape]
    paths = {"model": folder / shape / "policy", "reward_model": folder / shape / "reward_model"}
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    torch.manual_seed(0)
    size = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    size |= {"intermediate_size": 4 * hidden, "vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": 0}
    policy = GPTNeoXForCausalLM(GPTNeoXConfig(**size))
    norm, head = policy.gpt_neox.final_layer_norm, policy.get_output_embeddings()
    norm.bias.data.fill_(1 / hidden)  # the norm's output then adds up to 1, whatever goes in
    head.weight.data[0] = eos_logit(hidden, len(tokenizer) - 1, mean_length)
    reward_model = GPTNeoXForSequenceClassification(GPTNeoXConfig(**size, num_labels=1, pad_token_id=len(tokenizer)))
    for model, path in zip((policy, reward_model), paths.values()):
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return {name: str(path) for name, path in paths.items()}


# --------------------------------------------------------------------------------------------------------------- FLOPs


def body_flops(shape: str, length: int, start: int = 0) -> float:
    """Forward pass of the blocks over tokens start..length of one sequence: matrix products, causal attention."""
    layers, hidden, _ = SHAPES[shape]
    attended = (length * (length + 1) - start * (start + 1)) / 2  # pairs of a token and one that it attends to
    return layers * (24 * hidden**2 * (length - start) + 4 * hidden * attended)


def head_flops(shape: str, positions: float) -> float:
    """Language-model head at some positions."""
    return 2 * SHAPES[shape][1] * VOCAB_SIZE * positions


def ppo_flops(shape: str, queries: list[int], response: float) -> dict:
    """Useful FLOPs of an episode by phase, with no padding; a backward pass counts twice the forward.
    Generation: policy. Scoring: policy, reference, value and reward model. Update: policy and value model, 4 epochs."""
    body = statistics.mean(body_flops(shape, query + response) for query in queries)
    head = head_flops(shape, response)
    update = PPO_EPOCHS * 3 * (2 * body + head)
    return {"generation": body + head, "scoring": 4 * body + 2 * head, "update": update}


def stage_flops(stage: str, shape: str, rows: list[dict]) -> float:
    """Useful FLOPs of a sample (SFT) or pair (reward, DPO) in an update."""
    total = 0.0
    for row in rows:
        if stage == "sft":
            total += 3 * (body_flops(shape, len(row["input_ids"])) + head_flops(shape, len(row["input_ids"]) - 1))
            continue
        prompt, chosen, rejected = row.get("prompt_ids", []), row["chosen_ids"], row["rejected_ids"]
        shared = len(prompt) + len(os.path.commonprefix([chosen, rejected]))  # the post: once is enough
        body = body_flops(shape, len(prompt + chosen)) + body_flops(shape, len(prompt + rejected), shared)
        # DPO: the policy with gradients, the reference without
        total += 3 * body if stage == "reward" else 4 * (body + head_flops(shape, len(chosen + rejected)))
    return total / len(rows)


# -------------------------------------------------------------------------------------------------------------- running


def peer_python(version: str, folder: Path) -> str:
    """Python of the environment with this TRL, made where it is absent."""
    path, mark = folder / f"trl_{version}", folder / f"trl_{version}" / "ready"
    if not mark.exists():
        print(f"making the environment of TRL {version} in {path}", file=sys.stderr)
        libraries = ["torch", "transformers", "accelerate", "datasets"]
        pins = (ROOT / "requirements.txt").read_text().split()
        pins = [pin for pin in pins if pin.split("==")[0] in libraries]
        subprocess.run([sys.executable, "-m", "venv", path], check=True)
        pip = [path / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *pins, f"trl=={version}"], check=True)
        mark.touch()
    return str(path / "bin/python")


class Worker:
    """A process of benchmark/speed_worker.py. Raises RuntimeError, with the end of its log, if it stops."""

    def __init__(self, python: str, spec: dict, args: Args, allocator: str, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "spec.json").write_text(json.dumps(spec))
        environment = {name: value for name, value in os.environ.items() if name not in TUNED}
        environment |= {"OMP_NUM_THREADS": str(args.threads), "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "WANDB_MODE": "offline"}
        environment |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        environment["ACCELERATE_MIXED_PRECISION"] = "bf16" if args.precision == "bf16" else "no"
        environment |= TUNED if allocator == "tuned" else {}
        environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""} if args.device == "cpu" else {}
        if args.device == "cuda":  # transformers' Trainer would share a batch out to all GPUs
            environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        self.log = folder / "log.txt"
        command = [python, str(ROOT / "benchmark" / "speed_worker.py"), str(folder / "spec.json")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log.open("w"), "text": True}
        self.process = subprocess.Popen(command, env=environment, cwd=folder, **pipes)
        self.read()

    def read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            tail = self.log.read_text()[-3000:]
            raise RuntimeError(f"{self.log}: the worker stopped (exit status {self.process.wait()}):\n{tail}")
        return json.loads(line)

    def ask(self, command: str) -> dict:
        print(command, file=self.process.stdin, flush=True)
        return self.read()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def make_specs(stage: str, args: Args, workload: dict, models: dict, folder: Path) -> tuple[dict, dict]:
    """What the workers of ours and of the peer are told."""
    common = {"stage": stage, "device": args.device, "root": str(ROOT), "eos": 0, "precision": args.precision}
    sides = [common | {"side": side, "output_dir": str(folder / side / "run")} for side in ("ours", "peer")]
    if stage == "dataset":
        fields = {"sft": workload["raw_sft"], "comparisons": workload["raw_comparisons"], "num_proc": args.threads}
        fields |= {"tokenizer": workload["tokenizer"]}
        return tuple(side | {"args": fields, "model": folder.name.split("-")[1]} for side in sides)
    comparisons, sft = (f"{workload['data']}/{kind}" for kind in ("comparisons", "sft"))
    fields = {"model": models["model"], "sft_model": models["model"], "reward_model": models["reward_model"]}
    fields |= {"dataset": comparisons if stage in ("reward", "dpo") else sft, "sft_dataset": sft, "overwrite": True}
    fields |= {"output_dir": str(folder / "ours" / "run"), "eval_splits": ("validation",), "num_epochs": 1e5}
    fields |= {"batch_size": args.batch_size, "micro_batch_size": args.micro_batch_size, "total_episodes": 10**7}
    rows = {"rows": workload.get(stage), "batch_size": args.batch_size, "micro_batch_size": args.micro_batch_size}
    return sides[0] | {"args": fields}, sides[1] | rows | models


def summarise(stage: str, shape: str, args: Args, allocator: str, reports: dict, limit: float, workload: dict) -> dict:
    """One row of the table, from the reports of both sides' updates."""
    row = {"stage": stage, "model": shape, "precision": args.precision, "allocator": allocator}
    count = args.batch_size
    if stage == "dataset":
        count = 2 * (args.dataset_rows + 4)  # posts and comparisons, each with 4 rows of validation
    for side, updates in reports.items():
        rates = [count / update["seconds"] for update in updates]
        row |= {f"{side}_median": statistics.median(rates), f"{side}_min": min(rates), f"{side}_max": max(rates)}
        row[f"{side}_busy"] = statistics.median(u["cpu_seconds"] / u["seconds"] for u in updates)
        if stage != "dataset":
            row[f"{side}_peak_gib"] = updates[-1]["peak_gib"]
        if stage == "ppo":
            generation, rollout, update = (
                statistics.median(u["phases"][phase] for u in updates) for phase in ("generation", "rollout", "update")
            )
            row |= {f"{side}_generation_s": generation, f"{side}_update_s": update}
            row[f"{side}_scoring_s"] = rollout - generation
            row[f"{side}_response_length"] = statistics.mean(update["response_length"] for update in updates)
    cpu = [statistics.median(update["cpu_seconds"] for update in reports[side]) for side in ("peer", "ours")]
    row |= {"ratio": row["ours_median"] / row["peer_median"], "repetitions": len(reports["ours"])}
    if stage == "dataset":
        return row
    row |= {"ratio_cpu": cpu[0] / cpu[1], "memory_ratio": row["ours_peak_gib"] / row["peer_peak_gib"]}
    rows = json.loads(Path(workload[stage]).read_text())
    for side in reports:  # each samples tokens of its own
        if stage == "ppo":
            parts = ppo_flops(shape, [len(r["input_ids"]) for r in rows], row[f"{side}_response_length"])
            for phase in ("update", "scoring") if side == "ours" else ():
                row[f"ours_{phase}_fraction"] = count * parts[phase] / row[f"ours_{phase}_s"] / limit
        else:
            parts = {"update": stage_flops(stage, shape, rows)}
        row[f"{side}_fraction"] = row[f"{side}_median"] * sum(parts.values()) / limit
        if side == "ours":
            row |= {"gflop": sum(parts.values()) / 1e9, "gflops_limit": limit / 1e9}
    return row


def measure(stage: str, shape: str, allocator: str, args: Args, workload: dict, models: dict) -> dict:
    """Run both sides in turn -> one row of the table."""
    folder = Path(args.folder) / "-".join((stage, shape, args.precision, allocator))
    pythons = {"ours": sys.executable, "peer": sys.executable}
    if stage in PEERS:
        pythons["peer"] = peer_python(args.trl or PEERS[stage], Path(args.folder).parent / "peers")
    reports, limits, workers = {"ours": [], "peer": []}, [], {}
    try:
        specs = dict(zip(reports, make_specs(stage, args, workload, models, folder)))
        # a GPU has no room for both: there, one side makes all its updates, then the other
        for turn in [[side] for side in reports] if args.device == "cuda" else [[*reports]]:
            for side in turn:
                workers[side] = Worker(pythons[side], specs[side], args, allocator, folder / side)
            for repetition in range(args.repetitions + 1):
                if stage != "dataset" and "ours" in turn:
                    limits.append(workers["ours"].ask("matmul")["flops_per_second"])
                for side in turn:
                    report = workers[side].ask("step")
                    line = f"{folder.name} {side} {report['seconds']:.2f} s {report['phases']}"
                    print(line, file=sys.stderr, flush=True)
                    if repetition:  # the first warms up
                        reports[side].append(report)
            for side in turn:
                workers.pop(side).close()
    finally:
        for worker in workers.values():
            worker.close()
    return summarise(stage, shape, args, allocator, reports, np.median(limits) if limits else 0.0, workload)


# --------------------------------------------------------------------------------------------------------------- output


def write_table(rows: list[dict], path: Path) -> list[dict]:
    """Write rows to <path>.csv and .md, where they replace rows of the same stage, model, precision and allocator."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table, file = {}, Path(f"{path}.csv")

    def key(row: dict) -> tuple:
        return tuple(row[name] for name in COLUMNS[:4])

    if file.exists():
        with file.open() as lines:
            table = {key(row): row for row in csv.DictReader(lines)}
    for row in rows:
        values = {name: row.get(name, "") for name in COLUMNS}
        table[key(row)] = {k: f"{v:.4g}" if isinstance(v, float) else str(v) for k, v in values.items()}
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(table.values())
    Path(f"{path}.md").write_text(markdown([*table.values()]))
    return [*table.values()]


def markdown(table: list[dict]) -> str:
    """The table that is read: rates as median (min to max); the CPU ratio is that of processor seconds."""
    titles = "stage|model|precision|allocator|ours, rows/s|peer, rows/s|ratio|CPU ratio|ours s: gen., scoring, update"
    titles += "|peer s: gen., scoring, update|ours GiB|peer GiB|memory ratio|ours of limit|peer of limit"
    lines = [f"| {titles.replace('|', ' | ')} |", "|" + " --- |" * len(titles.split("|"))]

    def number(text: str) -> str:
        return f"{float(text):.3g}" if text else ""

    def rate(row: dict, side: str) -> str:
        return "{} ({} to {})".format(*(number(row[f"{side}_{name}"]) for name in ("median", "min", "max")))

    def phases(row: dict, side: str) -> str:
        seconds = [number(row[f"{side}_{name}_s"]) for name in ("generation", "scoring", "update")]
        return ", ".join(filter(None, seconds))

    for row in table:
        cells = [row[name] for name in COLUMNS[:4]] + [rate(row, "ours"), rate(row, "peer")]
        cells += [number(row["ratio"]), number(row["ratio_cpu"]), phases(row, "ours"), phases(row, "peer")]
        cells += [number(row[name]) for name in ("ours_peak_gib", "peer_peak_gib", "memory_ratio")]
        cells += [f"{float(share):.0%}" if (share := row[f"{side}_fraction"]) else "" for side in ("ours", "peer")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def plan(args: Args) -> list[tuple[str, str, str]]:
    """Rows of the table: (stage, model, allocator)."""
    rows = []
    for stage in args.stages:
        if stage == "dataset":
            # how often the peer tokenises a text: once for each column of tokens, or for those of lengths as well
            rows += [(stage, peer, "plain") for peer in ("tokens", "lengths, too")]
            continue
        allocators = args.allocators if args.device == "cpu" else ("plain",)
        models = args.models[:1] if args.quick and stage != "ppo" else args.models
        rows += [(stage, model, allocator) for model in models for allocator in allocators]
    return rows


def main(args: Args) -> list[dict]:
    """Measure, write and print the table."""
    known = {"stages": (*PEERS, "dataset"), "models": sorted(SHAPES), "allocators": ("plain", "tuned")}
    known |= {"precision": ("fp32", "bf16"), "device": ("cpu", "cuda")}
    for name, values in known.items():
        found = getattr(args, name)
        found = [found] if isinstance(found, str) else found
        if not found or (unknown := sorted({*found} - {*values})):
            raise ValueError(f"--{name}: expected some of {list(values)}, found {unknown[0] if found else 'none'!r}")
    for name in ("batch_size", "micro_batch_size", "repetitions", "threads", "dataset_rows"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name}: expected 1 or more, found {getattr(args, name)}")
    if args.batch_size % args.micro_batch_size:
        raise ValueError(f"--batch_size: expected a multiple of {args.micro_batch_size}, found {args.batch_size}")
    if args.quick:
        args.repetitions, args.allocators, args.dataset_rows = 2, ("tuned",), min(args.dataset_rows, 1000)
    args.folder, args.data = str(Path(args.folder).resolve()), str(Path(args.data).resolve())  # workers run elsewhere
    args.output = args.output or str(Path(args.folder) / "quick" if args.quick else ROOT / "docs/performance/speed")
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    workload, models, table = make_workload(args), {}, []
    less = replace(args, batch_size=args.micro_batch_size, repetitions=1)
    less_workload = make_workload(replace(less, folder=str(folder / "less"), dataset_rows=4)) if args.quick else {}
    (folder / "workload.json").write_text(json.dumps({"args": asdict(args), **workload}, indent=2))
    for stage, shape, allocator in plan(args):
        if shape in SHAPES and shape not in models:
            models[shape] = make_models(shape, folder, workload["tokenizer"])
        settings = (less, less_workload) if args.quick and stage == "ppo" else (args, workload)
        try:
            table.append(measure(stage, shape, allocator, *settings, models.get(shape, {})))
        except RuntimeError as error:  # out of memory, for one: the other rows are still worth having
            print(f"{stage} {shape} {allocator}: not measured: {error}", file=sys.stderr, flush=True)
            continue
        write_table(table, Path(args.output))
    if not table:
        raise SystemExit("nothing was measured; the reasons stand above")
    print(markdown([{name: row.get(name, "") for name in COLUMNS} for row in table]))
    return table


if __name__ == "__main__":
    main(tyro.cli(Args))
