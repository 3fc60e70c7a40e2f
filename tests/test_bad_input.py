"""Bad input to the training scripts: errors say what is wrong and how to mend it, and nothing is written."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from conftest import EOS, ROOT, make_config
from datasets import Dataset, DatasetDict, load_from_disk
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BloomConfig,
    GraniteConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

import ppo
import reward
import sft

PAD = 320


@pytest.fixture
def run(tmp_path, chain, run_sft, run_reward, run_ppo, run_dpo, run_ilql):
    """Function run(stage, **fields) with a good run's settings in `out`, which must not be there afterwards."""

    def start(stage: str, out: Path = tmp_path / "out", **fields):
        if stage in ("sft", "ilql"):
            return {"sft": run_sft, "ilql": run_ilql}[stage](out, **fields)
        sft_model = fields.pop("sft_model", chain.sft)
        if stage in ("reward", "dpo"):
            return {"reward": run_reward, "dpo": run_dpo}[stage](sft_model, out, **fields)
        return run_ppo(sft_model, fields.pop("reward_model", chain.reward), out, **fields)

    return start


def assert_stops(run, tmp_path, error, match: str, stage: str, **fields) -> None:
    with pytest.raises(error, match=match):
        run(stage, **fields)
    assert not (tmp_path / "out").exists()


def spoil(source: Path, target: Path, change, split: str = "train") -> str:
    """Copy of a dataset whose split went through change(columns)."""
    data = load_from_disk(source)
    columns = data[split].to_dict()
    change(columns)
    DatasetDict(dict(data) | {split: Dataset.from_dict(columns)}).save_to_disk(target)
    return str(target)


DATASETS = {"sft": "sft_dataset", "reward": "comparisons", "ppo": "sft_dataset"}
COLUMNS = {"sft": "query_reference_response_token", "reward": "query_rejected_token", "ppo": "query_token"}
REMEDY = "; make sft/ or comparisons/ for this model with tldr_dataset.py$"


@pytest.fixture(params=DATASETS)
def stage(request) -> str:
    return request.param


@pytest.fixture
def spoiled(stage, tmp_path, request):
    """Function spoiled(change, split): path of the stage's dataset with one split changed."""
    source = request.getfixturevalue(DATASETS[stage])
    return lambda change, split="train": spoil(source, tmp_path / "spoiled", change, split)


# -------------------------------------------------------------------------------------------------------------- dataset


@pytest.mark.parametrize("split", ["train", "validation"])
def test_split_without_rows(run, tmp_path, stage, spoiled, split):
    path = spoiled(lambda columns: columns.update({name: [] for name in columns}), split)
    expected = f"{path}, split {split}: missing or empty: .*{REMEDY}"
    assert_stops(run, tmp_path, FileNotFoundError, expected, stage, dataset=path)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_missing_column(run, tmp_path, stage, spoiled, split):
    column = COLUMNS[stage]
    dataset = spoiled(lambda columns: columns.pop(column), split)
    match = rf"(?s)spoiled.*{split}.*'{column}'.*missing.*query.*tldr_dataset.py"
    assert_stops(run, tmp_path, ValueError, match, stage, dataset=dataset)


def test_missing_text_of_the_query(run, tmp_path, stage, spoiled):
    dataset = spoiled(lambda columns: columns.pop("query"))
    assert_stops(run, tmp_path, ValueError, "(?s)'query'.*missing.*tldr_dataset.py", stage, dataset=dataset)


def test_rows_of_unequal_length(run, tmp_path, stage, spoiled):
    column = COLUMNS[stage]
    lengths = []

    def shorten(columns):
        columns[column][2] = columns[column][2][1:]
        lengths.extend(sorted({len(row) for row in columns[column]}))

    dataset = spoiled(shorten)
    match = rf"(?s)train.*{column}.*{lengths[0]}.*{lengths[1]}.*one length.*tldr_dataset.py"
    assert_stops(run, tmp_path, ValueError, match, stage, dataset=dataset)


def test_another_tokenizer_by_its_ids(run, tmp_path, stage, spoiled):
    """The query's tokens are not those that the model's tokenizer gives its text."""

    def shift(columns):
        columns[COLUMNS[stage]] = [
            [(t + 7) % 319 + 1 if t not in (0, PAD) else t for t in row] for row in columns[COLUMNS[stage]]
        ]

    match = r"(?s)another tokenizer.*row 0 begins \[\d+, .*\], not \[\d+, .*in row 0.*tldr_dataset.py"
    assert_stops(run, tmp_path, ValueError, match, stage, dataset=spoiled(shift))


