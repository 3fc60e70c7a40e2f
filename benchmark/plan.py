"""Memory and time of a stage before it is run: what fits, which micro-batch, how many hours.

    python benchmark/plan.py --model pythia-6.9b --gpus 8 --gpu h100 --zero 2 --offload
    python benchmark/plan.py --model pythia-12b --gpus 32 --gpus_per_node 8 --gpu h200 --zero 2 --offload
    python benchmark/plan.py --experiment              the paper's: 3 sizes, 4 seeds, SFT, reward model, DPO, PPO
    python benchmark/plan.py --measure                 run ppo.py on this machine, small, and compare
    python benchmark/plan.py --measure --stage ilql    run ilql.py, for its memory alone
    python benchmark/plan.py --compare docs/performance/speed.csv   the other stages' memory, as speed.py measured it

Memory of a rank is counted tensor by tensor from the model's shape, in parts: weights, gradients, optimiser, and the
largest of what sampling holds (KV cache, and a layer of the queries or logits of a step), what scoring does (a frozen
model that was on the CPU) and what an update does (activations, logits). Time is useful FLOPs over the GPU's peak times
a utilisation, for decoding the bytes read over its bandwidth, and what travels between GPUs, or from the CPU with
--offload; evaluations come on top. Peaks are the makers'; utilisations and the rate from the CPU are assumptions, which
nothing here has measured on a GPU: read hours as such.

`--measure` writes docs/performance/growth.csv and .png: episodes a second and memory, measured and predicted, against
model size, prompt and response length, batch, micro-batch, and processes.
"""

import csv
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
# model: (layers, hidden size, rows of the embedding)
SHAPES = {"70m": (6, 512, 50304), "160m": (12, 768, 50304), "410m": (24, 1024, 50304), "1b": (16, 2048, 50304)}
SHAPES |= {"1.4b": (24, 2048, 50304), "2.8b": (32, 2560, 50304), "6.9b": (32, 4096, 50432), "12b": (36, 5120, 50688)}
SHAPES |= {"d64": (2, 64, 50304), "d128": (4, 128, 50304), "d256": (6, 256, 50304), "d512": (8, 512, 50304)}
# kind: (GiB, peak TFLOP/s, bandwidth TB/s, GB/s of a rank to the others within a node and between nodes)
GPUS = {"a100-40": (40, 312, 1.56, 250, 25), "a100-80": (80, 312, 2.04, 250, 25), "h100": (80, 989, 3.35, 400, 50)}
GPUS |= {"h200": (141, 989, 4.8, 400, 50), "cpu": (16, 0.2, 0.02, 5, 5)}
FILL = 0.92  # of a GPU's memory may be planned with; the rest is for what the count leaves out
FP32_TFLOPS = {"a100-40": 19.5, "a100-80": 19.5, "h100": 67, "h200": 67, "cpu": 0.09}  # the peak above is bf16's
FROM_HOST = 6  # GB/s of a rank, from memory that is not pinned, while the other ranks of its node copy, too: assumed
QUERY, RESPONSE, COMPARISON = 346, 35, 38  # mean tokens of TL;DR: query, sampled or reference summary, compared one
LONGEST = {"sft": 562, "reward": 638, "dpo": 638, "ilql": 512 + 169, "ppo": 512 + 53}
ROWS = {"sft": 116_722, "reward": 92_858, "dpo": 92_858, "ilql": 92_858, "ppo": 1_000_000}
BATCH = {"sft": 128, "reward": 64, "dpo": 64, "ilql": 64, "ppo": 512}


