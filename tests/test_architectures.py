"""Kinds of models besides GPT-NeoX, GPT-2 and Llama: packed training and sampling are what the model itself says, or
the model is refused when it is loaded. Tiny random models with weights of trained size, so that what is wrong shows."""

import math

import pytest
import torch
from conftest import pad_rows
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import dpo
import ilql
import reward
import sft

VOCAB_SIZE, PAD, EOS_ID, LAYERS = 320, 320, 0, ["sliding_attention", "full_attention"]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "head_dim": 8}
SIZES |= {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "rotary_dim": 4, "d_model": 32, "n_layers": 2}
SIZES |= {"n_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32, "num_local_experts": 4, "num_experts": 4}
SIZES |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 2, "vocab_size": VOCAB_SIZE}
SIZES |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "max_position_embeddings": 128}
KINDS = {
    "mistral": {},
    "mixtral": {"router_jitter_noise": 0.2},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "gemma": {},
    "gemma3_text": {"layer_types": LAYERS, "sliding_window": 64},
    "phi": {},
    "phi3": {},
    "opt": {"layerdrop": 0.5},
    "olmo2": {},
    "starcoder2": {},
    "stablelm": {},
    "smollm3": {},
    "glm4": {},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "attention_multiplier": 0.25},
    "cohere": {"logit_scale": 0.25},
}
SCALED = ("granite", "cohere")  # logits are not what the output embedding gives
REFUSED = {
    "gptj": {},
    "codegen": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4},
    "bloom": {},
    "mpt": {},
    "falcon": {},
    "gpt_oss": {"layer_types": LAYERS, "sliding_window": 64},
    "gemma2": {"layer_types": LAYERS, "sliding_window": 64},
    "mamba": {"state_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 32},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4},
}
REFUSED["qwen3_next"] |= {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
SHAPES = "must match the size|too many values|attn_mask dtype"  # what the architecture's own code says of the mask
REASONS = dict.fromkeys(("gemma2", "gpt_oss"), "caps scores or has sinks")
REASONS |= dict.fromkeys(("lfm2", "recurrent_gemma", "qwen3_next"), "hidden states differ by .* standard deviations")


def make_config(kind: str):
    known, more = CONFIG_MAPPING[kind](), (KINDS | REFUSED)[kind]
    names = set(known.to_dict()) | set(known.attribute_map)
    sizes = {
        name: value for name, value in SIZES.items() if name in names and known.attribute_map.get(name) not in SIZES
    }
    return CONFIG_MAPPING[kind](**sizes | more)


def fill(model):
    """Weights as large as after training: all states, norms and scales matter."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() >= 2:
            parameter.data = noise * (1.0 if "emb" in name else 1.3 / math.sqrt(parameter.shape[-1]))
        elif "A_log" not in name and "dt" not in name and "recurrent_param" not in name:
            parameter.data += 0.3 * noise
    return model.eval()


@pytest.fixture
def model(tmp_path, architecture):
    """Loaded as the scripts load it."""
    make_config(architecture).save_pretrained(tmp_path / "config")
    torch.manual_seed(0)
    return fill(AutoModelForCausalLM.from_config(sft.load_config(str(tmp_path / "config"))).float())


ROWS = [[5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15, 16, 17, 18], [19, 20]]


@pytest.mark.parametrize("architecture", KINDS)
def test_training_and_sampling_are_the_models_own(model, architecture, tokenizer):
    """Logits of packed rows against each row by itself, in training mode; greedy samples against argmax uncached."""
    sft.check_packing(model, "a folder")
    tokens = torch.tensor([row + [PAD] * (9 - len(row)) for row in ROWS])
    kept = (tokens != PAD) & (torch.arange(9) >= 1)
    with torch.no_grad():
        packed = sft.get_logits(model.train(), tokens, kept, PAD)
        alone = torch.cat([model(torch.tensor([row])).logits[0, :-1] for row in ROWS])
    torch.testing.assert_close(packed, alone, atol=1e-4 * alone.std().item(), rtol=1e-4)
    responses, logprobs = sft.generate(
        model.eval(), torch.tensor([[PAD] * (9 - len(r)) + r for r in ROWS]), tokenizer, 4, 1e-3
    )
    for row, response in zip(ROWS, responses.tolist()):
        for token in response:
            with torch.no_grad():
                best = model(torch.tensor([row])).logits[0, -1]
            assert best[token] > best.max() - 1e-4 * best.std()
            if token == EOS_ID:
                break
            row = [*row, token]


@pytest.mark.parametrize("architecture", KINDS)
def test_pairs_are_read_as_each_sequence_alone(model, architecture):
    """Log-probabilities of responses whose post, and in one pair more, goes through once."""
    queries, chosen, rejected = [[5, 6, 7, 8], [9]], [[10, 11, 0], [12, 0]], [[10, 13, 14, 0], [15, 16, 17, 0]]
    columns = [pad_rows(queries, PAD, True), pad_rows(chosen, PAD, length=4), pad_rows(rejected, PAD)]
    with torch.no_grad():
        found = dpo.pair_logprobs(
            model, dict(zip(dpo.COLUMNS, map(torch.tensor, columns))), torch.arange(2), PAD, False
        )
        for responses, logprobs in zip((chosen, rejected), found):
            for query, response, logprob in zip(queries, responses, logprobs):
                alone = model(torch.tensor([query + response])).logits[0, len(query) - 1 : -1].log_softmax(1)
                expected = alone.gather(1, torch.tensor(response)[:, None]).sum()
                torch.testing.assert_close(logprob, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_cannot_be_packed_is_refused(model, architecture):
    assert model(torch.tensor(ROWS[:1])).logits.isfinite().all()  # by itself it is in order
    reason = REASONS.get(architecture, SHAPES)
    with pytest.raises(ValueError, match=f"a folder: {type(model).__name__} can't be used, sequences end .*({reason})"):
        sft.check_packing(model, "a folder")


@pytest.mark.parametrize("architecture", ["qwen3"])
def test_weights_that_are_not_numbers_are_refused(model):
    model.get_output_embeddings().weight.data[7] = math.nan
    with pytest.raises(ValueError, match="left-padded .* logits differ by nan"):
        ilql.check_padding(model, "a folder")
    model.get_input_embeddings().weight.data[7] = math.nan
    with pytest.raises(ValueError, match="end to end .* hidden states differ by nan"):
        sft.check_packing(model, "a folder")


@pytest.mark.parametrize("architecture", ["bloom", "mpt", "falcon", "gptj", "codegen", "gpt_oss", "gpt_neo", "qwen3"])
def test_ilql_pads_and_takes_what_cannot_be_packed(model, architecture):
    ilql.check_padding(model, "a folder")


@pytest.mark.parametrize("architecture", [*SCALED, "gemma2", "mamba", "lfm2", "recurrent_gemma", "qwen3_next"])
def test_ilql_refuses_logits_and_states_of_their_own(model, architecture):
    assert model(torch.tensor(ROWS[:1])).logits.isfinite().all()
    with pytest.raises(ValueError, match=f"a folder: {type(model).__name__} can't be used, left-padded"):
        ilql.check_padding(model, "a folder")


@pytest.mark.parametrize("architecture", ["qwen3", "mistral", "gemma", "phi3", "opt"])
def test_scores_are_those_of_each_sequence_alone(tmp_path, model, architecture):
    """A reward model of the kind, saved, loaded, and read at the last token by transformers itself."""
    model.save_pretrained(tmp_path / "policy")
    config = sft.load_config(str(tmp_path / "policy"), num_labels=1, pad_token_id=300)
    scorer = AutoModelForSequenceClassification.from_pretrained(tmp_path / "policy", config=config)
    scorer.score.weight.data.normal_()
    scorer.save_pretrained(tmp_path / "reward")
    loaded = reward.load_reward_model(str(tmp_path / "reward"), PAD)
    with torch.no_grad():
        scores = reward.get_scores(loaded, torch.tensor([row + [PAD] * (9 - len(row)) for row in ROWS]), PAD)
        alone = torch.cat([scorer(torch.tensor([row])).logits[0] for row in ROWS])
    torch.testing.assert_close(scores, alone, atol=1e-4, rtol=1e-4)
