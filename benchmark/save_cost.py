"""What a checkpoint costs: seconds of a save against seconds of training, and against a bare write of the same bytes.

    python benchmark/save_cost.py --folder benchmark/out --seed 44413

Runs sft.py and ppo.py with the quickstart's models and settings, in one process in place of two, saving every 10
updates, and prints one table.
"""

import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import tyro
from accelerate.state import AcceleratorState, GradientState, PartialState

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from report import read_runs  # noqa: E402

import ppo  # noqa: E402
import sft  # noqa: E402


@dataclass
class Args:
    folder: Path = Path("benchmark/out")
    """Folder that quickstart.sh wrote."""
    seed: int = 44413
    """Seed of the run whose models are used."""
    updates: int = 20
    """Updates of each run."""
    save_every: int = 10
    """Updates between checkpoints."""


def timed_run(script, fields: dict, output: Path) -> dict:
    """Run a script's main -> seconds in saves that wrote something, seconds of training, bytes of a checkpoint."""
    real, times, saves = script.Checkpoints.save, [], []

    def save(checkpoints, update: int, num_updates: int, inside: tuple = ()) -> None:
        start = time.time()
        real(checkpoints, update, num_updates, inside)
        if inside:  # between the optimiser steps of an update
            return
        times.append(time.time())
        if update % checkpoints.args.save_every == 0:
            saves.append(time.time() - start)

    script.Checkpoints.save = save
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    script.main(script.Args(**fields, output_dir=str(output), overwrite=True))
    script.Checkpoints.save = real
    newest = max((output / "checkpoints").glob("*[0-9]"))
    return {"saves": saves, "updates": [b - a for a, b in zip(times, times[1:])], "folder": newest}


def bare_write(folder: Path, target: Path) -> tuple[float, int]:
    """Seconds to write the bytes of a folder into one file and flush it -> (seconds, bytes)."""
    content = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    start = time.time()
    with target.open("wb") as file:
        file.write(content)
        os.fsync(file.fileno())
    return time.time() - start, len(content)


def main(args: Args) -> None:
    if args.save_every < 1:
        raise ValueError(f"--save_every: expected 1 or more, found {args.save_every}")
    if args.updates < max(2, args.save_every):
        raise ValueError(f"--updates: expected at least 2, and --save_every {args.save_every}; found {args.updates}")
    read_runs(args.folder, args.seed, ("sft", "reward"))  # refuses what is missing or out of date
    folder, scratch = args.folder, args.folder / "save_cost"
    common = {"seed": args.seed, "save_every": args.save_every, "response_length": 48, "eval_rows": 4}
    posts, sft_model = str(folder / "data_sft/sft"), str(folder / f"sft_{args.seed}")
    one = common | {"model": str(folder / "base"), "dataset": posts, "batch_size": 32, "micro_batch_size": 32}
    two = common | {"sft_model": sft_model, "reward_model": str(folder / f"reward_{args.seed}"), "dataset": posts}
    two |= {"batch_size": 64, "micro_batch_size": 16, "num_ppo_epochs": 1, "num_minibatches": 4, "lr": 1e-4}
    two |= {"total_episodes": 64 * args.updates}
    rows = []
    for name, script, fields in (("sft.py", sft, one | {"max_updates": args.updates}), ("ppo.py", ppo, two)):
        run = timed_run(script, fields, scratch / name)
        plain, size = bare_write(run["folder"], scratch / "bare")
        save, update = median(run["saves"]), median(run["updates"])
        share = save / (save + args.save_every * update)
        rows.append([name, size / 2**20, save, plain, update, f"{100 * share:.1f}%"])
    lines = ["| script | checkpoint, MiB | save, s | bare write, s | update, s | share of time |"]
    lines.append("|" + " --- |" * 6)
    for row in rows:
        lines.append("| " + " | ".join(f"{x:.3f}" if isinstance(x, float) else x for x in row) + " |")
    print("\n".join(lines))
    (folder / "save_cost.md").write_text("\n".join(lines) + "\n")
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main(tyro.cli(Args))