def test_another_tokenizer_by_its_size(run, tmp_path, stage, spoiled):
    """Ids beyond the model's vocabulary (Pythia's tokens for a model of 330), in a row that is not the first."""

    def enlarge(columns):
        columns[COLUMNS[stage]][-1] = [t + 5000 if t not in (0, PAD) else t for t in columns[COLUMNS[stage]][-1]]

    match = r"(?s)another tokenizer.*ids \d+ to 5\d\d\d of 32\d\) in row 12.*tldr_dataset.py"
    assert_stops(run, tmp_path, ValueError, match, stage, dataset=spoiled(enlarge))


def test_dataset_padded_with_another_pad(run, tmp_path, stage, spoiled):
    """[PAD] of a tokenizer with other special tokens: 321 is no one's token here."""

    def repad(columns):
        columns[COLUMNS[stage]] = [[321 if t == PAD else t for t in row] for row in columns[COLUMNS[stage]]]

    assert_stops(run, tmp_path, ValueError, "(?s)another tokenizer.*tldr_dataset.py", stage, dataset=spoiled(repad))


@pytest.mark.parametrize("stage", ["sft", "reward"], indirect=True)
def test_eos_absent_from_the_targets(run, tmp_path, stage, spoiled):
    column = COLUMNS[stage]

    def drop_eos(columns):
        columns[column][3] = [PAD if t == 0 else t for t in columns[column][3]]

    match = rf"(?s)train.*{column}.*no EOS.*row 3.*tldr_dataset.py"
    assert_stops(run, tmp_path, ValueError, match, stage, dataset=spoiled(drop_eos))


def add_token(row: list[int]) -> list[int]:
    return [*row[: row.index(0) + 1], 5, *row[row.index(0) + 2 :]]


def pad_left(row: list[int]) -> list[int]:
    return [PAD] * row.count(PAD) + [token for token in row if token != PAD]


@pytest.mark.parametrize("stage", ["sft", "reward"], indirect=True)
@pytest.mark.parametrize("change", [add_token, pad_left])
def test_eos_in_another_place_than_the_end(run, tmp_path, stage, spoiled, change):
    """A token after EOS, or padding on the left: the last token before the padding is not EOS."""
    column = COLUMNS[stage]

    def move_eos(columns):
        shortest = max(range(len(columns[column])), key=lambda i: columns[column][i].count(PAD))
        columns[column][shortest] = change(columns[column][shortest])

    match = rf"(?s)train.*{column}.*has no EOS, or not right before its padding, in row \d+; .*tldr_dataset.py"
    assert_stops(run, tmp_path, ValueError, match, stage, dataset=spoiled(move_eos))


@pytest.mark.parametrize("stage", ["sft", "ppo"], indirect=True)
def test_queries_padded_on_the_right(run, tmp_path, stage, spoiled):
    def turn(columns):
        queries = columns["query_token"]
        columns["query_token"] = [[t for t in row if t != PAD] + [PAD] * row.count(PAD) for row in queries]

    match = r"(?s)train.*query_token.*ends with padding in row \d+; .*tldr_dataset.py"
    assert_stops(run, tmp_path, ValueError, match, stage, dataset=spoiled(turn))


def test_missing_split(run, tmp_path, stage, request):
    data = load_from_disk(request.getfixturevalue(DATASETS[stage]))
    DatasetDict({"train": data["train"]}).save_to_disk(tmp_path / "data")
    match = r"dataset \S+data, split validation: missing or empty: .*" + REMEDY
    assert_stops(run, tmp_path, FileNotFoundError, match, stage, dataset=str(tmp_path / "data"))


@pytest.mark.parametrize("form", ["save_to_disk", "files"])
@pytest.mark.parametrize("stage", ["reward", "dpo"], indirect=True)
def test_missing_cnndm_split(run, tmp_path, stage, comparisons, form):
    """A dataset without CNN/DM rows has no such split, which is evaluated by default."""
    data = load_from_disk(comparisons)
    data.pop("validation_cnndm")
    if form == "save_to_disk":
        data.save_to_disk(tmp_path / "data")
    else:
        for split, rows in data.items():
            rows.to_parquet(tmp_path / "data" / f"{split}.parquet")
    match = (
        r"(?s)data, split validation_cnndm: missing or empty: .*tldr_dataset.py.*leave the split out of --eval_splits$"
    )
    assert_stops(run, tmp_path, FileNotFoundError, match, stage, dataset=str(tmp_path / "data"))


