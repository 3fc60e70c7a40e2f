"""Kill training runs again and again, and compare what they end with to a run that nobody touched.

    python benchmark/chaos.py --kills 5                     every script, five kills each
    python benchmark/chaos.py --scripts ppo --kills 20
    python benchmark/chaos.py --processes 2 --scripts sft   under torchrun, two ranks

Every script runs as a real process on a tiny embedded world, saving at each update. It is killed with SIGKILL at random
moments after it has claimed its folder (a third of them in the middle of a save), and started again by the same
command. A run that ends before its kills are used up is followed by another one. At the end of each run its weights,
samples and final metrics must be those of the unbroken run, bit for bit, and its curves must hold every point once,
with the same value; after each kill all checkpoints must be whole, and the newest that was complete may not be gone.
Prints a table and a line per script that ends with "identical", and writes <folder>/chaos.md; the exit status is 1 if
anything differs.
"""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import tyro
from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[1]
SCRIPTS = ("sft", "reward", "dpo", "ilql", "ppo")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "false"}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONUNBUFFERED": "1"}


@dataclass
class Args:
    kills: int = 5
    """Kills of each script."""
    scripts: tuple[str, ...] = SCRIPTS
    """Scripts to kill."""
    processes: int = 1
    """Ranks of each run (more than one: under torchrun)."""
    updates: int = 12
    """Updates of a run."""
    seed: int = 0
    """Seed of the moments of the kills."""
    folder: Path = Path("benchmark/out/chaos")
    """Folder for the world, the runs and the table: a new one, or one of an earlier call."""


def run(command: list) -> None:
    """Run a command to its end. Raises RuntimeError with the end of its output if it fails."""
    done = subprocess.run(list(map(str, command)), env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def prepare(folder: Path) -> None:
    """World, datasets, and the models that the stages start from; what is there is not made again.
    Raises FileExistsError for a folder with files of others, since an unfinished one of ours is deleted."""
    if (folder / "ready").exists():
        return
    if folder.exists() and any(folder.iterdir()) and not (folder / "chaos").exists():
        raise FileExistsError(f"--folder {folder}: expected a new or empty folder, or one of chaos.py, found others")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "chaos").touch()
    world, data = folder / "world", folder / "data"
    rows = ["--pretrain_rows", 8, "--sft_rows", 200, "--comparison_rows", 200, "--eval_rows", 8]
    run([sys.executable, ROOT / "benchmark/synthetic.py", "--output_dir", world, "--size", "tiny", *rows])
    inputs = ["--sft", world / "sft", "--comparisons", world / "comparisons", "--tokenizer", world / "tokenizer"]
    run([sys.executable, ROOT / "tldr_dataset.py", *inputs, "--max_query_length", 144, "--output_dir", data])
    for script in ("sft", "reward"):
        run([sys.executable, *command_of(script, folder, folder / f"first_{script}", 2, 1)])
    (folder / "ready").touch()