@dataclass
class Args:
    model: str = "pythia-1b"
    """Model: pythia-{70m,160m,410m,1b,1.4b,2.8b,6.9b,12b}, or d64, d128, d256, d512 of the speed benchmark."""
    stage: str = "ppo"
    """sft, reward, dpo, ilql or ppo."""
    gpus: int = 8
    """Number of GPUs."""
    gpu: str = "h100"
    """Kind: a100-40, a100-80, h100, h200, cpu."""
    gpus_per_node: int = 8
    """GPUs that share a node; between nodes gradients travel slower."""
    zero: int = 0
    """0: DDP, weights in fp32, under autocast if bf16. 2, 3: DeepSpeed ZeRO, weights in --precision (ours take 2)."""
    offload: bool = False
    """Frozen models wait on the CPU while they are not in use."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    precision: str = "bf16"
    """bf16, or fp32 without autocast."""
    batch_size: int = 0
    """Rows of an update (0: the paper's)."""
    micro_batch_size: int = 0
    """Rows of a forward pass (0: the largest that fits)."""
    longest: int = 0
    """Tokens of the longest sequence (0: the paper's)."""
    longest_summary: int = 169
    """Tokens of the longest summary of a comparison."""
    response_length: int = 53
    """Longest summary that is sampled."""
    utilisation: float = 0.45
    """Useful part of the GPU's peak in forward and backward passes. An assumption."""
    decode_utilisation: float = 0.5
    """Useful part of the GPU's bandwidth while sampling. An assumption."""
    experiment: bool = False
    """The whole experiment of the paper: 1b, 2.8b, 6.9b, four seeds: SFT, reward model, DPO, PPO."""
    measure: bool = False
    """Measure growth on this machine and compare the memory with the prediction."""
    compare: str = ""
    """Table of speed.py (docs/performance/speed.csv), whose memory of SFT, reward model and DPO is compared instead."""
    memory_only: bool = False
    """Leave the rates out of the results of --measure, which mean nothing on a machine that is shared."""
    folder: str = str(ROOT / "benchmark" / "out" / "plan")
    """Folder for the runs of --measure."""
    output: str = str(ROOT / "docs" / "performance")
    """Folder for the results of --measure."""


def shape_of(model: str) -> tuple[int, int, int]:
    """(layers, hidden size, vocabulary). Raises ValueError for an unknown model."""
    name = model.removeprefix("pythia-")
    if name not in SHAPES:
        raise ValueError(f"--model: expected pythia- and one of {list(SHAPES)}, found {model!r}")
    return SHAPES[name]


def count_parameters(model: str, head: bool = True) -> int:
    """Parameters of a GPT-NeoX: embedding, layers (12 D^2 + 13 D), final norm, and the language-model head if asked."""
    layers, hidden, vocabulary = shape_of(model)
    body = layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden
    return vocabulary * hidden * (1 + head) + body


def count_trained(args: Args) -> int:
    """Parameters that the optimiser of a stage steps."""
    hidden = shape_of(args.model)[1]
    policy, scorer = count_parameters(args.model), count_parameters(args.model, head=False) + hidden
    heads = 2 * count_q_head(args.model) + hidden * (2 * hidden + 4) + 1  # Q1, Q2 and V
    return {"sft": policy, "reward": scorer, "dpo": policy, "ilql": policy + heads, "ppo": policy + scorer}[args.stage]


def count_q_head(model: str) -> int:
    """Parameters of one of ILQL's Q heads, D -> 2D -> V."""
    _, hidden, vocabulary = shape_of(model)
    return 2 * hidden * (hidden + 1 + vocabulary) + vocabulary


def memory(args: Args, micro: int) -> dict:
    """Bytes of one rank by part; `peak` is their sum."""
    (layers, hidden, vocabulary), ranks = shape_of(args.model), args.gpus
    policy, trained = count_parameters(args.model), count_trained(args)
    frozen = trained if args.stage == "ppo" else 0  # DPO's reference is read from a file
    low = args.precision == "bf16"
    width, cpu = 2 if low else 4, args.gpu == "cpu"
    weight = 2 if args.zero and low else 4  # DeepSpeed keeps bf16 weights, and fp32 copies of a rank's share
    longest, stage = args.longest or LONGEST[args.stage], args.stage
    parts = {"weights": weight * trained / (ranks if args.zero == 3 else 1)}
    parts["frozen models"] = 0 if args.offload else weight * frozen / (ranks if args.zero == 3 else 1)
    visiting = weight * policy if args.offload and frozen else 0  # one of them at a time, while it scores
    if stage == "ilql":
        parts["target heads"] = 4 * 2 * count_q_head(args.model)  # in fp32, whatever the others are in
    if args.zero:
        bucket = min(trained, 5e8)  # gradients on their way to the rank that they belong to: reduce_bucket_size
        parts["gradients"], parts["optimiser"] = weight * (trained / ranks + bucket), 12 * trained / ranks
    else:  # DDP copies gradients into buckets of its own
        parts["gradients"], parts["optimiser"] = 4 * trained * (1 + (ranks > 1)), 8 * trained
    if low and not args.zero:
        at_once = policy if stage == "ppo" else trained  # PPO's policy and value model take turns
        parts["weights cast by autocast"] = 2 * (at_once - vocabulary * hidden)  # no embedding
    pairs = stage in ("reward", "dpo")
    tokens = micro * (longest + args.longest_summary * pairs)  # a pair shares its post
    tokens = 2 * micro * longest if stage == "ilql" else tokens  # but not ILQL's, which are padded
    # kept of a layer: hidden state, both norms, QKV, rotated Q and K, attention and its copy, 4 D before and after GELU
    layer = ((4 * hidden if low else 0) + 18 * hidden * width) * tokens
    layer += 2 * hidden * width * micro * longest * pairs  # keys and values of posts, copied for the second summaries
    kept = layers * 4 * hidden * tokens + layer if args.gradient_checkpointing else layers * layer
    # the backward pass works on one layer at a time, and PPO's on one of its two models
    one_layer = 12 * hidden * width * tokens
    targets = {
        "sft": tokens,
        "reward": 0,
        "dpo": micro * 2 * args.longest_summary,
        "ilql": micro * 2 * args.longest_summary,
        "ppo": micro * args.response_length,
    }[stage]
    logits = (14 if low else 12) * vocabulary * targets  # logits, log-softmax, gradient
    if stage == "ilql":  # those of Q1 and Q2, too, all before the backward pass; and what lies between D and V
        logits = ((26 if low else 24) * vocabulary + 12 * 2 * hidden * width) * targets
    phases = {"update": {"activations": kept + one_layer, "logits": logits}}
    if stage != "reward":
        # 4 micro-batches together in evaluation, 8 in rollouts, if the rank has them; keys and values of each layer
        share = (args.batch_size or BATCH[stage]) // ranks
        sampled = max(4 * micro, min(8 * micro, share)) if stage == "ppo" else 4 * micro
        cache, query = 2 * layers * hidden * width * sampled, longest - args.response_length
        phases["prefill"] = {"KV cache (sampling)": cache * query, "activations": 12 * hidden * width * sampled * query}
        # logits, their softmax and its sum in fp64
        phases["sampling"] = {"KV cache (sampling)": cache * longest, "logits": 28 * vocabulary * sampled}
    if visiting:
        phases["scoring"] = {"frozen models": visiting, "activations": one_layer, "logits": logits}
    parts |= {"activations": 0, "logits": 0, "KV cache (sampling)": 0}
    parts |= max(phases.values(), key=lambda phase: sum(phase.values()))
    parts["libraries"] = (0.62 if cpu else 1.5) * GIB
    return parts | {"peak": sum(parts.values())}


def largest_micro_batch(args: Args) -> int:
    """Largest power of two that divides a rank's rows and whose predicted peak leaves 8% of the GPU free; 0 if none."""
    fitting = [2**i for i in range(9) if memory(args, 2**i)["peak"] < FILL * GPUS[args.gpu][0] * GIB]
    share = (args.batch_size or BATCH[args.stage]) // args.gpus
    return max((micro for micro in fitting if share % micro == 0), default=0)


def flops_per_row(model: str, stage: str) -> dict:
    """Useful FLOPs of an episode, pair or sample by phase, at the mean lengths of TL;DR."""
    layers, hidden, vocabulary = shape_of(model)

    def body(length: float) -> float:
        return layers * (24 * hidden**2 * length + 2 * hidden * length**2)

    summary = COMPARISON if stage in ("reward", "dpo", "ilql") else RESPONSE
    forward, head = body(QUERY + summary), 2 * hidden * vocabulary * summary
    if stage == "sft":
        return {"update": 3 * (forward + head / summary * (QUERY + summary))}
    pair = body(QUERY + 2 * summary)
    if stage == "reward":
        return {"update": 3 * pair}
    if stage == "ilql":  # two whole sequences; heads at the summaries' tokens, of the target heads the first layer
        q_head, v_head = 2 * count_q_head(model), 4 * hidden**2
        return {"update": 3 * 2 * (forward + (2 * q_head + v_head) * summary + head) + 2 * 2 * 4 * hidden**2 * summary}
    if stage == "dpo":
        return {"scoring": pair + 2 * head, "update": 3 * (pair + 2 * head)}
    return {"prefill": body(QUERY), "scoring": 4 * forward + 2 * head, "update": 4 * 3 * (2 * forward + head)}


def seconds_per_update(args: Args, micro: int) -> dict:
    """Seconds of one update by phase, on all ranks."""
    layers, hidden, _ = shape_of(args.model)
    _, tflops, bandwidth, within, between = GPUS[args.gpu]
    tflops = tflops if args.precision == "bf16" else FP32_TFLOPS[args.gpu]
    batch = args.batch_size or BATCH[args.stage]
    rows, seconds = batch / args.gpus, {}
    for phase, flops in flops_per_row(args.model, args.stage).items():
        again = 4 / 3 if args.gradient_checkpointing and phase == "update" else 1
        seconds[phase] = rows * flops * again / (tflops * 1e12 * args.utilisation)
    width = 2 if args.precision == "bf16" else 4
    if args.stage == "ppo":
        passes = -(-rows // (8 * micro)) * args.response_length  # each reads all weights and its rows' keys and values
        cache = 2 * layers * hidden * width * (QUERY + RESPONSE / 2) * rows * args.response_length
        read = passes * width * count_parameters(args.model) + cache
        launches = passes * layers * 20 * (0 if args.gpu == "cpu" else 8e-6)  # kernels of a layer, one after another
        seconds["decoding"] = read / (bandwidth * 1e12 * args.decode_utilisation) + launches
    trained = count_trained(args)
    wire = between if args.gpus > args.gpus_per_node else within
    # DDP reduces fp32 gradients once a step, in two passes; ZeRO those of each micro-batch, and gathers weights
    passes = width * (-(-rows // micro) + 1) if args.zero else 4 * 2
    steps = 4 if args.stage == "ppo" else 1
    seconds["exchange"] = steps * passes * trained / (wire * 1e9) if args.gpus > 1 else 0.0
    if args.stage == "ppo" and args.offload and args.gpu != "cpu":  # two frozen models visit, none is copied back
        seconds["offload"] = 2 * (width if args.zero else 4) * count_parameters(args.model) / (FROM_HOST * 1e9)
    return seconds


def plan(args: Args) -> dict:
    """Micro-batch, memory by part in GiB, seconds of an update by phase, and hours of the stage.
    Raises ValueError for a batch that the scripts could not share out over the GPUs."""
    batch, ranks = args.batch_size or BATCH[args.stage], args.gpus * max(1, args.micro_batch_size)
    if batch % ranks:
        expected = f"a multiple of --gpus (x --micro_batch_size) = {ranks}"
        raise ValueError(f"--batch_size of {args.stage}: expected {expected}, found {batch}")
    micro = args.micro_batch_size or largest_micro_batch(args)
    result = {"model": args.model, "stage": args.stage, "gpus": f"{args.gpus} x {args.gpu}", "micro-batch": micro}
    if not micro:
        parts = memory(args, 1)
        found = {name: round(size / GIB, 1) for name, size in parts.items()}
        return result | {"fits": False, "GiB": found, "seconds": {}, "hours": float("inf")}
    seconds = seconds_per_update(args, micro)
    updates = ROWS[args.stage] / batch
    result |= {"fits": memory(args, micro)["peak"] < FILL * GPUS[args.gpu][0] * GIB}
    result["GiB"] = {name: round(size / GIB, 2) for name, size in memory(args, micro).items()}
    result["seconds"] = {name: round(value, 2) for name, value in seconds.items()}
    return result | {"hours": updates * sum(seconds.values()) / 3600}


def print_plan(result: dict) -> None:
    """A plan as text."""
    flags = "--micro_batch_size, --zero 2, --offload, --gradient_checkpointing, or more GPUs"
    fits = "fits" if result["fits"] else f"does NOT fit: try {flags}"
    print(f"{result['model']} {result['stage']} on {result['gpus']}: {fits}; micro-batch {result['micro-batch']}")
    print("  GiB a rank: " + ", ".join(f"{name} {size:g}" for name, size in result["GiB"].items() if size))
    print("  seconds an update: " + ", ".join(f"{name} {value:g}" for name, value in result["seconds"].items()))
    print(f"  hours of the stage: {result['hours']:.1f}")


def plan_experiment(args: Args) -> list[dict]:
    """The paper's experiment, each size with the lightest setting that fits: table of hours and GPU hours, printed."""
    rows, settings = [], [{"zero": 0}, {"zero": 2}, {"zero": 2, "offload": True}]
    settings += [{"zero": 2, "offload": True, "gradient_checkpointing": True}]
    for size in ("1b", "2.8b", "6.9b"):
        for stage in ("sft", "reward", "dpo", "ppo"):
            tries = [plan(replace(args, model=f"pythia-{size}", stage=stage, **setting)) for setting in settings]
            index = next((i for i, result in enumerate(tries) if result["fits"]), -1)
            rows.append(tries[index] | {"setting": settings[index]})
    print("| model | stage | setting | micro-batch | GiB | hours, 1 seed | GPU hours, 4 seeds |\n" + "| --- " * 7 + "|")
    for row in rows:
        setting = " ".join(f"{name} {value}" for name, value in row["setting"].items())
        cells = [row["model"], row["stage"], setting, row["micro-batch"], row["GiB"]["peak"], f"{row['hours']:.2f}"]
        print("| " + " | ".join(map(str, [*cells, f"{4 * args.gpus * row['hours']:.0f}"])) + " |")
    total = 4 * sum(row["hours"] for row in rows)
    print(f"\n{args.gpus} x {args.gpu}: {total:.0f} hours for all sizes and seeds, {total * args.gpus:.0f} GPU hours")
    return rows


# -------------------------------------------------------------------------------------------------------------- measure

POINTS = [{"model": model} for model in ("d64", "d128", "d256", "d512")]
POINTS += [{"query": query} for query in (128, 256)] + [{"response": response} for response in (27, 106)]
POINTS += [{"batch": 8}, {"batch": 32}, {"processes": 2}, {"micro": 4}, {"micro": 16}]
POINTS += [{"precision": "bf16"}, {"precision": "bf16", "model": "d256"}]
USUAL = {"model": "d128", "query": 512, "response": 53, "batch": 16, "micro": 8, "processes": 1, "precision": "fp32"}


def run_ppo(point: dict, folder: Path) -> dict:
    """Two updates of ppo.py -> episodes a second and seconds of the second one, peak memory."""
    sys.path.insert(0, str(ROOT / "benchmark"))
    import speed
    import torch

    speed.SHAPES |= {"d64": (2, 64, 2), "d512": (8, 512, 8)}
    name = "-".join(map(str, point.values()))
    settings = speed.Args(batch_size=point["batch"], folder=str(folder / name), dataset_rows=4)
    workload = speed.make_workload(settings, max_query_length=point["query"])
    speed.RESPONSE_LENGTH = point["response"]
    models = speed.make_models(point["model"], folder / name, workload["tokenizer"], 35 * point["response"] / 53)
    torch.manual_seed(0)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", point["processes"]]
    command = [*command, "ppo.py"] if point["processes"] > 1 else [sys.executable, "ppo.py"]
    flags = {"sft_model": models["model"], "reward_model": models["reward_model"], "dataset": f"{workload['data']}/sft"}
    flags |= {"output_dir": folder / name / "run", "batch_size": point["batch"], "micro_batch_size": point["micro"]}
    flags |= {"total_episodes": 2 * point["batch"], "response_length": point["response"], "eval_rows": 1}
    command += [str(x) for flag, value in flags.items() for x in (f"--{flag}", value)] + ["--overwrite"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    environment["TOKENIZERS_PARALLELISM"] = "false"
    environment["ACCELERATE_MIXED_PRECISION"] = "bf16" if point["precision"] == "bf16" else "no"
    done = subprocess.run([*map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stderr[-2000:]}")
    logged = EventAccumulator(str(next((folder / name / "run" / "runs").rglob("events.out*")).parent))
    logged.Reload()
    names = ("perf/episodes_per_second", "perf/seconds_rollout", "perf/seconds_update", "perf/peak_memory_gib")
    longest = max(len(row["input_ids"]) for row in json.loads(Path(workload["ppo"]).read_text()))
    return {key.split("/")[1]: logged.Scalars(key)[-1].value for key in names} | {"longest_query": longest}


def measure(args: Args) -> list[dict]:
    """Run every point, write growth.csv and the plot."""
    folder, output, rows = Path(args.folder).resolve(), Path(args.output), []
    output.mkdir(parents=True, exist_ok=True)
    path = output / "growth.csv"
    finished = folder / "done.jsonl"  # points that an earlier call has measured
    done = [json.loads(line) for line in finished.read_text().splitlines()] if finished.exists() else []
    folder.mkdir(parents=True, exist_ok=True)
    for changed in POINTS:
        point = USUAL | changed
        row = next((row for row in done if all(row.get(k, USUAL[k]) == v for k, v in point.items())), None)
        if row is None:
            row = point | run_ppo(point, folder)
            with finished.open("a") as lines:
                lines.write(json.dumps(row) + "\n")
        fields = {"model": point["model"], "gpu": "cpu", "precision": point["precision"], "gpus": point["processes"]}
        fields |= {"longest": row["longest_query"] + point["response"], "response_length": point["response"]}
        fields |= {"batch_size": point["batch"], "stage": "ppo"}
        parts = memory(Args(**fields), min(point["micro"], point["batch"] // point["processes"]))
        row["predicted_gib"] = parts["peak"] / GIB
        row["predicted_over_measured"] = row["predicted_gib"] / row["peak_memory_gib"]
        rates = ("episodes_per_second", "seconds_rollout", "seconds_update") if args.memory_only else ()
        rows.append(point | {name: value for name, value in row.items() if name not in rates})
        print(row, flush=True)
    with path.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, rows[0])
        writer.writeheader()
        writer.writerows({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    plot_growth(rows, output / "growth.png")
    return rows


def measure_ilql(args: Args) -> list[float]:
    """Two updates of ilql.py with each of some shapes and micro-batches; prints its peak memory, and what is predicted
    -> predicted over measured."""
    sys.path.insert(0, str(ROOT / "benchmark"))
    import speed

    folder, ratios = Path(args.folder).resolve() / "ilql", []
    workload = speed.make_workload(speed.Args(folder=str(folder), dataset_rows=4))
    rows = json.loads(Path(workload["dpo"]).read_text())
    longest_summary = max(len(row[f"{side}_ids"]) for row in rows for side in ("chosen", "rejected"))
    longest = max(len(row["prompt_ids"]) for row in rows) + longest_summary
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    print("| model | micro-batch | GiB, measured | GiB, predicted | ratio |\n" + "| --- " * 5 + "|")
    for model, micro in (("d128", 4), ("d128", 8), ("d256", 4), ("d256", 8)):
        path = speed.make_models(model, folder, workload["tokenizer"])["model"]
        flags = {"model": path, "dataset": f"{workload['data']}/comparisons", "sft_dataset": f"{workload['data']}/sft"}
        flags |= {"output_dir": folder / f"{model}_{micro}", "batch_size": 16, "micro_batch_size": micro}
        flags |= {"max_updates": 2, "num_epochs": 2, "eval_rows": 1}
        command = [sys.executable, "ilql.py", *(str(x) for flag in flags.items() for x in (f"--{flag[0]}", flag[1]))]
        done = subprocess.run([*command, "--overwrite"], cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        logged = EventAccumulator(
            str(next((folder / f"{model}_{micro}" / "runs").rglob("events.out*")).parent)
        ).Reload()
        measured = logged.Scalars("perf/peak_memory_gib")[-1].value
        lengths = {"longest": longest, "longest_summary": longest_summary, "precision": "fp32", "batch_size": 16}
        predicted = memory(Args(model=model, stage="ilql", gpus=1, gpu="cpu", **lengths), micro)["peak"] / GIB
        ratios.append(predicted / measured)
        print(f"| {model} | {micro} | {measured:.3g} | {predicted:.3g} | {ratios[-1]:.2f} |", flush=True)
    return ratios


def plot_growth(rows: list[dict], path: Path) -> None:
    """Memory, and episodes a second if they are there, against what was changed, one panel each."""
    from matplotlib.figure import Figure

    series = {name: [row for row in rows if all(row[x] == y for x, y in USUAL.items() if x != name)] for name in USUAL}
    series = {name: kept for name, kept in series.items() if len(kept) > 1}
    rates = "episodes_per_second" in rows[0]
    labels = {
        "model": "parameters of the model",
        "query": "longest query, tokens",
        "response": "longest response, tokens",
    }
    labels |= {"batch": "batch, episodes", "micro": "micro-batch, episodes"}
    figure = Figure(figsize=(3 * len(series), 2.8 * (1 + rates)), layout="constrained")
    panels = figure.subplots(1 + rates, len(series), squeeze=False)
    for column, (name, kept) in enumerate(series.items()):
        kept.sort(key=lambda row: count_parameters(row["model"]) if name == "model" else row[name])
        x = [f"{count_parameters(row['model']) / 1e6:.0f}M" if name == "model" else str(row[name]) for row in kept]
        panels[0, column].plot(x, [row["peak_memory_gib"] for row in kept], "o-", label="measured")
        panels[0, column].plot(x, [row["predicted_gib"] for row in kept], "x--", label="predicted")
        panels[0, column].set(xlabel=labels.get(name, name), ylabel="GiB a process")
        if rates:
            panels[1, column].plot(x, [row["episodes_per_second"] for row in kept], "o-")
            panels[1, column].set(xlabel=labels.get(name, name), ylabel="episodes a second")
    for panel in panels.flat:
        panel.set_ylim(0, 1.1 * max(line.get_ydata().max() for line in panel.lines))
    panels[0, 0].legend()
    figure.savefig(path, dpi=100)


def compare(path: str) -> list[float]:
    """Print the memory of SFT, reward model and DPO that speed.py measured with the plain allocator, and what is
    predicted for its 16 posts and micro-batches of 8 -> predicted over measured."""
    longest, ratios = {"sft": 539, "reward": 545, "dpo": 545}, []  # tokens, of those posts with their summaries
    print("| stage | model | GiB, measured | GiB, predicted | ratio |\n" + "| --- " * 5 + "|")
    for row in csv.DictReader(Path(path).read_text().splitlines()):
        if row["stage"] in longest and (row["precision"], row["allocator"]) == ("fp32", "plain"):
            lengths = {"longest": longest[row["stage"]], "longest_summary": 49}
            settings = {"gpus": 1, "gpu": "cpu", "precision": "fp32", "batch_size": 16} | lengths
            predicted = memory(Args(model=row["model"], stage=row["stage"], **settings), 8)["peak"] / GIB
            ratios.append(predicted / float(row["ours_peak_gib"]))
            print(f"| {row['stage']} | {row['model']} | {row['ours_peak_gib']} | {predicted:.3g} | {ratios[-1]:.2f} |")
    return ratios


def main(args: Args):
    """Print the plan, or the experiment's, or measure."""
    known = {"gpu": GPUS, "stage": ROWS, "zero": (0, 2, 3), "precision": ("bf16", "fp32")}
    for name, values in known.items():
        if (found := getattr(args, name)) not in values:
            raise ValueError(f"--{name}: expected one of {list(values)}, found {found!r}")
    positive = ("gpus", "gpus_per_node", "response_length", "utilisation", "decode_utilisation")
    for name in (*positive, "batch_size", "micro_batch_size", "longest", "longest_summary"):
        if (found := getattr(args, name)) < 0 or (name in positive and not found):
            raise ValueError(f"--{name}: expected {'more than 0' if name in positive else '0 or more'}, found {found}")
    if args.longest and args.longest <= args.response_length:
        raise ValueError(
            f"--longest: expected more than --response_length {args.response_length}, found {args.longest}"
        )
    if args.measure:
        return measure_ilql(args) if args.stage == "ilql" else measure(args)
    if args.compare:
        return compare(args.compare)
    if args.experiment:
        return plan_experiment(args)
    print_plan(result := plan(args))
    return result


if __name__ == "__main__":
    main(tyro.cli(Args))