def test_whole_output_of_tldr_dataset(run, tmp_path, stage, request):
    """The folder that tldr_dataset.py wrote, in place of sft/ or comparisons/ in it."""
    name = DATASETS[stage]
    load_from_disk(request.getfixturevalue(name)).save_to_disk(tmp_path / "data" / name.removesuffix("_dataset"))
    match = r"(?s)dataset \S+data, split train: missing or empty: .*" + REMEDY
    assert_stops(run, tmp_path, FileNotFoundError, match, stage, dataset=str(tmp_path / "data"))


def test_missing_dataset(run, tmp_path, stage):
    error = (FileNotFoundError, ConnectionError)
    assert_stops(run, tmp_path, error, "(?s)nowhere.*" + REMEDY, stage, dataset=str(tmp_path / "nowhere"))


def test_sft_dataset_of_the_reward_model_is_checked_too(run, tmp_path, sft_dataset):
    dataset = spoil(sft_dataset, tmp_path / "spoiled", lambda columns: columns.pop("query_reference_response_token"))
    assert_stops(
        run, tmp_path, ValueError, "(?s)query_reference_response_token.*missing", "reward", sft_dataset=dataset
    )


@pytest.mark.parametrize("stage", ["reward", "ppo"], indirect=True)
def test_row_that_is_all_padding(run, tmp_path, stage, spoiled):
    column = COLUMNS[stage]

    def empty(columns):
        columns[column][2] = [PAD] * len(columns[column][2])

    match = rf"(?s){column}.*all padding in row 2.*tldr_dataset.py"
    assert_stops(run, tmp_path, ValueError, match, stage, dataset=spoiled(empty))


def with_positions(source: Path, target: Path, number: int) -> Path:
    """A copy of a GPT-2, cut to `number` positions."""
    policy = AutoModelForCausalLM.from_pretrained(copy_model(source, target))
    policy.transformer.wpe.weight.data = policy.transformer.wpe.weight.data[:number].clone()
    policy.config.n_positions = number
    policy.save_pretrained(target)
    return target


def test_rows_longer_than_the_models_positions(run, tmp_path, base_models):
    """GPT-2's learned positions end; the rotary ones of the others do not."""
    model = with_positions(base_models["gpt2"], tmp_path / "model", 12)
    match = r"(?s)'query_token' needs \d+ positions, the model has 12 .*--max_cnndm_query_length.*tldr_dataset.py"
    assert_stops(run, tmp_path, ValueError, match, "sft", model=str(model))
    match = r"(?s)_token' needs \d+ positions, the model has 12 \([^)]*tldr_dataset.py\)"  # and no flag of its own
    assert_stops(run, tmp_path, ValueError, match, "reward", sft_model=str(model))


def test_rotary_positions_have_no_last_one(run, tmp_path, base_models):
    model = copy_model(base_models["llama"], tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 12}))
    run("sft", model=str(model), max_updates=1, eval_rows=2)


@pytest.mark.parametrize(
    ("kind", "window", "fits"),
    [(MistralConfig, 64, False), (MistralConfig, 512, True), (MistralConfig, None, True), (Qwen2Config, 64, True)],
)
def test_rows_longer_than_a_sliding_window(run, tmp_path, tokenizer_path, kind, window, fits):
    """Training packs sequences, which sees all of each; sampling sees the window: no longer the same model. Qwen2's
    configuration has a window that is not in use (use_sliding_window is False)."""
    config = make_config("llama").to_dict() | {"sliding_window": window}
    config = {name: config[name] for name in config if name not in ("model_type", "architectures")}
    AutoModelForCausalLM.from_config(kind(**config)).save_pretrained(tmp_path / "model")
    shutil.copytree(tokenizer_path, tmp_path / "model", dirs_exist_ok=True)
    # the Hub's Qwen2 name a window that is not in use; their tokenizer's PAD is EOS unless it is told otherwise
    for name, field in (("config.json", {"sliding_window": window}), ("tokenizer_config.json", {"pad_token": None})):
        file = tmp_path / "model" / name
        file.write_text(json.dumps(json.loads(file.read_text()) | field))
    fields = {"model": str(tmp_path / "model"), "max_updates": 1, "eval_rows": 2}
    if fits:
        run("sft", **fields)
    else:
        assert_stops(run, tmp_path, ValueError, rf"needs \d+ positions, the model has {window} ", "sft", **fields)


