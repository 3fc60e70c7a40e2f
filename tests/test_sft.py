"""sft.py: the loss, the rows and their order, generation, ROUGE, and whole runs against plain computations."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from conftest import ROOT, lean_to_eos, make_config, make_policy, make_sft_rows, pad_rows, read_events
from datasets import load_from_disk
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import sft

PAD, EOS_ID = 320, 0


def plain_token_losses(model, rows: list[list[int]], first_targets: list[int]) -> list[torch.Tensor]:
    """Cross-entropy of each trained token, one unpadded row at a time."""
    losses = []
    for row, first in zip(rows, first_targets):
        logits = model(torch.tensor([row])).logits[0, :-1].float()
        losses.append(F.cross_entropy(logits, torch.tensor(row[1:]), reduction="none")[first - 1 :])
    return losses


def unpadded(split, column: str) -> list[list[int]]:
    return [[token for token in row if token != PAD] for row in split[column]]


# ------------------------------------------------------------------------------------------------- rows and their order


def test_stream_rows_visits_each_row_once_a_pass_in_a_new_order():
    passes = sft.stream_rows(7, 10, 0, 30).view(3, 10)
    assert all(sorted(order.tolist()) == list(range(10)) for order in passes)
    assert len({tuple(order.tolist()) for order in passes}) == 3
    assert sft.stream_rows(8, 10, 0, 10).tolist() not in passes.tolist()  # the next seed's first pass is none of them


def test_stream_rows_does_not_depend_on_how_it_is_cut():
    whole = sft.stream_rows(7, 10, 0, 64)
    for size in (3, 8, 25):
        pieces = [sft.stream_rows(7, 10, start, min(start + size, 64)) for start in range(0, 64, size)]
        assert torch.cat(pieces).tolist() == whole.tolist()


def test_mapped_rows_draw_the_same_numbers_at_every_call():
    """Evaluation samples the same whenever it happens, and takes no random numbers from training."""
    accelerator, lengths = Accelerator(), torch.tensor([5, 3, 9])
    results = []
    for _ in range(2):
        torch.rand(1)  # training goes on
        state = torch.get_rng_state()
        results.append(sft.map_rows(accelerator, lambda rows: torch.rand(len(rows), 4), lengths, 2))
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(*results) and results[0].unique().numel() == 12


@pytest.mark.parametrize("num_rows", [1, 5, 8, 13, 16])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_micro_batches_cover_each_row_once_over_all_ranks(num_rows, num_ranks):
    torch.manual_seed(num_rows)
    lengths, rows = torch.randint(1, 50, (40,)), torch.randperm(40)[:num_rows]
    per_rank = [sft.make_micro_batches(rows, lengths, 4, rank, num_ranks) for rank in range(num_ranks)]
    assert len({len(micro_batches) for micro_batches in per_rank}) == 1  # else a rank waits for the others for ever
    weighted = [(row, weight) for batches in per_rank for batch, weight in batches for row in batch.tolist()]
    assert sorted(row for row, weight in weighted if weight) == sorted(rows.tolist())
    assert all(0 < len(batch) <= 4 for batches in per_rank for batch, _ in batches)
    assert {weight for _, weight in weighted} <= {0.0, 1.0}


def test_micro_batches_hold_rows_of_like_length():
    lengths = torch.tensor([9, 1, 8, 2, 7, 3, 6, 4])
    micro_batches = sft.make_micro_batches(torch.arange(8), lengths, 2, 0, 1)
    assert [lengths[rows].tolist() for rows, _ in micro_batches] == [[1, 2], [3, 4], [6, 7], [8, 9]]


# ---------------------------------------------------------------------------------------------------- model and padding


def test_model_inputs_number_tokens_from_the_first_real_one():
    inputs = sft.model_inputs(torch.tensor([[PAD, PAD, 17, 23, 0], [17, 23, 0, PAD, PAD]]), PAD)
    assert inputs["input_ids"].tolist() == [[0, 0, 17, 23, 0], [17, 23, 0, 0, 0]]
    assert inputs["attention_mask"].tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert inputs["position_ids"][0, 2:].tolist() == [0, 1, 2] == inputs["position_ids"][1, :3].tolist()


def test_padding_changes_no_logits(kind):
    """Left, right, or more of it, in a batch or alone; [PAD] itself has no row in GPT-2's or Pythia's embedding."""
    model, rows = make_policy(kind, vocab_size=320), [[5, 6, 7, 8, 9], [10, 11, 12]]
    with torch.no_grad():
        for left in (True, False):
            for length in (5, 12):
                tokens = torch.tensor(pad_rows(rows, PAD, left, length))
                packed = model(**sft.packed_inputs(model, tokens, PAD)).logits[0].split([5, 3])
                masked = model(**sft.model_inputs(tokens, PAD)).logits
                for row, padded, row_logits, packed_logits in zip(rows, tokens, masked, packed):
                    alone = make_policy(kind, vocab_size=320)(torch.tensor([row])).logits[0]
                    torch.testing.assert_close(packed_logits, alone, atol=1e-5, rtol=1e-5)
                    torch.testing.assert_close(row_logits[padded != PAD], alone, atol=1e-5, rtol=1e-5)


def test_every_dropout_is_off(tmp_path, kind):
    make_config(kind, attention_dropout=0.1).save_pretrained(tmp_path)
    if kind == "gpt2":
        make_config(kind, attn_pdrop=0.1, embd_pdrop=0.2, resid_pdrop=0.3).save_pretrained(tmp_path)
    if kind == "gpt_neox":
        make_config(kind, attention_dropout=0.1, hidden_dropout=0.2).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(sft.load_config(str(tmp_path))).train()
    tokens = torch.randint(1, 300, (2, 20))
    assert torch.equal(model(tokens).logits, model(tokens).logits)


def test_tokenizer_gets_a_pad_of_its_own(base_models):
    tokenizer = sft.load_tokenizer(str(base_models["gpt_neox"]))
    assert tokenizer.pad_token == "[PAD]" and tokenizer.pad_token_id == PAD != tokenizer.eos_token_id


def test_pythias_tokenizer_from_the_hub_gets_the_datasets_pad(tmp_path):
    """Its configuration there names GPTNeoXTokenizer, to which transformers 5 gives the pad <|padding|>."""
    source = ROOT.parent / "shared/data/tokenizers/pythia"
    if not source.exists():
        pytest.skip(f"no tokenizer in {source}")
    shutil.copy(source / "tokenizer.json", tmp_path)
    config = {"tokenizer_class": "GPTNeoXTokenizer", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token == "<|padding|>"
    tokenizer = sft.load_tokenizer(str(tmp_path))
    assert (tokenizer.pad_token, tokenizer.pad_token_id, len(tokenizer)) == ("[PAD]", 50277, 50278)
    tokenizer.save_pretrained(tmp_path / "saved")
    assert sft.load_tokenizer(str(tmp_path / "saved")).pad_token_id == 50277


# ----------------------------------------------------------------------------------------------------------------- loss


class OneLogit(torch.nn.Module):
    """In place of a policy: vocabulary 4, uniform logits but for EOS, token 0, after token 3, where it has p = 5/8."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="packed")
        self.head = torch.nn.Linear(4, 4, bias=False)
        self.head.weight.data = torch.zeros(4, 4).index_put((torch.tensor(0), torch.tensor(3)), torch.tensor(5.0).log())

    def forward(self, input_ids, logits_to_keep, **_):
        return SimpleNamespace(logits=self.head(F.one_hot(input_ids, 4).float())[:, logits_to_keep])