def command_of(script: str, folder: Path, output: Path, updates: int, processes: int) -> list[str]:
    """Arguments of a short run that saves at every update."""
    posts, pairs = folder / "data/sft", folder / "data/comparisons"
    sft, reward = ("--sft_model", folder / "first_sft"), ("--reward_model", folder / "first_reward")
    offline = [*sft, "--dataset", pairs, "--sft_dataset", posts]
    inputs = {
        "sft": ["--model", folder / "world/init", "--dataset", posts, "--response_length", 16],
        "reward": [*offline, "--normalisation_rows", 16],
        "dpo": [*offline, "--response_length", 16],
        "ilql": [*offline, "--init", "sft", "--response_length", 16, "--eval_betas", 0, 2],
        "ppo": [*sft, *reward, "--dataset", posts, "--response_length", 16, "--total_episodes", 16 * updates],
    }[script]
    inputs += [] if script == "ppo" else ["--max_updates", updates]
    common = ["--batch_size", 16, "--micro_batch_size", 16 // (2 * processes), "--lr", 1e-3, "--eval_rows", 8]
    common += ["--save_every", 1, "--output_dir", output]
    return list(map(str, [ROOT / f"{script}.py", *inputs, *common]))


def start(command: list[str], processes: int, log: Path) -> subprocess.Popen:
    """Start the run, its output appended to `log`."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    launcher = [sys.executable] + (torchrun if processes > 1 else [])
    with log.open("a") as opened:
        output = {"stdout": opened, "stderr": subprocess.STDOUT}
        return subprocess.Popen(launcher + command, env=os.environ | ENVIRONMENT, **output)


def checkpoints_of(output: Path) -> list[int]:
    """Updates of the complete checkpoints in a run's folder."""
    return sorted(int(path.name[:8]) for path in (output / "checkpoints").glob("*[0-9]"))


def is_whole(path: Path) -> bool:
    """Whether the files of a checkpoint have the checksums that were written with them."""
    sums = json.loads((path / "sha256.json").read_text())
    return all(hashlib.sha256((path / name).read_bytes()).hexdigest() == value for name, value in sums.items())


def run_and_kill(command: list[str], processes: int, log: Path, output: Path, rng: random.Random) -> tuple[str, int]:
    """Start the run, wait for a random moment of it, and kill it -> "in a save", "between saves", or "too late", and
    the newest checkpoint that was complete right before."""
    path, unfinished = output / "run.json", list((output / "checkpoints").glob("*.tmp"))
    claimed = path.stat().st_mtime_ns if path.exists() else 0
    newest = max(checkpoints_of(output), default=0)
    target, in_save, delay = newest + rng.choice([0, 0, 1, 2, 3]), rng.random() < 1 / 3, rng.uniform(0, 0.3)
    process = start(command, processes, log)

    def wait_until(condition, seconds: float = 0.002) -> None:
        while process.poll() is None and not condition():
            time.sleep(seconds)

    # a run claims its folder by writing run.json anew, then deletes what the kill before left unfinished
    wait_until(lambda: path.exists() and path.stat().st_mtime_ns != claimed)
    wait_until(lambda: not any(left.exists() for left in unfinished))
    wait_until(lambda: max(checkpoints_of(output), default=0) >= target)
    if in_save:
        wait_until(lambda: list((output / "checkpoints").glob("*.tmp")), 0.0005)
    else:
        time.sleep(delay)
    newest, saving = max(checkpoints_of(output), default=0), bool(list((output / "checkpoints").glob("*.tmp")))
    if process.poll():
        raise RuntimeError(f"a run failed; see {log}")
    if process.poll() is not None or json.loads(path.read_text())["finished"]:
        process.wait()
        return "too late", newest
    for each in (process, *psutil.Process(process.pid).children(recursive=True)):  # torchrun's ranks are not its group
        each.kill()
    process.wait()
    return "in a save" if saving else "between saves", newest


def content_hash(path: Path) -> str:
    """SHA-256 of a file's bytes, or of its tensors (safetensors writes the entries of its metadata in any order)."""
    if path.suffix != ".safetensors":
        return hashlib.sha256(path.read_bytes()).hexdigest()
    tensors = sorted(load_file(path).items())
    return hashlib.sha256(b"".join(name.encode() + tensor.tobytes() for name, tensor in tensors)).hexdigest()


def results_of(output: Path) -> dict:
    """What a run ends with: the bytes of weights and samples, the metrics, and every point of its curves."""
    files = [path for kind in ("*.safetensors", "*.jsonl", "*.csv", "probes.json") for path in output.rglob(kind)]
    files = [path for path in files if "checkpoints" not in path.parts]
    results = {str(file.relative_to(output)): content_hash(file) for file in sorted(files)}
    results["metrics"] = json.loads((output / "run.json").read_text())["metrics"]
    for folder in {path.parent for path in (output / "runs").rglob("events.out*")}:
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        for name in events.Tags()["scalars"]:
            points = [(event.step, event.value) for event in events.Scalars(name)]
            results[f"curve {name}"] = [step for step, _ in points] if name.startswith("perf/") else points
    return results


def torment(script: str, args: Args) -> dict:
    """An unbroken run, then runs that are killed until the kills are used up -> a row of the table."""
    folder, rng = args.folder.resolve(), random.Random(f"{args.seed}/{script}")
    runs = folder / f"{script}_{args.processes}"
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir(parents=True)

    def complete(output: Path) -> None:
        process = start(command_of(script, folder, output, args.updates, args.processes), args.processes, log)
        if process.wait():
            raise RuntimeError(f"{script} failed; see {log}")

    log, began = runs / "log.txt", time.time()
    complete(runs / "unbroken")
    expected = results_of(runs / "unbroken")
    row = {"script": script, "processes": args.processes, "runs": 0, "kills": 0, "in a save": 0}
    row |= {"differences": 0, "lost checkpoints": 0}
    while row["kills"] < args.kills:
        row["runs"] += 1
        output, ended = runs / f"killed_{row['runs']}", False
        while row["kills"] < args.kills and not ended:
            command = command_of(script, folder, output, args.updates, args.processes)
            moment, before = run_and_kill(command, args.processes, log, output, rng)
            ended = moment == "too late"
            row["kills"] += not ended
            row["in a save"] += moment == "in a save"
            left = checkpoints_of(output)
            is_lost = max(left, default=0) < before or not all(is_whole(output / f"checkpoints/{u:08d}") for u in left)
            row["lost checkpoints"] += is_lost
        if not ended:
            complete(output)
        found = results_of(output)
        differing = [name for name in expected | found if expected.get(name) != found.get(name)]
        row["differences"] += len(differing)
        if differing:
            print(f"{script}: {output.name} differs from the unbroken run in {', '.join(differing)}")
    row["seconds"] = round(time.time() - began)
    verdict = "identical" if not row["differences"] + row["lost checkpoints"] else "DIFFERENT"
    print(f"{script}: {row['kills']} kills, {row['in a save']} in a save, {row['runs']} runs: {verdict}", flush=True)
    return row


def main(args: Args) -> None:
    if not args.scripts or set(args.scripts) - set(SCRIPTS):
        raise ValueError(f"--scripts: expected some of {', '.join(SCRIPTS)}, found {', '.join(args.scripts) or 'none'}")
    if args.processes not in (1, 2, 4, 8):
        raise ValueError(f"--processes: expected 1, 2, 4 or 8, since a batch has 16 rows; found {args.processes}")
    for name in ("kills", "updates"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name}: expected 1 or more, found {getattr(args, name)}")
    prepare(args.folder.resolve())
    rows = [torment(script, args) for script in args.scripts]
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + " --- |" * len(rows[0])]
    lines += ["| " + " | ".join(map(str, row.values())) + " |" for row in rows]
    (args.folder / "chaos.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    sys.exit(any(row["differences"] or row["lost checkpoints"] for row in rows))


if __name__ == "__main__":
    main(tyro.cli(Args))