def longest(dataset: Path, split: str, *columns: str) -> int:
    """Most tokens of a row, over the columns together."""
    rows = load_from_disk(dataset)[split]
    return max(sum(token != PAD for column in columns for token in row[column]) for row in rows.to_list())


@pytest.mark.parametrize("stage", ["dpo", "ilql"], indirect=True)
def test_pairs_longer_than_the_models_positions(run, tmp_path, stage, base_models, comparisons, sft_dataset):
    """Query and response alone have room, the one after the other they have not."""
    both = max(longest(comparisons, "train", "query_token", name) for name in ("chosen_token", "rejected_token"))
    assert both - 1 > longest(comparisons, "train", "query_token") > longest(comparisons, "train", "chosen_token")
    model = with_positions(base_models["gpt2"], tmp_path / "model", both - 1)
    name = "model" if stage == "ilql" else "sft_model"
    match = rf"(?s)_token' needs {both} positions, the model has {both - 1}"
    assert_stops(run, tmp_path, ValueError, match, stage, **{name: str(model)})


@pytest.mark.parametrize("stage", ["sft", "ppo", "dpo", "ilql"], indirect=True)
def test_samples_longer_than_the_models_positions(run, tmp_path, stage, base_models, sft_dataset, comparisons):
    """What can't be sampled at the end is refused before the training."""
    model = with_positions(base_models["gpt2"], tmp_path / "model", 200)
    name = "model" if stage in ("sft", "ilql") else "sft_model"
    match = r"(?s)'query_token' needs \d+ positions, the model has 200 \(.*, --response_length\)"
    assert_stops(run, tmp_path, ValueError, match, stage, **{name: str(model)}, response_length=150)
    if stage != "ppo":  # whose reward model is another's
        run(stage, tmp_path / "fits", **{name: str(model)}, response_length=8, max_updates=1, eval_rows=2)


# ------------------------------------------------------------------------------------------------- tokenizer and stages


def copy_model(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target, ignore=shutil.ignore_patterns("runs", "checkpoints")))


