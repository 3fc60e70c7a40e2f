"""Runs that stop in the middle, are damaged, or are started again with other arguments."""

import errno
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from conftest import ROOT, read_events
from safetensors.torch import load_file, save_file

import ilql
import ppo
import reward
import sft

sys.path.insert(0, str(ROOT / "benchmark"))
import chaos  # noqa: E402
import report  # noqa: E402


@pytest.fixture
def signal_in_step(monkeypatch):
    """Function signal_in_step(n): the n-th optimiser step of ppo.py, counted from now, meets a SIGTERM."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    real = ppo.step

    def prepare(n: int) -> None:
        calls = []

        def step(*inputs):
            calls.append(None)
            if len(calls) == n:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(*inputs)

        monkeypatch.setattr(ppo, "step", step)

    yield prepare
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_signal_between_the_steps_of_a_ppo_update_changes_nothing(chain, run_ppo, tmp_path, signal_in_step, capsys):
    """3 updates of 4 steps; a signal in the third step of the second update, and one in the last step of that."""
    fields = {"sft_model": chain.sft, "reward_model": chain.reward, "num_minibatches": 2, "num_ppo_epochs": 2}
    run_ppo(output_dir=tmp_path / "whole", **fields)
    signal_in_step(4 + 3)
    with pytest.raises(
        SystemExit, match=r"0001_0003 is saved; the same command, without --overwrite or --no-resume, goes on"
    ):
        run_ppo(output_dir=tmp_path / "run", overwrite=True, resume=False, **fields)
    assert chaos.is_whole(tmp_path / "run/checkpoints/00000001_0003")
    signal_in_step(1)
    with pytest.raises(SystemExit, match="00000001_0004 is saved; the same command, .* goes on from there"):
        run_ppo(output_dir=tmp_path / "run", **fields)
    signal_in_step(0)
    run_ppo(output_dir=tmp_path / "run", **fields)
    assert_same_results(tmp_path / "run", tmp_path / "whole")
    names = ("policy/loss", "objective/score", "train/grad_norm")
    curves = [[read_events(tmp_path / run)[name] for name in names] for run in ("run", "whole")]
    assert curves[0] == curves[1] and [len(curve) for curve in curves[0]] == [3, 3, 3]


# ------------------------------------------------------------------------------------------------- damaged checkpoints


class Killed(Exception):
    pass


@pytest.fixture
def die_after(monkeypatch):
    """Function die_after(script, update): its runs die right after that update's save; 0 lets them live."""

    def prepare(script, update: int) -> None:
        monkeypatch.undo()
        real = script.Checkpoints.save

        def save(checkpoints, done, num_updates, inside=()):
            real(checkpoints, done, num_updates, inside)
            if done == update and not inside:
                raise Killed

        monkeypatch.setattr(script.Checkpoints, "save", save)

    return prepare


def assert_same_results(first: Path, second: Path) -> None:
    """Weights, samples and metrics, bit for bit (chaos.py compares curves too: here both runs log in one second)."""
    results = [chaos.results_of(folder) for folder in (first, second)]
    first_results, second_results = ({k: v for k, v in r.items() if not k.startswith("curve")} for r in results)
    assert first_results == second_results and "model.safetensors" in first_results


def flip_byte(checkpoint: Path) -> None:
    file = checkpoint / "optimizer.bin"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def lose_file(checkpoint: Path) -> None:
    (checkpoint / "random_states_0.pkl").unlink()


def leave_unfinished(checkpoint: Path) -> None:
    checkpoint.rename(f"{checkpoint}.tmp")


def spoil_checksums(checkpoint: Path) -> None:
    (checkpoint / "sha256.json").write_bytes(b"\xff{")


def test_the_reports_curves_hold_both_parts_of_a_run(run_sft, tmp_path, die_after):
    die_after(sft, 4)
    with pytest.raises(Killed):
        run_sft(tmp_path / "run", num_epochs=2.0, save_every=2)
    die_after(sft, 0)
    run_sft(tmp_path / "run", num_epochs=2.0, save_every=2)
    curve = report.read_curves(tmp_path / "run")["train/loss"]
    assert curve.index.tolist() == [step for step, _ in read_events(tmp_path / "run")["train/loss"]] and len(curve) == 7


