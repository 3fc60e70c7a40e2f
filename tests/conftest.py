"""What all tests share: the environment, a tiny tokenizer, tiny models of three kinds, and tiny datasets."""

import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"  # real data and papers; tests that read it skip where it is absent
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "ACCELERATE_USE_CPU": "true",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",  # models of this size are slower on more
}
os.environ.update(ENVIRONMENT)  # before the libraries that read it are imported
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402
import torch  # noqa: E402
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from datasets import Dataset, DatasetDict, disable_progress_bars  # noqa: E402
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402
from tensorboard.summary.writer import event_file_writer  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

torch.set_num_threads(1)
disable_progress_bars()
# files of one second are read in the order of this number, as text: 10 would come before 9
event_file_writer._global_uid = event_file_writer.AtomicCounter(10**6)

KINDS = ("gpt_neox", "gpt2", "llama")
EOS = "<|endoftext|>"
VOCAB_SIZE = 330  # rows of the embedding; the tokenizer has 320 entries, [PAD] is 320, 321 to 329 are no one's
NOUNS = ("dog", "boss", "sister", "car", "landlord", "exam", "wedding", "laptop", "neighbour", "job")
VERBS = ("lost", "hates", "sold", "broke", "wants", "left", "found", "forgot")


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """accelerate keeps its state for the life of a process; each run in a test starts without it."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    torch.manual_seed(0)
    yield
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def make_text(rng: random.Random, num_clauses: int) -> str:
    return ". ".join(f"my {rng.choice(NOUNS)} {rng.choice(VERBS)} the {rng.choice(NOUNS)}" for _ in range(num_clauses))


def make_post(rng: random.Random) -> tuple[str, str]:
    """A post as a query, and a summary of it."""
    post = make_text(rng, rng.randint(1, 5))
    return f"SUBREDDIT: r/{rng.choice(NOUNS)}\n\nTITLE: help\n\nPOST: {post}\n\nTL;DR:", " " + post.split(". ")[0]


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory) -> Path:
    """Byte-level BPE of 320 entries, EOS 0, no [PAD] (as Pythia's)."""
    rng = random.Random(0)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator(["".join(make_post(rng)) for _ in range(200)], trainer)
    path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, bos_token=EOS).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_path)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert len(tokenizer) == 321 and tokenizer.pad_token_id == 320 and tokenizer.eos_token_id == 0
    return tokenizer