def test_loss_by_hand():
    """ln 4 a token, but for EOS; the first token is trained in no case, padding neither."""
    tokens, policy = torch.tensor([[1, 2, 3, 0, 9], [1, 2, 9, 9, 9]]), OneLogit()  # 9 is [PAD]
    mask = (tokens != 9) & (torch.arange(5) >= 1)
    assert sft.sft_loss(policy, tokens, mask, 9).item() == pytest.approx(3 * math.log(4) + math.log(8 / 5), abs=1e-6)
    mask[0, :3] = mask[1] = False  # the end of the first row alone: 0 after 3
    total = sft.sft_loss(policy, tokens, mask, 9)
    assert total.item() == pytest.approx(math.log(8 / 5), abs=1e-6)
    total.backward()
    assert policy.head.weight.grad[0, 3] == pytest.approx(5 / 8 - 1)  # the logit of EOS is raised


def test_loss_and_gradients_are_those_of_the_plain_computation(kind):
    """Packed, and padded to any width, against transformers' own loss of each row by itself."""
    rows, results = [[5, 6, 7, 0], [8, 9, 10, 11, 12, 0]], []
    for length in (6, 15, None):
        model = make_policy(kind)
        if length:
            tokens = torch.tensor(pad_rows(rows, PAD, length=length))
            loss = sft.sft_loss(model, tokens, (tokens != PAD) & (torch.arange(length) >= 1), PAD)
        else:
            batches = [torch.tensor([row]) for row in rows]
            loss = sum(model(row, labels=row).loss * (row.shape[1] - 1) for row in batches)
        loss.backward()
        results.append((loss, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    torch.testing.assert_close(results[0], results[2], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(results[1], results[2], atol=1e-5, rtol=1e-5)


def test_training_fills_no_cache():
    model = make_policy("llama")
    assert model.config.use_cache
    assert (
        model(**sft.packed_inputs(model, torch.tensor([[5, 6, 7, PAD], [8, 9, 10, 11]]), PAD)).past_key_values is None
    )


def test_only_trained_tokens_have_logits():
    """2 of 10 tokens are trained: no tensor of the vocabulary's width has more rows, forward and backward."""
    rows, tokens = [], torch.randint(1, 300, (1, 10))

    class Widest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dim() > 1 and result.shape[-1] == 1009:
                rows.append(result.numel() // 1009)
            return result

    model = make_policy("gpt_neox", vocab_size=1009)
    with Widest():
        sft.sft_loss(model, tokens, torch.arange(10)[None] >= 8, PAD).backward()
    assert set(rows) == {2, model.config.hidden_size}  # logits and their gradients; the gradient of the weight


@pytest.mark.parametrize("loss_on", ["query_response", "response"])
def test_run_logs_the_token_mean_of_the_whole_batch(tmp_path, run_sft, base_models, sft_dataset, loss_on):
    """Train loss of the first batch and validation loss are token means, whatever the micro-batches (lr 0)."""
    metrics, folder = run_sft(tmp_path / "run", lr=0.0, micro_batch_size=2, max_updates=1, loss_on=loss_on, seed=5)
    model = AutoModelForCausalLM.from_pretrained(base_models["gpt_neox"]).float()
    data, expected = load_from_disk(sft_dataset), {}
    for name, split in (
        ("train", data["train"].select(sft.stream_rows(5, 13, 0, 4).tolist())),
        ("eval", data["validation"]),
    ):
        sequences, queries = unpadded(split, "query_reference_response_token"), unpadded(split, "query_token")
        first = [len(query) if loss_on == "response" else 1 for query in queries]
        with torch.no_grad():
            expected[name] = torch.cat(plain_token_losses(model, sequences, first)).mean().item()
    assert read_events(folder)["train/loss"][0] == (4, pytest.approx(expected["train"], abs=1e-5))
    assert metrics["eval/validation/loss"] == pytest.approx(expected["eval"], abs=1e-5)


def test_the_response_is_found_where_the_sequence_has_other_query_tokens(tmp_path, run_sft, base_models, sft_dataset):
    """As in some of the Hub's rows: its sequences were tokenised from a text that had lost spaces."""

    def publish(row: dict) -> dict:
        sequence, n = row["query_reference_response_token"], len([t for t in row["query_token"] if t != PAD])
        return {"query_reference_response_token": [*sequence[: n - 6], *sequence[n - 5 :], PAD]}

    load_from_disk(sft_dataset).map(publish).save_to_disk(tmp_path / "published")
    fields = {"lr": 0.0, "max_updates": 1, "loss_on": "response", "dataset": str(tmp_path / "published")}
    metrics, _ = run_sft(tmp_path / "run", **fields)
    model = AutoModelForCausalLM.from_pretrained(base_models["gpt_neox"]).float()
    split = load_from_disk(tmp_path / "published")["validation"]
    sequences, responses = (unpadded(split, c) for c in ("query_reference_response_token", "reference_response_token"))
    first = [len(sequence) - len(response) for sequence, response in zip(sequences, responses)]
    with torch.no_grad():
        expected = torch.cat(plain_token_losses(model, sequences, first)).mean().item()
    assert metrics["eval/validation/loss"] == pytest.approx(expected, abs=1e-5)


def test_samples_are_a_table_in_tensorboard(chain):
    """Of the posts, too, whose line breaks would end a row."""
    paths = {"sft": ["samples"], "dpo": ["samples"], "ilql": ["samples_beta0", "samples_beta4"], "ppo": ["samples"]}
    for stage, tags in paths.items():
        events = EventAccumulator(str(next((getattr(chain, stage) / "runs").rglob("events*")).parent)).Reload()
        for tag in tags:
            text = events.Tensors(f"{tag}/text_summary")[-1].tensor_proto.string_val[0].decode()
            header, rule, *rows = text.split("\n")
            assert header.startswith("| query | response | ") and rule == "| --- | --- | --- |" and len(rows) == 4
            assert all(row.count(" | ") == 2 and "<br><br>TITLE: " in row for row in rows)


def test_accumulation_changes_nothing(tmp_path, run_sft):
    """Micro-batches of 4, and of 1 accumulated four times, over batches whose last is smaller."""
    weights, losses = [], []
    for size in (4, 1):
        _, folder = run_sft(tmp_path / str(size), micro_batch_size=size)
        weights.append(AutoModelForCausalLM.from_pretrained(folder).state_dict())
        losses.append([value for _, value in read_events(folder)["train/loss"]])
    assert len(losses[0]) == 4  # 13 rows in batches of 4
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], atol=2e-4, rtol=1e-3)


def test_gradient_checkpointing_changes_nothing(tmp_path, run_sft):
    losses = []
    for on in (False, True):
        _, folder = run_sft(tmp_path / str(on), gradient_checkpointing=on, max_updates=3)
        losses.append([value for _, value in read_events(folder)["train/loss"]])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_learning_rate_follows_a_cosine_to_zero(tmp_path, run_sft):
    _, folder = run_sft(tmp_path / "run", lr=2e-3, eval_rows=2)
    rates = [value for _, value in read_events(folder)["train/lr"]]
    assert rates == pytest.approx([2e-3 * 0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(4)])


def test_episodes_are_the_axis(tmp_path, run_sft):
    _, folder = run_sft(tmp_path / "run", num_epochs=1.5, eval_rows=2)
    assert [step for step, _ in read_events(folder)["train/loss"]] == [4, 8, 12, 16, 19]  # 19 = 1.5 x 13, cut


# ----------------------------------------------------------------------------------------------------------- generation


def test_truncate_after_eos():
    """DESIGN 4, number 7."""
    eos, pad = 2, 3
    rows = torch.tensor([[7, eos, 9, eos], [7, 8, 9, 10], [eos, eos, 7, 7]])
    expected = [[7, eos, pad, pad], [7, 8, 9, 10], [eos, pad, pad, pad]]
    assert sft.truncate_after_eos(rows, eos, pad).tolist() == expected


@pytest.fixture
def queries(tokenizer):
    return torch.tensor(make_sft_rows(tokenizer, 6, 9)["query_token"])


def test_stopping_early_changes_nothing_that_is_used(tokenizer, queries):
    model, steps = make_policy("gpt_neox", initializer_range=0.1), []
    lean_to_eos(model, 5.5)
    model.register_forward_hook(lambda *_: steps.append(1))
    torch.manual_seed(3)
    early, _ = sft.generate(model, queries, tokenizer, 40, 1.0)
    assert (early == EOS_ID).any(1).all() and early.shape == (6, 40)
    assert len(steps) == (early != PAD).sum(1).max() < 40  # one pass a token, until the last row has its EOS

    class Endless:
        eos_token_id, pad_token_id = 329, PAD  # never sampled, so nothing ends

        def __len__(self):
            return len(tokenizer)

    torch.manual_seed(3)
    full, _ = sft.generate(model, queries, Endless(), 40, 1.0)
    assert len(steps) > 40 and (full != PAD).all()
    assert torch.equal(early, sft.truncate_after_eos(full, EOS_ID, PAD))


def test_tokens_are_sampled_in_proportion_to_their_probability(tokenizer):
    """20,000 samples of one token against the tempered softmax over the tokens that may be sampled."""
    model = make_policy("gpt_neox", initializer_range=0.1)
    query = torch.tensor([[PAD, PAD, 17, 23]])
    with torch.no_grad():
        logits = model(query[:, 2:]).logits[0, -1] / 0.7
    expected = logits[:320].softmax(-1)
    tokens, logprobs = sft.generate(model, query.repeat(20_000, 1), tokenizer, 1, 0.7)
    found = tokens[:, 0].bincount(minlength=320) / 20_000
    assert (found - expected).abs().max() < 4 * (expected.max() / 20_000) ** 0.5
    assert (found - expected).abs().sum() < 0.15
    # their log-probabilities are those that training computes: of the whole vocabulary
    torch.testing.assert_close(logprobs[:, 0], logits.log_softmax(-1)[tokens[:, 0]], atol=1e-5, rtol=1e-5)


def test_sampled_logits_are_in_fp32_before_the_temperature(tokenizer, queries):
    """Those of a bf16 model: divided in bf16, log-probabilities would be some 1e-2 off from those that are scored."""
    model = make_policy("gpt_neox").bfloat16()
    tokens, logprobs = sft.generate(model, queries[:, -9:], tokenizer, 1, 0.7)
    logits = model(**sft.model_inputs(queries[:, -9:], PAD)).logits[:, -1].float() / 0.7
    torch.testing.assert_close(logprobs, logits.log_softmax(1).gather(1, tokens), atol=1e-5, rtol=1e-5)


def test_unowned_ids_are_never_sampled(tokenizer, queries, kind):
    """[PAD] stands only after EOS, and ids that no token owns nowhere, though the model gives them most weight."""
    model = make_policy(kind)

    def favour_unowned(module, args, kwargs, output):
        output.logits[..., 320:] += 50.0
        output.logits[..., EOS_ID] += 2.0

    model.register_forward_hook(favour_unowned, with_kwargs=True)
    responses, _ = sft.generate(model, queries, tokenizer, 25, 1.0)
    is_pad = responses == PAD
    assert (responses[~is_pad] < 320).all()
    after_eos = (responses == EOS_ID).int().cumsum(1) - (responses == EOS_ID).int() > 0
    assert torch.equal(is_pad, after_eos)


def test_generation_is_greedy_at_low_temperature_and_padding_does_not_matter(tokenizer, queries, kind):
    """Against token-by-token argmax of one unpadded row after the other."""
    model = make_policy(kind)
    together, _ = sft.generate(model, queries, tokenizer, 8, 1e-4)
    for query, response in zip(queries, together):
        tokens = query[query != PAD]
        for token in response:
            with torch.no_grad():
                expected = model(tokens[None]).logits[0, -1, :320].argmax()
            assert token == expected
            if token == EOS_ID:
                break
            tokens = torch.cat([tokens, token[None]])


def test_queries_are_trimmed_to_the_longest_of_a_batch(tokenizer, queries):
    model, widths = make_policy("gpt_neox"), []
    model.register_forward_pre_hook(lambda *args: widths.append(args[-1]["input_ids"].shape[1]), with_kwargs=True)
    sft.generate(model, F.pad(queries, (7, 0), value=PAD), tokenizer, 4, 1.0)
    assert widths[0] == (queries != PAD).sum(1).max() and set(widths[1:]) <= {1}


def test_under_autocast_earlier_tokens_are_kept_in_bf16(tokenizer, queries, kind, monkeypatch):
    """Where transformers' cache keeps what it is given. Attention, which autocast runs in bf16, gives the same."""
    model, caches, sampled = make_policy(kind), [], []
    model.register_forward_pre_hook(lambda *args: caches.append(args[-1]["past_key_values"]), with_kwargs=True)
    for cache in (DynamicCache, sft.OnePrecisionCache):
        monkeypatch.setattr(sft, "OnePrecisionCache", cache)
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16):
            sampled.append(sft.generate(model, queries, tokenizer, 8, 1.0))
    assert {x.dtype for layer in caches[-1].layers for x in (layer.keys, layer.values)} == {torch.bfloat16}
    assert torch.equal(sampled[0][0], sampled[1][0]) and torch.equal(sampled[0][1], sampled[1][1])


# ---------------------------------------------------------------------------------------------------- evaluation, files


def test_rouge_by_hand():
    """1 of 2 bigrams and 2 of 3 words found; then nothing; then all: means of F over the corpus, not over batches."""
    rouge = sft.compute_rouge(["the cat sat", "dog", "a b"], ["the cat", "cat", "a b"])
    assert rouge["eval/validation/rouge1"] == pytest.approx((0.8 + 0 + 1) / 3)
    assert rouge["eval/validation/rouge2"] == pytest.approx((2 / 3 + 0 + 1) / 3)
    assert rouge["eval/validation/rougeL"] == pytest.approx((0.8 + 0 + 1) / 3)


def test_rouge_l_needs_the_order():
    rouge = sft.compute_rouge(["sat cat the"], ["the cat sat"])
    assert rouge["eval/validation/rouge1"] == pytest.approx(1.0)
    assert rouge["eval/validation/rougeL"] == pytest.approx(1 / 3)


def test_rouge_is_the_same_by_both_packages(monkeypatch):
    texts = ["my dog broke the car. help", "I lost it", "", "the exam was long."]
    references = ["the dog broke my car", "I lost the exam", "nothing", "the exam was very long"]
    try:
        sft.evaluate.load("rouge")
    except (OSError, ImportError):
        pytest.skip("the ROUGE module of `evaluate` comes from the Hub, which is out of reach")
    by_evaluate = sft.compute_rouge(texts, references)
    monkeypatch.setattr(sft.evaluate, "load", lambda name: (_ for _ in ()).throw(FileNotFoundError(name)))
    assert sft.compute_rouge(texts, references) == pytest.approx(by_evaluate)


def test_the_command_of_a_run_can_be_given_to_a_shell(run_sft, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["sft.py", "--model", "my models/a"])
    _, folder = run_sft(tmp_path / "run", max_updates=1, eval_rows=1)
    for name in ("run.json", "README.md"):
        assert "accelerate launch sft.py --model 'my models/a'" in (folder / name).read_text()


def test_run_writes_what_the_next_stage_and_a_reader_need(chain):
    run = json.loads((chain.sft / "run.json").read_text())
    assert run["finished"] and run["metrics"] == pytest.approx(chain.metrics["sft"])
    assert run["args"]["num_epochs"] == 3.0 and run["args"]["adam_eps"] == 1e-5
    assert {"torch", "transformers"} <= run["versions"].keys() and run["git_commit"] and run["dataset_fingerprint"]
    assert "eval/validation/rougeL" in (chain.sft / "README.md").read_text()
    assert not list(chain.sft.glob("*.bin")) and (chain.sft / "model.safetensors").exists()
    samples = [json.loads(line) for line in (chain.sft / "samples_validation.jsonl").read_text().splitlines()]
    assert len(samples) == 6 and all(sample.keys() == {"query", "response", "reference"} for sample in samples)
    assert all(sample["query"].endswith("TL;DR:") for sample in samples)
    assert AutoTokenizer.from_pretrained(chain.sft).pad_token == "[PAD]"


def test_loss_falls(chain):
    losses = [value for _, value in read_events(chain.sft)["train/loss"]]
    assert losses[-1] < 0.7 * losses[0]


def test_models_of_all_kinds_train(tmp_path, run_sft, base_models, kind):
    metrics, folder = run_sft(tmp_path / kind, model=str(base_models[kind]), max_updates=6, num_epochs=9.0, lr=2e-2)
    losses = [value for _, value in read_events(folder)["train/loss"]]
    assert losses[-1] < losses[0] and math.isfinite(metrics["eval/validation/loss"])


def test_short_names_and_default_folder(tmp_path, monkeypatch, run_sft, base_models):
    """--model pythia-... is the Hub's deduped model; output goes to models/<model>/sft_<seed>."""
    assert sft.PYTHIA["pythia-1b"] == "EleutherAI/pythia-1b-deduped" and len(sft.PYTHIA) == 8
    monkeypatch.setitem(sft.PYTHIA, "pythia-1b", str(base_models["gpt_neox"]))
    monkeypatch.chdir(tmp_path)
    run_sft("", model="pythia-1b", max_updates=1, eval_rows=2, seed=3)
    assert (tmp_path / "models/pythia-1b/sft_3/model.safetensors").exists()


def test_dataset_folders_of_jsonl_and_parquet_are_as_good(tmp_path, sft_dataset, tokenizer):
    columns, data = ["query_token", "query_reference_response_token"], load_from_disk(sft_dataset)
    for kind in ("json", "parquet"):
        folder = tmp_path / kind / "data"  # as in a Hub repository
        folder.mkdir(parents=True)
        for split, rows in data.items():
            getattr(rows, f"to_{kind}")(folder / (f"{split}.jsonl" if kind == "json" else f"{split}-0000.parquet"))
        (folder / "validation_cnndm.jsonl").write_text('{"other": 1}\n')  # another split's file is not read
        for split in ("train", "validation"):
            _, expected = sft.load_split(str(sft_dataset), split, columns, tokenizer, make_config("gpt_neox"))
            for source in (folder, folder.parent):
                _, found = sft.load_split(str(source), split, columns, tokenizer, make_config("gpt_neox"))
                assert all(torch.equal(expected[column], found[column]) for column in columns)


def test_a_response_length_of_another_tokenizer_is_told(sft_dataset, tokenizer, capsys):
    columns = ["query_token", "reference_response_token"]
    lengths = [
        len(tokenizer(text).input_ids) for text in load_from_disk(sft_dataset)["validation"]["reference_response"]
    ]
    for limit, told in ((min(lengths) - 1, True), (max(lengths), False), (0, False)):
        sft.load_split(str(sft_dataset), "validation", columns, tokenizer, make_config("gpt_neox"), sampled=limit)
        message = f"most of 'reference_response_token' is longer than --response_length {limit}\n"
        assert capsys.readouterr().err.endswith(message) == told


def test_published_columns_are_the_defaults():
    """The pre-tokenised datasets of the paper are found without a flag (Table 3's settings, too)."""
    args = sft.Args()
    assert args.dataset.startswith("vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing")
    assert (args.lr, args.adam_eps, args.batch_size, args.num_epochs) == (3e-6, 1e-5, 128, 1.0)
    assert (args.response_length, args.eval_temperature, args.loss_on) == (53, 0.01, "query_response")