@pytest.mark.parametrize("damage", [flip_byte, lose_file, leave_unfinished, spoil_checksums])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(run_sft, tmp_path, die_after, damage, capfd):
    run_sft(tmp_path / "whole", num_epochs=2.0, save_every=2)
    die_after(sft, 4)
    with pytest.raises(Killed):
        run_sft(tmp_path / "run", num_epochs=2.0, save_every=2)
    damage(tmp_path / "run/checkpoints/00000004")
    die_after(sft, 0)
    capfd.readouterr()
    run_sft(tmp_path / "run", num_epochs=2.0, save_every=2)
    assert re.search(r"00000004.* is incomplete or damaged; the one before it is used", capfd.readouterr().err)
    assert not list((tmp_path / "run/checkpoints").glob("*.tmp"))
    assert_same_results(tmp_path / "run", tmp_path / "whole")


def test_random_numbers_that_accelerate_does_not_restore_stop_the_run(run_sft, stopped):
    """accelerate logs it and goes on, with the random numbers of the start."""
    checkpoint = stopped / "checkpoints/00000002"
    states = torch.load(checkpoint / "random_states_0.pkl", weights_only=False)
    states["torch_manual_seed"] = states["torch_manual_seed"][:100]  # as another version might have it
    torch.save(states, checkpoint / "random_states_0.pkl")
    (checkpoint / "sha256.json").write_text(json.dumps(sft.checksums(checkpoint)))
    with pytest.raises(RuntimeError, match="random_states_0.pkl can't be restored; go on with the library versions"):
        run_sft(stopped, num_epochs=2.0, save_every=2)


@pytest.mark.parametrize(
    "name", ["00000004/.DS_Store", "00000004/list.txt", "00000002/.nfs01", "best1/x", "00000002.bak/x", "README"]
)
def test_what_is_not_ours_among_the_checkpoints_stays(run_sft, tmp_path, die_after, monkeypatch, name):
    """And changes nothing: the run goes on from its newest checkpoint, and ends as without."""
    run_sft(tmp_path / "whole", num_epochs=2.0, save_every=2)
    die_after(sft, 4)
    with pytest.raises(Killed):
        run_sft(tmp_path / "run", num_epochs=2.0, save_every=2)
    file = tmp_path / "run/checkpoints" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    die_after(sft, 0)
    seen, real = [], sft.Checkpoints.load
    monkeypatch.setattr(sft.Checkpoints, "load", lambda self, n: seen.append(self.updates) or real(self, n))
    run_sft(tmp_path / "run", num_epochs=2.0, save_every=2, keep_checkpoints=1)
    assert seen == [4] and (tmp_path / "run/checkpoints/00000007").exists()
    assert not (tmp_path / "run/checkpoints/00000006").exists()
    assert file.exists() != name.startswith(("00000004/", "00000002/"))  # with its checkpoint, or not at all
    assert_same_results(tmp_path / "run", tmp_path / "whole")


