"""Downloads and uploads by the real clients, from and to a Hub on loopback: README's commands, word for word."""

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ENVIRONMENT, ROOT
from datasets import Dataset, load_from_disk
from hub_server import serve
from pyarrow import parquet
from test_tldr_dataset import cnndm_row, comparison_row, post_row

import reward
import sft
import tldr_dataset

SHORT = ["--batch_size", "4", "--micro_batch_size", "4", "--eval_rows", "2"]
STATE = {"checkpoints", "runs", "wandb", "run.lock"}


@pytest.fixture(scope="module")
def hub(tmp_path_factory, base_models, sft_dataset, comparisons):
    """What README's commands ask for, under its real names: Pythia (a tiny one) and the pre-tokenised datasets."""
    root = tmp_path_factory.mktemp("hub")
    (root / "models/EleutherAI").mkdir(parents=True)
    (root / "models/EleutherAI/pythia-70m-deduped").symlink_to(base_models["gpt_neox"])
    for name, path in ((sft.Args.dataset, sft_dataset), (reward.Args.dataset, comparisons)):
        publish(load_from_disk(path), root / "datasets" / name / "data", "{}-00000-of-00001.parquet")
    server = serve(root)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {**os.environ, **ENVIRONMENT, "HF_ENDPOINT": server.url, "HF_TOKEN": server.token}
    environment |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    # uploads through Xet need its servers; the token is the one above, not that of the machine's user
    environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path_factory.mktemp("home"))}
    yield SimpleNamespace(root=root, environment=environment)
    server.shutdown()


def publish(splits, folder: Path, name: str) -> None:
    for split, rows in splits.items():
        path = folder / name.format(split)
        path.parent.mkdir(parents=True, exist_ok=True)
        rows.to_parquet(path)


def run(hub, folder: Path, script: str, *arguments: str, **environment) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / f"{script}.py"), *arguments]
    return subprocess.run(
        command, cwd=folder, env=hub.environment | environment, capture_output=True, text=True, timeout=300
    )


def check(result: subprocess.CompletedProcess) -> None:
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]


