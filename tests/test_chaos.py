"""Training scripts as real processes that are killed, or told to stop, and started again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ENVIRONMENT, ROOT, read_events

sys.path.insert(0, str(ROOT / "benchmark"))
import chaos  # noqa: E402


@pytest.fixture(scope="session")
def arena(tmp_path_factory) -> Path:
    """chaos.py's world and the models that its runs start from."""
    folder = tmp_path_factory.mktemp("chaos")
    chaos.prepare(folder)
    return folder


def test_a_folder_of_others_is_not_deleted(tmp_path):
    (tmp_path / "sft_44413").mkdir()
    with pytest.raises(FileExistsError, match="--folder .*expected a new or empty folder"):
        chaos.prepare(tmp_path)
    assert (tmp_path / "sft_44413").exists()


@pytest.mark.parametrize("fields", [{"scripts": ("judge",)}, {"updates": 0}, {"processes": 3}])
def test_arguments_out_of_range_are_refused(tmp_path, fields):
    with pytest.raises(ValueError, match=f"--{[*fields][0]}: expected"):
        chaos.main(chaos.Args(folder=tmp_path / "new", **fields))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("script", chaos.SCRIPTS)
def test_killed_runs_end_bit_for_bit_as_the_unbroken_one(arena, script):
    row = chaos.torment(script, chaos.Args(kills=2, updates=6, folder=arena))
    assert (row["kills"], row["differences"], row["lost checkpoints"]) == (2, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("script", chaos.SCRIPTS)
def test_killed_runs_of_two_processes_end_as_the_unbroken_one(arena, script):
    row = chaos.torment(script, chaos.Args(kills=2, updates=6, processes=2, folder=arena))
    assert (row["kills"], row["differences"], row["lost checkpoints"]) == (2, 0, 0)


def start(arena: Path, script: str, output: Path, *more: str, updates: int = 40, processes: int = 1):
    command = [*chaos.command_of(script, arena, output, updates, processes), *more]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(torchrun if processes > 1 else []), *command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, **pipes)


def wait_for(path: Path, process) -> None:
    while not path.exists():
        assert process.poll() is None, process.stdout.read()[-3000:]
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("script", "processes", "number"),
    [("sft", 1, signal.SIGTERM), ("ppo", 2, signal.SIGINT), ("reward", 2, signal.SIGTERM)],
)
def test_a_signal_ends_the_run_after_the_step_and_says_how_to_go_on(arena, tmp_path, script, processes, number):
    output = tmp_path / "run"
    process = start(arena, script, output, "--save_every", "3", processes=processes)
    wait_for(output / "checkpoints" / "00000003", process)
    process.send_signal(number)
    text = process.communicate(timeout=120)[0]
    assert process.returncode != 0 and "goes on from there" in text
    newest = max((output / "checkpoints").glob("*"))  # in PPO most likely in the middle of an update
    saved = int(newest.name[:8])
    assert chaos.is_whole(newest) and not list(output.glob("checkpoints/*.tmp"))
    assert not json.loads((output / "run.json").read_text())["finished"]
    steps = [step for step, _ in read_events(output)["train/lr"]]
    assert steps == [16 * (u + 1) for u in range(saved)]  # all that was saved was logged, and nothing after it


@pytest.mark.slow
def test_two_ranks_go_on_in_the_middle_of_a_ppo_update(arena, tmp_path):
    """Signals until one has ended an update between its optimiser steps; then the run ends as the unbroken one."""
    whole, broken, stopped = tmp_path / "whole", tmp_path / "broken", []
    for output in (whole, broken):
        while not stopped or "_" not in stopped[-1] if output == broken else False:
            process = start(arena, "ppo", output, updates=12, processes=2)
            wait_for(output / f"checkpoints/{int(stopped[-1][:8]) + 2 if stopped else 2:08d}", process)
            process.send_signal(signal.SIGTERM)
            assert "goes on from there" in process.communicate(timeout=120)[0]
            stopped.append(max(path.name for path in (output / "checkpoints").glob("*")))
        process = start(arena, "ppo", output, updates=12, processes=2)
        text = process.communicate(timeout=300)[0]
        assert process.returncode == 0, text[-3000:]
    assert chaos.results_of(broken) == chaos.results_of(whole)


@pytest.mark.parametrize("updates, rank", [(400, "0"), (8, "1")])
def test_a_signal_to_one_rank_waits_for_a_save_that_takes_long(arena, tmp_path, updates, rank):
    """torchrun ends the first rank, with a second signal, as soon as another has gone: that one must not go before.
    Of 8 updates, the signal comes during the last save, after which both would evaluate."""
    output = tmp_path / "run"
    hold = (
        "import time, sft, tyro\n"
        "real = sft.checksums\n"
        "def slow(folder, *pattern):\n    time.sleep(4 * (folder.suffix == '.tmp')); return real(folder, *pattern)\n"
        "sft.checksums = slow\n"
        "sft.main(tyro.cli(sft.Args))\n"
    )
    (tmp_path / "slow_sft.py").write_text(hold)
    arguments = chaos.command_of("sft", arena, output, updates, 2)[1:]
    arguments += ["--save_every", "0", "--keep_checkpoints", "1"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
    process = subprocess.Popen([*command, str(tmp_path / "slow_sft.py"), *arguments], **pipes)
    last = output / f"checkpoints/{updates:08d}.tmp"
    while not (last.exists() or updates == 400 and (output / "runs").exists() and read_events(output).get("train/lr")):
        assert process.poll() is None, process.stdout.read()[-3000:]
        time.sleep(0.2)
    ranks = [child for child in psutil.Process(process.pid).children() if "slow_sft.py" in " ".join(child.cmdline())]
    next(child for child in ranks if child.environ()["RANK"] == rank).send_signal(signal.SIGTERM)
    text = process.communicate(timeout=120)[0]
    assert "goes on from there" in text and "gather_object" not in text and process.returncode
    assert [chaos.is_whole(path) for path in (output / "checkpoints").iterdir()] == [True]


def test_a_second_signal_ends_the_run_at_once(arena, tmp_path):
    """The first one comes in a save that is held up, so the run cannot reach the end of its update."""
    hold = (
        "import sys, time, sft, tyro\n"
        "real = sft.checksums\n"
        "def slow(folder, *pattern):\n"
        "    if folder.suffix == '.tmp':\n        print('holding', flush=True); time.sleep(60)\n"
        "    return real(folder, *pattern)\n"
        "sft.checksums = slow\n"
        "sft.main(tyro.cli(sft.Args))\n"
    )
    command = [sys.executable, "-c", hold, *chaos.command_of("sft", arena, tmp_path / "run", 6, 1)[1:]]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    while "holding" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 128 + signal.SIGTERM
    assert not (tmp_path / "run/checkpoints/00000001").exists()


def test_another_number_of_processes_is_refused(arena, tmp_path):
    process = start(arena, "sft", tmp_path / "run", updates=100)
    wait_for(tmp_path / "run/checkpoints/00000002", process)
    process.kill()
    process.communicate()
    more = ["--micro_batch_size", "8"]  # as one process has it
    process = start(arena, "sft", tmp_path / "run", *more, updates=100, processes=2)
    assert "processes 1, now 2" in process.communicate(timeout=120)[0] and process.returncode