def test_checksums_are_of_what_was_saved_not_of_hidden_files(tmp_path):
    for name in ("a", "b/c", ".DS_Store", "b/.nfs01", "sha256.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    sums = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("a", "b/c")}
    assert sft.checksums(tmp_path) == sums
    assert sft.checksums(tmp_path, "*") == {"a": sums["a"]}


def test_what_a_kill_left_of_an_older_checkpoint_is_deleted(run_sft, stopped):
    (stopped / "checkpoints/00000001.tmp").mkdir()
    run_sft(stopped, num_epochs=2.0, save_every=2)
    assert sorted(path.name for path in (stopped / "checkpoints").iterdir()) == ["00000006", "00000007"]


def test_what_counts_is_on_the_disk_before_it_does(run_sft, tmp_path, monkeypatch):
    """Each file before it gets its name; a checkpoint before its checksums are written; the model before
    run.json says that the run has finished."""
    calls = []
    for name in ("sync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real: calls.append((name, args)) or real(*args))
    run_sft(tmp_path / "run", max_updates=1)
    moved = [(calls[i - 1][0], Path(args[1])) for i, (name, args) in enumerate(calls) if name == "replace"]
    before = {path.name: name for name, path in moved if path.is_relative_to(tmp_path)}
    files = ("run.json", "sha256.json", "samples_validation.jsonl", "README.md")
    assert before == dict.fromkeys(files, "sync") | {"00000001": "replace"}  # of sha256.json
    names = [name for name, args in calls]
    at = next(i for i, (name, args) in enumerate(calls) if name == "replace" and Path(args[1]).name == "00000001")
    assert names[at - 3 : at + 1] == ["sync", "sync", "replace", "replace"]
    assert names[-4:] == ["sync", "replace", "sync", "replace"]  # the card, run.json


def test_a_signal_during_the_last_save_ends_the_run_after_it(run_sft, tmp_path, monkeypatch):
    real = sft.checksums

    def meet_a_signal(folder, *pattern):
        if folder.name == "00000004.tmp":
            signal.raise_signal(signal.SIGTERM)
        return real(folder, *pattern)

    monkeypatch.setattr(sft, "checksums", meet_a_signal)
    with pytest.raises(SystemExit, match="00000004 is saved"):
        run_sft(tmp_path / "run")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert chaos.is_whole(tmp_path / "run/checkpoints/00000004")


def test_a_full_disk_leaves_the_checkpoint_before(run_sft, tmp_path, monkeypatch):
    """The operating system refuses to write large files from the third save on."""
    run_sft(tmp_path / "whole", num_epochs=2.0, save_every=1)
    real, unlimited = sft.Checkpoints.save, resource.getrlimit(resource.RLIMIT_FSIZE)

    def save(checkpoints, done, num_updates):
        if done == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, unlimited[1]))
        real(checkpoints, done, num_updates)

    monkeypatch.setattr(sft.Checkpoints, "save", save)
    try:
        with pytest.raises(Exception, match="(?i)file too large|I/O error|error while serializing"):
            run_sft(tmp_path / "run", num_epochs=2.0, save_every=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert chaos.checkpoints_of(tmp_path / "run") == [1, 2]
    monkeypatch.undo()
    run_sft(tmp_path / "run", num_epochs=2.0, save_every=1)
    assert_same_results(tmp_path / "run", tmp_path / "whole")


def test_newest_checkpoints_are_kept_and_minutes_decide_too(run_sft, tmp_path):
    run_sft(tmp_path / "updates", num_epochs=2.0, save_every=2, keep_checkpoints=3)  # 7 updates
    assert chaos.checkpoints_of(tmp_path / "updates") == [4, 6, 7]
    run_sft(tmp_path / "minutes", num_epochs=2.0, save_minutes=1e-9, keep_checkpoints=9)
    assert chaos.checkpoints_of(tmp_path / "minutes") == [1, 2, 3, 4, 5, 6, 7]
    run_sft(tmp_path / "end", num_epochs=2.0, save_minutes=0.0)
    assert chaos.checkpoints_of(tmp_path / "end") == [7]


def test_minutes_count_from_the_last_save(run_sft, tmp_path, monkeypatch):
    """By a clock on which an optimiser step takes a minute."""
    real, steps = sft.step, []
    monkeypatch.setattr(sft, "step", lambda *args: steps.append(None) or real(*args))
    monkeypatch.setattr(sft, "time", SimpleNamespace(time=time.time, monotonic=lambda: 60.0 * len(steps)))
    run_sft(tmp_path / "run", num_epochs=2.0, save_minutes=2.5, keep_checkpoints=9)
    assert chaos.checkpoints_of(tmp_path / "run") == [3, 6, 7]


# ------------------------------------------------------------------------------------------------------ who may go on


@pytest.fixture
def stopped(run_sft, tmp_path, die_after) -> Path:
    """Folder of an SFT run that died after its second update."""
    die_after(sft, 2)
    with pytest.raises(Killed):
        run_sft(tmp_path / "run", num_epochs=2.0, save_every=2)
    die_after(sft, 0)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("name", "value"), [("lr", 2e-2), ("seed", 1), ("micro_batch_size", 2), ("loss_on", "response"), ("max_updates", 9)]
)
def test_an_argument_that_changes_the_result_is_refused_by_name(run_sft, stopped, name, value):
    before = (stopped / "run.json").read_bytes()
    with pytest.raises(FileExistsError, match=rf"(?s){name} .*, now {value!r}.*--overwrite"):
        run_sft(stopped, **{"num_epochs": 2.0, "save_every": 2, name: value})
    assert (stopped / "run.json").read_bytes() == before and chaos.checkpoints_of(stopped) == [2]


def test_other_arguments_may_change(run_sft, stopped):
    run_sft(stopped, num_epochs=2.0, save_every=3, save_minutes=9.0, keep_checkpoints=5, track=True)
    assert chaos.checkpoints_of(stopped) == [2, 3, 6, 7]