def test_tokenizer_whose_pad_is_its_eos(run, tmp_path, stage, chain, base_models):
    source = {"sft": base_models["gpt_neox"]}.get(stage, chain.sft)
    model = copy_model(source, tmp_path / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    tokenizer.pad_token = EOS
    tokenizer.save_pretrained(model)
    fields = {"model" if stage == "sft" else "sft_model": str(model)}
    assert_stops(run, tmp_path, ValueError, rf"(?s){tmp_path}/model.*PAD.*{EOS[2:-2]}", stage, **fields)


def test_tokenizer_without_eos(run, tmp_path, base_models):
    model = copy_model(base_models["gpt_neox"], tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("eos_token")
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    assert_stops(run, tmp_path, ValueError, "(?s)expected an EOS.*found EOS None", "sft", model=str(model))


def test_missing_stage_names_the_command(run, tmp_path, monkeypatch):
    """The default folders are empty: the error holds the command to run first, with the user's model and seed."""
    monkeypatch.chdir(tmp_path)
    first = r"models/pythia-1b/sft_7.*launch sft.py --model pythia-1b --seed 7 --output_dir models/pythia-1b/sft_7"
    second = r"models/pythia-1b/reward_7.*accelerate launch reward.py --model pythia-1b --seed 7"
    default = {"model": "pythia-1b", "seed": 7}
    with pytest.raises(FileNotFoundError, match=first):
        reward.main(reward.Args(**default))
    with pytest.raises(FileNotFoundError, match=first):
        ppo.main(ppo.Args(**default))
    assert not list(tmp_path.iterdir())
    assert_stops(run, tmp_path, FileNotFoundError, second, "ppo", reward_model="", **default)


def test_missing_stage_of_a_relative_path_names_the_command(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for path in ("models/sft_7", "models/pythia/sft_7"):
        assert_stops(run, tmp_path, FileNotFoundError, f"(?s)sft.py .*--output_dir {path}", "reward", sft_model=path)


def test_unfinished_stage_is_as_good_as_missing(run, tmp_path, chain):
    model = copy_model(chain.sft, tmp_path / "model")
    state = json.loads((model / "run.json").read_text())
    (model / "run.json").write_text(json.dumps(state | {"finished": False}))
    for stage in ("reward", "ppo"):
        match = "(?s)model.*sft.py.*if it stopped, run.json's command less --overwrite"  # which would delete it
        assert_stops(run, tmp_path, FileNotFoundError, match, stage, sft_model=model)


def test_reward_model_without_head(run, tmp_path, chain):
    model = copy_model(chain.reward, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert_stops(run, tmp_path, ValueError, "(?s)model.*head.*reward.py", "ppo", reward_model=model)


@pytest.mark.parametrize(
    ("stage", "name"),
    [("sft", "model"), ("reward", "sft_model"), ("dpo", "sft_model"), ("ppo", "sft_model"), ("ilql", "model")],
    indirect=["stage"],
)
def test_weights_that_a_model_lacks_are_not_left_random(run, tmp_path, chain, stage, name):
    model = copy_model(chain.sft, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    lost = "gpt_neox.layers.1.mlp.dense_4h_to_h.weight"
    del weights[lost]
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    match = rf"{model}: expected the weights of a GPTNeoX\w+, found none for {lost} \(1 missing\); give such a model"
    assert_stops(run, tmp_path, ValueError, match, stage, **{name: str(model)})


def test_weights_that_a_reward_model_lacks_are_not_left_random(run, tmp_path, chain):
    """Nor does it need probes to be noticed."""
    model = copy_model(chain.reward, tmp_path / "model")
    (model / "probes.json").unlink()
    weights = load_file(model / "model.safetensors")
    del weights["gpt_neox.embed_in.weight"]
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    match = r"expected the weights of a GPTNeoXForSequenceClassification, found none for gpt_neox.embed_in.weight"
    assert_stops(run, tmp_path, ValueError, match, "ppo", reward_model=str(model))


def test_reward_model_in_place_of_the_policy(run, tmp_path, chain):
    match = "expected the weights of a GPTNeoXForCausalLM, found none for (lm_head|embed_out).weight"
    for stage, name in (("sft", "model"), ("ppo", "sft_model"), ("dpo", "sft_model")):
        assert_stops(run, tmp_path, ValueError, match, stage, **{name: str(chain.reward)})


def test_reward_model_with_tied_embeddings_in_place_of_the_policy(run, tmp_path, chain):
    """No weight of the policy is missing there: its output embeddings are its input embeddings."""
    model = copy_model(chain.reward, tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": True}
    (model / "config.json").write_text(json.dumps(config))
    match = (
        f"{model}: expected the weights of a GPTNeoXForCausalLM, found the head of a reward model; give such a model"
    )
    for stage, name in (("sft", "model"), ("ppo", "sft_model"), ("dpo", "sft_model"), ("ilql", "model")):
        assert_stops(run, tmp_path, ValueError, match, stage, **{name: str(model)})


def test_policy_in_place_of_the_reward_model(run, tmp_path, chain):
    assert_stops(run, tmp_path, ValueError, "(?s)head.*reward.py", "ppo", reward_model=chain.sft)


def test_reward_model_whose_probes_do_not_match(run, tmp_path, chain):
    model = copy_model(chain.reward, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["score.weight"] *= 2
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert_stops(run, tmp_path, ValueError, r"(?s)model.*probe scores.*when it was saved", "ppo", reward_model=model)


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        ("sft", "model"),
        ("reward", "sft_model"),
        ("dpo", "sft_model"),
        ("ppo", "sft_model"),
        ("ppo", "reward_model"),
        ("ilql", "model"),
    ],
    indirect=["stage"],
)
def test_a_kind_of_model_that_a_stage_cannot_use(run, tmp_path, tokenizer_path, stage, name):
    """Bloom's positions are its attention's own, Granite's logits are scaled: see test_architectures.py."""
    sizes = {"vocab_size": 330, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 1}
    kind = GraniteConfig(logits_scaling=3.0, **sizes) if stage == "ilql" else BloomConfig(**sizes)
    auto = AutoModelForSequenceClassification if name == "reward_model" else AutoModelForCausalLM
    model = auto.from_config(kind)
    model.save_pretrained(tmp_path / "model")
    shutil.copytree(tokenizer_path, tmp_path / "model", dirs_exist_ok=True)
    match = rf"{tmp_path}/model: {type(model).__name__.split('For')[0]}For\w+ can't be used"
    assert_stops(run, tmp_path, ValueError, match, stage, **{name: str(tmp_path / "model")})


def test_stages_with_different_tokenizers(run, tmp_path, chain):
    model = copy_model(chain.reward, tmp_path / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(model)
    assert_stops(run, tmp_path, ValueError, "(?s)model.*different tokenizers", "ppo", reward_model=model)


# --------------------------------------------------------------------------------------------------- batches and output


def test_batch_size_that_is_not_divisible(run, tmp_path, stage):
    match = r"(?s)batch_size.*multiple.*micro_batch_size.*= 3.*4"
    assert_stops(run, tmp_path, ValueError, match, stage, batch_size=4, micro_batch_size=3)


ABOVE_0 = ["temperature", "eval_temperature", "keep_checkpoints", "batch_size", "micro_batch_size", "response_length"]
ABOVE_0 = [("ppo", name) for name in [*ABOVE_0, "num_ppo_epochs", "num_minibatches"]]


@pytest.mark.parametrize(("stage", "name"), [*ABOVE_0, ("sft", "num_epochs")], indirect=["stage"])
def test_numbers_that_must_be_above_0(run, tmp_path, stage, name):
    for value in (0, -2):
        match = f"{name}\n.*greater than 0.*input_value={value}"
        assert_stops(run, tmp_path, ValueError, match, stage, **{name: value})


@pytest.mark.parametrize("number", [{"eval_rows": -1}, {"save_every": -1}, {"seed": -1}, {"lr": -1.0}])
def test_numbers_that_must_not_be_below_0(run, tmp_path, stage, number):
    [(name, value)] = number.items()
    match = f"{name}\n.*greater than or equal to 0.*input_value={value}"
    assert_stops(run, tmp_path, ValueError, match, stage, **number)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_must_be_finite(run, tmp_path, stage, number):
    for name in ("lr", "num_ppo_epochs" if stage == "ppo" else "num_epochs"):
        match = f"{name}\n.*finite number.*input_value={number}"
        assert_stops(run, tmp_path, ValueError, match, stage, **{name: number})


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "ilql"])
def test_less_than_no_updates(run, tmp_path, stage):
    assert_stops(run, tmp_path, ValueError, "max_updates\n.*greater than or equal to 0", stage, max_updates=-1)


def test_an_unknown_argument_is_not_ignored(run, tmp_path, stage):
    assert_stops(run, tmp_path, ValueError, "(?s)learning_rate.*[Uu]nexpected", stage, learning_rate=1e-3)


def test_the_command_line_names_every_number_that_is_out_of_range(stage):
    """In one message, before anything is loaded; the texts are pydantic's."""
    command = [sys.executable, ROOT / f"{stage}.py", "--lr", "-1", "--batch_size", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    found = re.sub(r"[\s│]+", " ", result.stderr)
    for text in ("lr Input should be greater than or equal to 0", "batch_size Input should be greater than 0"):
        assert text in found


def test_minibatches_that_do_not_divide_the_batch(run, tmp_path):
    assert_stops(run, tmp_path, ValueError, "(?s)batch_size.*num_minibatches", "ppo", num_minibatches=3)


def test_fewer_episodes_than_a_batch(run, tmp_path):
    match = "(?s)total_episodes 4.*batch_size 8"
    assert_stops(run, tmp_path, ValueError, match, "ppo", total_episodes=4)


def contents(folder: Path) -> dict:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_folder_of_a_finished_run_is_refused(run, stage, chain):
    folder = getattr(chain, stage)
    before = contents(folder)
    with pytest.raises(FileExistsError, match=rf"(?s){folder}.*--output_dir.*--overwrite"):
        run(stage, out=folder)
    assert contents(folder) == before


def test_folder_of_another_run_is_refused(run, tmp_path, stage):
    """Unfinished, with another learning rate."""
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"args": {"lr": 5.0}, "dataset_fingerprint": "x", "finished": False}))
    before = contents(folder)
    with pytest.raises(FileExistsError, match=r"(?s)other.*--overwrite"):
        run(stage, out=folder)
    assert contents(folder) == before


def test_folder_of_another_program_is_never_deleted(run, tmp_path, stage):
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.txt").write_text("all my work")
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match="thesis"):
            run(stage, out=folder, overwrite=overwrite)
    assert contents(folder) == {"chapter.txt": b"all my work"}


def test_overwrite_replaces_a_run(run, tmp_path):
    folder = tmp_path / "run"
    run("sft", out=folder, max_updates=1, eval_rows=2)
    (folder / "stale.txt").write_text("of the first run")
    run("sft", out=folder, max_updates=2, eval_rows=2, overwrite=True)
    assert not (folder / "stale.txt").exists()
    assert json.loads((folder / "run.json").read_text())["args"]["max_updates"] == 2


def test_overwrite_goes_through_a_link(run, tmp_path):
    folder, link = tmp_path / "run", tmp_path / "link"
    run("sft", out=folder, max_updates=1, eval_rows=2)
    link.symlink_to(folder)
    run("sft", out=link, max_updates=2, eval_rows=2, overwrite=True)
    assert link.is_symlink() and json.loads((folder / "run.json").read_text())["args"]["max_updates"] == 2
    shutil.rmtree(folder)  # as after a kill while the old run was deleted
    run("sft", out=link, max_updates=1, eval_rows=2, overwrite=True)
    assert link.is_symlink() and json.loads((folder / "run.json").read_text())["args"]["max_updates"] == 1
    assert not list(tmp_path.glob("*.deleted_*"))


def test_an_overwrite_that_is_interrupted_leaves_no_half_of_a_run(run, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    run("sft", out=folder, max_updates=1, eval_rows=2)

    def die(path):
        (Path(path) / "run.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sft.shutil, "rmtree", die)
        run("sft", out=folder, max_updates=2, eval_rows=2, overwrite=True)
    run("sft", out=folder, max_updates=2, eval_rows=2)
    assert json.loads((folder / "run.json").read_text())["args"]["max_updates"] == 2


# -------------------------------------------------------------------------------------------------------- NaN, infinite


def test_nan_stops_the_run_and_keeps_the_last_checkpoint(run, tmp_path, stage, monkeypatch):
    """The loss turns NaN in the fourth update; what was saved after the second is still there, and whole."""
    script, name = {"sft": (sft, "sft_loss"), "reward": (reward, "reward_loss"), "ppo": (ppo, "value_loss")}[stage]
    real, calls = getattr(script, name), []
    before = {"sft": 3, "reward": 3, "ppo": 3 * 4}[stage]  # calls of the loss in three updates

    def break_down(*inputs):
        calls.append(1)
        result = real(*inputs)
        if len(calls) <= before:
            return result
        return (result[0] * float("nan"), *result[1:]) if isinstance(result, tuple) else result * float("nan")

    monkeypatch.setattr(script, name, break_down)
    fields = {"num_epochs": 3.0} if stage != "ppo" else {"total_episodes": 64}
    fields |= {"batch_size": 4, "micro_batch_size": 4, "save_every": 2}
    with pytest.raises(FloatingPointError, match=r"(?s)update 3.*not finite.*nan.*checkpoints.*--lr"):
        run(stage, **fields)
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == ["00000002"]
    assert not json.loads((tmp_path / "out" / "run.json").read_text())["finished"]
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_infinite_gradient_stops_before_the_optimiser_uses_it(run, tmp_path, base_models):
    model = copy_model(base_models["gpt_neox"], tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights = {name: weight * (1e30 if "embed_out" in name else 1) for name, weight in weights.items()}
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(FloatingPointError, match="update 0"):
        run("sft", model=str(model))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_step_keeps_weights_and_saves_the_batch_where_a_loss_is_not_finite(tmp_path, bad):
    model, accelerator = torch.nn.Linear(2, 1), Accelerator(project_dir=str(tmp_path))
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=1.0), {"tokens": torch.arange(3)}
    model.weight.grad, model.bias.grad = torch.ones(1, 2), torch.zeros(1)
    before = model.weight.detach().clone()
    with pytest.raises(FloatingPointError, match="not_finite_0.pt"):
        sft.step(accelerator, model, optimizer, {"train/loss": bad}, batch, 7)
    assert torch.equal(model.weight, before)
    saved = torch.load(tmp_path / "not_finite_0.pt")
    assert saved["update"] == 7 and torch.equal(saved["batch"]["tokens"], batch["tokens"])
    assert not math.isfinite(saved["metrics"]["train/loss"])
    metrics = sft.step(accelerator, model, optimizer, {"train/loss": 1.0}, batch, 8)
    assert metrics == {"train/loss": 1.0, "train/grad_norm": pytest.approx(math.sqrt(2))}
    assert torch.allclose(model.weight, before - 1)