def make_config(kind: str, width: int = 16, vocab_size: int = VOCAB_SIZE, **overrides):
    """A 2-layer model's configuration; weights are large, so that what goes wrong shows in the results."""
    size = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 2 * width}
    common = {"vocab_size": vocab_size, "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.3} | overrides
    if kind == "gpt2":
        return GPT2Config(n_embd=width, n_layer=2, n_head=2, n_positions=768, **common)
    if kind == "llama":
        return LlamaConfig(num_key_value_heads=1, max_position_embeddings=1024, **size, **common)
    return GPTNeoXConfig(max_position_embeddings=1024, **size, **common)


def randomise_norms(model) -> None:
    """Norm weights and biases as after training, not 1 and 0."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)


def make_policy(kind: str, seed: int = 0, **overrides):
    torch.manual_seed(seed)
    policy = AutoModelForCausalLM.from_config(make_config(kind, **overrides)).float().eval()
    randomise_norms(policy)
    return policy


def make_reward_model(kind: str, seed: int = 0, **overrides):
    torch.manual_seed(seed)
    config = make_config(kind, num_labels=1, **{"pad_token_id": 320} | overrides)
    model = AutoModelForSequenceClassification.from_config(config).float().eval()
    randomise_norms(model)
    return model


def lean_to_eos(model, amount: float) -> None:
    """Raise a GPT-NeoX's logit of EOS by one amount everywhere: the norm's bias is 1 / D, and the rest sums up to 0."""
    norm, head = model.gpt_neox.final_layer_norm, model.get_output_embeddings()
    norm.weight.data.fill_(1.0)
    norm.bias.data.fill_(1.0 / len(norm.bias))
    head.weight.data[0] = amount


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def base_models(tmp_path_factory, tokenizer_path) -> dict[str, Path]:
    """Folder of a tiny random base model of each kind, with the tokenizer."""
    paths = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, path in paths.items():
        make_policy(kind).save_pretrained(path)
        PreTrainedTokenizerFast.from_pretrained(tokenizer_path).save_pretrained(path)
    return paths


def pad_rows(rows: list[list[int]], pad: int, left: bool = False, length: int = 0) -> list[list[int]]:
    length = max(length, *map(len, rows))
    return [[pad] * (length - len(row)) + row if left else row + [pad] * (length - len(row)) for row in rows]


def make_sft_rows(tokenizer, num_rows: int, seed: int) -> Dataset:
    rng, pad = random.Random(seed), tokenizer.pad_token_id
    posts = [make_post(rng) for _ in range(num_rows)]
    queries = [tokenizer(query).input_ids for query, _ in posts]
    references = [tokenizer(summary + EOS).input_ids for _, summary in posts]
    columns = {"query": [query for query, _ in posts], "reference_response": [text + EOS for _, text in posts]}
    columns["query_token"] = pad_rows(queries, pad, left=True, length=100)
    columns["reference_response_token"] = pad_rows(references, pad, length=30)
    columns["query_reference_response_token"] = pad_rows([q + r for q, r in zip(queries, references)], pad, length=125)
    return Dataset.from_dict(columns)


def make_comparison_rows(tokenizer, num_rows: int, seed: int, batch: str = "batch3") -> Dataset:
    """Comparisons of a true summary against one of another post, the true one chosen nine times in ten."""
    rng, pad, columns = random.Random(seed), tokenizer.pad_token_id, {}
    rows = []
    for i in range(num_rows):
        query, good = make_post(rng)
        pair = [good, " " + make_text(rng, 2)]
        choice = int(rng.random() < 0.1)
        ids = [tokenizer(text + EOS).input_ids for text in (pair[choice], pair[1 - choice])]
        policies = ["ref", "sup4"]
        rows.append((query, tokenizer(query).input_ids, ids, pair, choice, policies, 1 + i % 9))
    columns["query"] = [row[0] for row in rows]
    columns["query_token"] = pad_rows([row[1] for row in rows], pad, left=True)
    for i, name in enumerate(("chosen", "rejected")):
        columns[name] = [row[3][row[4] if i == 0 else 1 - row[4]] for row in rows]
        columns[f"{name}_token"] = pad_rows([row[2][i] for row in rows], pad, length=60)
        columns[f"query_{name}_token"] = pad_rows([row[1] + row[2][i] for row in rows], pad, length=150)
        columns[f"{name}_policy"] = [row[5][row[4] if i == 0 else 1 - row[4]] for row in rows]
    columns["choice"] = [row[4] for row in rows]
    columns["policies"] = ["ref--sup4"] * num_rows
    columns["batch"], columns["split"] = [batch] * num_rows, [("train", "valid1")[i % 2] for i in range(num_rows)]
    columns["extra.confidence"] = [row[6] for row in rows]
    return Dataset.from_dict(columns)


@pytest.fixture(scope="session")
def sft_dataset(tmp_path_factory, tokenizer) -> Path:
    """save_to_disk folder of pre-tokenised posts; 13 train rows, so that batches of 4 leave a smaller one."""
    path = tmp_path_factory.mktemp("sft_dataset") / "sft"
    DatasetDict({"train": make_sft_rows(tokenizer, 13, 1), "validation": make_sft_rows(tokenizer, 6, 2)}).save_to_disk(
        path
    )
    return path


@pytest.fixture(scope="session")
def comparisons(tmp_path_factory, tokenizer) -> Path:
    path = tmp_path_factory.mktemp("comparisons") / "comparisons"
    splits = {"train": make_comparison_rows(tokenizer, 13, 3), "validation": make_comparison_rows(tokenizer, 10, 4)}
    splits["validation_cnndm"] = make_comparison_rows(tokenizer, 5, 5, batch="cnndm0")
    DatasetDict(splits).save_to_disk(path)
    return path


@pytest.fixture(scope="session")
def run_sft(base_models, sft_dataset):
    """Function that runs sft.py in this process -> (final metrics, output folder)."""
    import sft

    def run(output_dir: Path, **overrides):
        fields = {"model": str(base_models["gpt_neox"]), "dataset": str(sft_dataset), "output_dir": str(output_dir)}
        fields |= {"batch_size": 4, "micro_batch_size": 4, "response_length": 12, "lr": 1e-2} | overrides
        return run_main(sft, fields), Path(output_dir)

    return run


@pytest.fixture(scope="session")
def run_reward(sft_dataset, comparisons):
    """Function that runs reward.py in this process -> (final metrics, output folder)."""
    import reward

    def run(sft_model: Path, output_dir: Path, **overrides):
        fields = {"sft_model": str(sft_model), "dataset": str(comparisons), "sft_dataset": str(sft_dataset)}
        fields |= {"output_dir": str(output_dir), "batch_size": 4, "micro_batch_size": 4, "lr": 1e-2} | overrides
        return run_main(reward, fields), Path(output_dir)

    return run


@pytest.fixture(scope="session")
def run_ppo(sft_dataset):
    """Function that runs ppo.py in this process -> (final metrics, output folder)."""
    import ppo

    def run(sft_model: Path, reward_model: Path, output_dir: Path, **overrides):
        fields = {"sft_model": str(sft_model), "reward_model": str(reward_model), "dataset": str(sft_dataset)}
        fields |= {"output_dir": str(output_dir), "batch_size": 8, "micro_batch_size": 4, "total_episodes": 24}
        fields |= {"response_length": 12, "lr": 1e-3} | overrides
        return run_main(ppo, fields), Path(output_dir)

    return run


@pytest.fixture(scope="session")
def run_dpo(sft_dataset, comparisons):
    """Function that runs dpo.py in this process -> (final metrics, output folder)."""
    import dpo

    def run(sft_model: Path, output_dir: Path, **overrides):
        fields = {"sft_model": str(sft_model), "dataset": str(comparisons), "sft_dataset": str(sft_dataset)}
        fields |= {"output_dir": str(output_dir), "batch_size": 4, "micro_batch_size": 4, "response_length": 12}
        return run_main(dpo, fields | {"lr": 1e-3} | overrides), Path(output_dir)

    return run


@pytest.fixture(scope="session")
def run_ilql(base_models, sft_dataset, comparisons):
    """Function that runs ilql.py in this process -> (final metrics, output folder)."""
    import ilql

    def run(output_dir: Path, **overrides):
        fields = {"model": str(base_models["gpt_neox"]), "dataset": str(comparisons), "sft_dataset": str(sft_dataset)}
        fields |= {"output_dir": str(output_dir), "batch_size": 4, "micro_batch_size": 4, "response_length": 12}
        return run_main(ilql, fields | {"lr": 1e-2} | overrides), Path(output_dir)

    return run


def run_main(script, fields: dict) -> dict:
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    return script.main(script.Args(**fields))


@pytest.fixture(scope="session")
def chain(tmp_path_factory, run_sft, run_reward, run_ppo, run_dpo, run_ilql) -> SimpleNamespace:
    """The training stages on the tiny GPT-NeoX, one after the other: metrics and folder of each."""
    folder = tmp_path_factory.mktemp("chain")
    sft_metrics, sft_path = run_sft(folder / "sft", num_epochs=3.0)
    reward_metrics, reward_path = run_reward(sft_path, folder / "reward", num_epochs=3.0)
    ppo_metrics, ppo_path = run_ppo(sft_path, reward_path, folder / "ppo", sample_every=1)
    dpo_metrics, dpo_path = run_dpo(sft_path, folder / "dpo", num_epochs=3.0)
    ilql_metrics, ilql_path = run_ilql(folder / "ilql", num_epochs=3.0)
    return SimpleNamespace(
        sft=sft_path,
        reward=reward_path,
        ppo=ppo_path,
        dpo=dpo_path,
        ilql=ilql_path,
        metrics={
            "sft": sft_metrics,
            "reward": reward_metrics,
            "ppo": ppo_metrics,
            "dpo": dpo_metrics,
            "ilql": ilql_metrics,
        },
    )


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Scalars that a run logged to TensorBoard: {key: [(step, value)]}."""
    logged: dict[str, list] = {}
    for path in sorted({path.parent for path in (folder / "runs").rglob("events.out*")}):
        accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0})
        accumulator.Reload()
        for key in accumulator.Tags()["scalars"]:
            logged.setdefault(key, []).extend((event.step, event.value) for event in accumulator.Scalars(key))
    return logged


def need_shared(*parts: str) -> Path:
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"needs the data in {path.relative_to(ROOT.parent)}, beside the project")
    return path