def test_no_resume_does_not_go_on(run_sft, stopped):
    with pytest.raises(FileExistsError, match="--no-resume.*--overwrite"):
        run_sft(stopped, num_epochs=2.0, save_every=2, resume=False)
    run_sft(stopped, num_epochs=2.0, save_every=2, resume=False, overwrite=True)


@pytest.mark.parametrize("output", ["sft", "."])
def test_overwrite_does_not_delete_the_model_that_the_run_starts_from(chain, run_reward, tmp_path, output):
    """Not where it is in a folder below either, here of what looks like a run."""
    model = Path(shutil.copytree(chain.sft, tmp_path / "sft"))
    shutil.copy(model / "run.json", tmp_path)
    with pytest.raises(FileExistsError, match="holds the model that this run starts from; give another"):
        run_reward(model, tmp_path / output, overwrite=True)
    assert (model / "model.safetensors").exists()


def test_a_changed_dataset_is_refused(run_sft, stopped, sft_dataset, tmp_path):
    from datasets import load_from_disk

    changed = load_from_disk(str(sft_dataset))
    changed["train"] = changed["train"].select(range(12, -1, -1))
    changed.save_to_disk(tmp_path / "changed")
    shutil.copytree(sft_dataset, tmp_path / "kept")
    try:
        shutil.rmtree(sft_dataset)
        shutil.copytree(tmp_path / "changed", sft_dataset)
        with pytest.raises(FileExistsError, match="dataset_fingerprint"):
            run_sft(stopped, num_epochs=2.0, save_every=2)
    finally:
        shutil.rmtree(sft_dataset)
        shutil.copytree(tmp_path / "kept", sft_dataset)


def test_a_stage_that_was_trained_again_is_refused(chain, run_reward, run_ppo, tmp_path, die_after):
    """The frozen models of PPO are in no checkpoint: they must be those that the run began with."""
    run_reward(chain.sft, tmp_path / "reward", max_updates=1)
    die_after(ppo, 1)
    with pytest.raises(Killed):
        run_ppo(chain.sft, tmp_path / "reward", tmp_path / "run", save_every=1)
    die_after(ppo, 0)
    run_reward(chain.sft, tmp_path / "reward", max_updates=1, overwrite=True)
    with pytest.raises(FileExistsError, match="stage_ids"):
        run_ppo(chain.sft, tmp_path / "reward", tmp_path / "run", save_every=1)


def test_a_changed_model_of_another_program_is_refused(chain, run_ppo, tmp_path, die_after):
    """It has no run.json, and so no id but what is in its files."""
    ignored = shutil.ignore_patterns("run.json", "probes.json", "checkpoints", "runs")
    shutil.copytree(chain.reward, tmp_path / "reward", ignore=ignored)
    die_after(ppo, 1)
    with pytest.raises(Killed):
        run_ppo(chain.sft, tmp_path / "reward", tmp_path / "run", save_every=1)
    die_after(ppo, 0)
    weights = load_file(tmp_path / "reward/model.safetensors")
    weights["score.weight"] *= 5
    save_file(weights, tmp_path / "reward/model.safetensors", {"format": "pt"})
    with pytest.raises(FileExistsError, match="stage_ids"):
        run_ppo(chain.sft, tmp_path / "reward", tmp_path / "run", save_every=1)


def test_a_run_in_a_folder_of_its_base_model_goes_on(base_models, run_sft, tmp_path, die_after):
    """As `--model models/my` has it: its SFT run is models/my/sft_<seed>, and what is saved there is not the model."""
    model = Path(shutil.copytree(base_models["gpt_neox"], tmp_path / "my"))
    die_after(sft, 2)
    with pytest.raises(Killed):
        run_sft(model / "sft_1", model=str(model), save_every=2)
    die_after(sft, 0)
    run_sft(model / "sft_1", model=str(model), save_every=2)
    assert chaos.checkpoints_of(model / "sft_1") == [2, 4]


def test_other_versions_are_reported(run_sft, stopped, capfd):
    run = json.loads((stopped / "run.json").read_text())
    run["versions"]["torch"], run["git_commit"] = "1.0", "abc"
    (stopped / "run.json").write_text(json.dumps(run))
    run_sft(stopped, num_epochs=2.0, save_every=2)
    err = capfd.readouterr().err
    assert re.search(rf"goes on with versions .*{re.escape(version('torch'))}.*; it had .*'torch': '1.0'", err)
    assert re.search("goes on with git_commit .*; it had abc", err)