def files(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_stages_by_their_defaults_from_the_hub_and_back(hub, tmp_path):
    """--model pythia-70m alone finds model and datasets; what is uploaded is the folder without its state, and the next
    stages start from it as they do from the folder."""
    for folder in ("here", "elsewhere"):
        (tmp_path / folder).mkdir()
    common = ["--model", "pythia-70m", *SHORT]
    check(run(hub, tmp_path / "here", "sft", *common, "--max_updates", "2", "--push_to_hub", "me/sft", "--track"))
    pushed, local = files(hub.root / "models/me/sft"), files(tmp_path / "here/models/pythia-70m/sft_44413")
    assert pushed == {name: content for name, content in local.items() if Path(name).parts[0] not in STATE}
    assert {"model.safetensors", "tokenizer.json", "README.md", "samples_validation.jsonl"} <= set(pushed)
    assert STATE <= {Path(name).parts[0] for name in local} and json.loads(pushed["run.json"])["finished"]
    more = ["--max_updates", "2", "--normalisation_rows", "4", "--push_to_hub", "me/reward"]
    check(run(hub, tmp_path / "here", "reward", *common, *more))
    more = ["--total_episodes", "4", "--response_length", "8"]
    check(run(hub, tmp_path / "here", "ppo", *common, *more))
    more += ["--sft_model", "me/sft", "--reward_model", "me/reward", "--push_to_hub", "me/ppo"]
    check(run(hub, tmp_path / "elsewhere", "ppo", *common, *more))
    here, pushed = files(tmp_path / "here/models/pythia-70m/ppo_44413"), files(hub.root / "models/me/ppo")
    for name in ("model.safetensors", "value_model/model.safetensors", "samples_validation.jsonl"):
        assert here[name] == pushed[name]


@pytest.mark.slow
def test_offline_stages_by_their_defaults_from_the_hub_and_back(hub, tmp_path):
    check(run(hub, tmp_path, "sft", "--model", "pythia-70m", *SHORT, "--max_updates", "2"))
    more = [*SHORT, "--max_updates", "2", "--response_length", "8"]
    unfinished = ["--ref_logprobs", "models/pythia-70m/dpo_44413/unfinished.tmp"]  # as a kill leaves them; not uploaded
    for stage, heads, flags in (("dpo", set(), unfinished), ("ilql", {"heads.safetensors"}, [])):
        check(run(hub, tmp_path, stage, "--model", "pythia-70m", *more, *flags, "--push_to_hub", f"me/{stage}"))
        pushed = set(files(hub.root / "models/me" / stage))
        assert {"model.safetensors", "run.json", "README.md"} | heads <= pushed and "unfinished.tmp" not in pushed
    assert (tmp_path / "models/pythia-70m/dpo_44413/unfinished.tmp").exists()
    # what docs/resume.md says to do after an upload that failed
    page = (ROOT / "docs" / "resume.md").read_text()
    (command,) = re.findall(r"`(hf upload user/name <output_dir> .*)`", page)
    command = command.replace("user/name", "me/again").replace("<output_dir>", "models/pythia-70m/dpo_44413")
    hf = [sys.executable, "-m", "huggingface_hub.cli.hf", *shlex.split(command)[1:]]
    check(subprocess.run(hf, cwd=tmp_path, env=hub.environment, capture_output=True, text=True, timeout=100))
    assert files(hub.root / "models/me/again") == files(hub.root / "models/me/dpo")


@pytest.mark.parametrize(("repository", "token", "status"), [("you/sft", "secret", 403), ("me/new", "stolen", 401)])
def test_an_upload_that_will_be_refused_stops_before_training(hub, tmp_path, repository, token, status):
    arguments = ["--model", "pythia-70m", *SHORT, "--output_dir", "run", "--push_to_hub", repository]
    result = run(hub, tmp_path, "sft", *arguments, HF_TOKEN=token)
    assert result.returncode == 1 and re.search(rf"\b{status}\b.*\n*.*/api/repos/create", result.stderr)
    assert not (tmp_path / "run").exists() and not (hub.root / "models" / repository).exists()


def test_raw_data_from_the_hub_and_tokenised_data_back(hub, tmp_path):
    """tldr_dataset.py by its defaults: posts, and the comparisons that the Hub holds behind a loading script, whose
    rows come from its conversion to parquet. sft.py and reward.py then train on what was uploaded."""
    pairs = [comparison_row(i) for i in range(5)] + [cnndm_row(5, article="News. " * 30)]  # wider than the others
    posts, pairs = Dataset.from_list([post_row(i) for i in range(6)]), Dataset.from_list(pairs)
    splits = {"train": range(4), "validation": range(4, 6)}
    folder = hub.root / "datasets" / tldr_dataset.Args.sft
    publish({split: posts.select(rows) for split, rows in splits.items()}, folder / "data", "{}-0.parquet")
    folder = hub.root / "datasets" / tldr_dataset.Args.comparisons
    folder.mkdir(parents=True)
    (folder / f"{folder.name}.py").write_text("raise SystemExit('not to be run')")
    converted = folder.with_name(f"{folder.name}@refs--convert--parquet") / "comparisons"
    publish({split: pairs.select(rows) for split, rows in splits.items()}, converted, "{}/0000.parquet")
    result = run(hub, tmp_path, "tldr_dataset", "--tokenizer", "pythia-70m", "--push_to_hub", "me/tldr")
    check(result)
    pairs_in_paper = "{'train': 47, 'validation': 241, 'validation_cnndm': 7}"
    assert f"expected {pairs_in_paper} pairs of policies, found" in result.stderr
    for kind, names in (("sft", ("train", "validation")), ("comparisons", ("train", "validation", "validation_cnndm"))):
        pushed, local = hub.root / f"datasets/me/tldr_{kind}", tmp_path / f"data/tldr/{kind}"
        assert (pushed / "metadata.json").read_bytes() == (local / "metadata.json").read_bytes()
        for split in names:
            (path,) = pushed.glob(f"data/{split}-0*.parquet")
            assert parquet.read_table(path).to_pylist() == load_from_disk(local / split).to_list()
    common = ["--model", "pythia-70m", *SHORT, "--max_updates", "1"]
    check(run(hub, tmp_path, "sft", *common, "--dataset", "me/tldr_sft", "--response_length", "8"))
    data = ["--dataset", "me/tldr_comparisons", "--sft_dataset", "me/tldr_sft"]
    check(run(hub, tmp_path, "reward", *common, *data, "--normalisation_rows", "4"))