@pytest.mark.parametrize("text", ["", '{"command": "acc'])
def test_a_damaged_run_json_is_named(chain, run_sft, run_ppo, stopped, text):
    (stopped / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run/run\.json is damaged; restore it, or delete the folder"):
        run_sft(stopped, num_epochs=2.0, save_every=2)
    with pytest.raises(ValueError, match=r"run/run\.json is damaged"):
        run_ppo(stopped, chain.reward, stopped.parent / "ppo")


def test_a_changed_script_is_told_from_its_commit(run_sft, tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    script = tmp_path / "sft.py"
    script.write_text("committed")
    for words in (["init", "-q"], ["add", "sft.py"], ["commit", "-qm", "c"], ["tag", "-m", "t", "v1"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    monkeypatch.setattr(sft, "__file__", str(script))
    for text, expected in (("committed", commit), ("changed", f"{commit}-dirty")):
        script.write_text(text)
        run_sft(tmp_path / text, max_updates=1)
        assert json.loads((tmp_path / text / "run.json").read_text())["git_commit"] == expected


def test_without_git_the_commit_is_empty(run_sft, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    run_sft(tmp_path / "run", max_updates=1)
    assert json.loads((tmp_path / "run/run.json").read_text())["git_commit"] == ""


def test_another_precision_is_refused(run_sft, stopped, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(FileExistsError, match="precision 'no', now 'bf16'"):
        run_sft(stopped, num_epochs=2.0, save_every=2)


def test_evaluation_may_change(run_sft, stopped):
    run_sft(stopped, num_epochs=2.0, save_every=2, eval_rows=3, eval_temperature=0.5)
    assert len((stopped / "samples_validation.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("script", "fields"),
    [(ppo, {"sample_every": 2}), (ilql, {"eval_betas": (0.5,)}), (reward, {"eval_splits": ("validation",)})],
)
def test_what_is_sampled_and_evaluated_may_change(chain, request, tmp_path, die_after, script, fields):
    models = {ppo: [chain.sft, chain.reward], reward: [chain.sft]}.get(script, [])
    run = request.getfixturevalue(f"run_{script.__name__}")
    die_after(script, 1)
    with pytest.raises(Killed):
        run(*models, tmp_path / "run", save_every=1)
    die_after(script, 0)
    run(*models, tmp_path / "run", save_every=1, **fields)
    assert json.loads((tmp_path / "run/run.json").read_text())["finished"]


def test_what_a_start_that_was_killed_leaves_is_no_other_run(run_sft, tmp_path):
    (tmp_path / "run").mkdir()
    for name in ("run.lock", "run.json.tmp"):
        (tmp_path / "run" / name).write_text("")
    run_sft(tmp_path / "run", max_updates=1)


def test_to_go_on_without_deepspeed_is_refused(run_sft, stopped):
    run = json.loads((stopped / "run.json").read_text())
    (stopped / "run.json").write_text(json.dumps(run | {"deepspeed": True}))
    with pytest.raises(FileExistsError, match="deepspeed True, now False"):
        run_sft(stopped, num_epochs=2.0, save_every=2)


def test_a_rank_that_does_not_see_the_folder_says_so(run_sft, tmp_path, monkeypatch):
    """The main process made it, on a disk of its own."""
    waits = []
    monkeypatch.setattr(sft.time, "sleep", waits.append)
    monkeypatch.setattr(Accelerator, "is_main_process", property(lambda accelerator: False))
    with pytest.raises(
        FileNotFoundError, match="run/run.json is not there for this process: all must share the folder"
    ):
        run_sft(tmp_path / "run")
    assert waits == [1] * 60


def test_a_rank_that_sees_the_folder_late_waits_for_it(run_sft, stopped, tmp_path, monkeypatch):
    """NFS remembers for some seconds that a file was not there."""
    (stopped / "run.json").rename(tmp_path / "run.json")
    monkeypatch.setattr(Accelerator, "is_main_process", property(lambda accelerator: False))
    monkeypatch.setattr(sft.time, "sleep", lambda seconds: shutil.copy(tmp_path / "run.json", stopped))

    def make_checkpoints(*args):
        raise Killed  # far enough

    monkeypatch.setattr(sft, "Checkpoints", make_checkpoints)
    with pytest.raises(Killed):
        run_sft(stopped, num_epochs=2.0, save_every=2)


def test_a_file_system_without_locks_is_said_and_used(run_sft, tmp_path, monkeypatch, capfd):
    def lockf(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(sft.fcntl, "lockf", lockf)
    _, folder = run_sft(tmp_path / "run", max_updates=1)
    assert "run can't be locked ([Errno 37] No locks available); see to it that no other run" in capfd.readouterr().err
    assert sft.read_run(folder)["finished"]


def test_a_folder_in_which_another_process_trains_is_refused(run_sft, stopped):
    folder = Path(shutil.copytree(stopped, stopped.parent / "copy"))  # this process still holds the other
    code = f"import sft, pathlib; sft.lock_folder(pathlib.Path({str(folder)!r})); print('in', flush=True); input()"
    other = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, stdin=-1, stdout=-1)
    try:
        assert other.stdout.readline() == "in\n"
        before = (folder / "run.json").read_bytes()
        for fields in ({"eval_rows": 1}, {"overwrite": True}):
            with pytest.raises(FileExistsError, match="another process is training there"):
                run_sft(folder, num_epochs=2.0, save_every=2, **fields)
        assert chaos.checkpoints_of(folder) == [2] and (folder / "run.json").read_bytes() == before
    finally:
        other.kill()
        other.wait()
    run_sft(folder, num_epochs=2.0, save_every=2)  # its lock went with it


def test_final_metrics_come_one_step_after_the_last_checkpoint(run_sft, tmp_path, monkeypatch):
    """A run that dies after it has logged them logs them anew, and each curve has them once."""
    real = sft.write_text

    def die_at_the_card(path, text):
        if path.name == "README.md":
            raise Killed
        real(path, text)

    monkeypatch.setattr(sft, "write_text", die_at_the_card)
    with pytest.raises(Killed):
        run_sft(tmp_path / "run", num_epochs=2.0)
    monkeypatch.undo()
    run_sft(tmp_path / "run", num_epochs=2.0)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # it ends an evaluation at once: all is saved
    assert [step for step, _ in read_events(tmp_path / "run")["eval/validation/loss"]] == [7 * 4 + 1]


def test_weights_and_biases_goes_on_with_the_same_run(run_sft, tmp_path, die_after):
    die_after(sft, 2)
    with pytest.raises(Killed):
        run_sft(tmp_path / "run", num_epochs=2.0, save_every=2, track=True)
    die_after(sft, 0)
    run_sft(tmp_path / "run", num_epochs=2.0, save_every=2, track=True)
    started = [path.name for path in (tmp_path / "run/wandb").glob("offline-run-*")]
    tracker_id = json.loads((tmp_path / "run/run.json").read_text())["tracker_id"]
    assert len(started) == 2 and all(f"-{tracker_id}" in name for name in started)


# ----------------------------------------------------------------------------------------------------------- not finite


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_a_loss_that_is_not_finite_leaves_update_metrics_and_batch(
    chain, run_sft, run_reward, run_ppo, tmp_path, stage, monkeypatch
):
    script, name = {"sft": (sft, "sft_loss"), "reward": (reward, "reward_loss"), "ppo": (ppo, "value_loss")}[stage]
    runs = {"sft": (run_sft,), "reward": (run_reward, chain.sft), "ppo": (run_ppo, chain.sft, chain.reward)}
    run, *inputs = runs[stage]
    real = getattr(script, name)

    def break_down(*arguments):
        result = real(*arguments)
        return (result[0] * torch.inf, *result[1:]) if isinstance(result, tuple) else result * torch.inf

    monkeypatch.setattr(script, name, break_down)
    with pytest.raises(FloatingPointError, match="not_finite_0.pt"):
        run(*inputs, tmp_path / "run")
    saved = torch.load(tmp_path / "run/not_finite_0.pt")
    assert saved["update"] == 0 and any(not torch.tensor(v).isfinite() for v in saved["metrics"].values())
    column = {"sft": "query_reference_response_token", "reward": "query_chosen_token", "ppo": "responses"}[stage]
    assert len(saved["batch"][column]) == (8 if stage == "ppo" else 4)


def test_a_checkpoint_holds_policy_and_value_model(chain):
    """PPO's state has both, at the end as they were saved for use."""
    newest = sorted((chain.ppo / "checkpoints").glob("*[0-9]"))[-1]
    state = {name: tensor for file in newest.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for part, folder in (("policy", chain.ppo), ("value_model", chain.ppo / "value_model")):
        for name, tensor in load_file(folder / "model.safetensors").items():
            assert torch.equal(state[f"{part}.{name.replace('embed_out', 'lm_head')}"], tensor)
