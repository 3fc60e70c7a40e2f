"""Seconds to sample with ILQL's heads, beside transformers' own sampling from the same language model.

    OMP_NUM_THREADS=1 python benchmark/ilql_sampling.py

Random GPT-NeoX of the quickstart's size, random posts, fp32, no EOS, so that all tokens are sampled. Sides take turns.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
import tyro
from transformers import AutoModelForCausalLM, GPTNeoXConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
import ilql  # noqa: E402


@dataclass
class Args:
    posts: int = 32
    """Posts that are sampled together."""
    longest: int = 118
    """Tokens of the longest post; the shortest has half."""
    response_length: int = 48
    """Tokens that are sampled for each."""
    rounds: int = 3
    """Turns of each side, of which the fastest counts."""
    device: str = "cpu"
    """cpu or cuda."""


class Tokenizer(SimpleNamespace):
    """All that sampling asks of a tokenizer: 766 tokens, then [PAD]; EOS has a number that no token has."""

    eos_token_id, pad_token_id = 767, 766

    def __len__(self):
        return 767


def uncached(model: ilql.ILQL, queries: torch.Tensor, length: int, pad: int) -> None:
    """One beta, the whole sequence through the trunk for each token."""
    for _ in range(length):
        hidden = model.policy.base_model(**ilql.model_inputs(queries, pad), use_cache=False).last_hidden_state[:, -1]
        logits = model.policy.get_output_embeddings()(hidden)[:, :pad]
        q, v = model.min_target_q(hidden)[:, :pad], model.v_head(hidden)
        probabilities, tokens = ilql.decoding_distribution(logits, q, v, 1.0, 20, 0.7)
        queries = torch.cat([queries, tokens.gather(1, probabilities.multinomial(1))], dim=1)


@torch.no_grad()
def main(args: Args) -> None:
    for name, value in vars(args).items():
        if value != args.device and value < 1:
            raise ValueError(f"--{name}: expected 1 or more, found {value}")
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    policy = AutoModelForCausalLM.from_config(GPTNeoXConfig(vocab_size=768, tie_word_embeddings=True, **shape)).eval()
    model, tokenizer = ilql.ILQL(policy).to(args.device).eval(), Tokenizer()
    pad, lengths = tokenizer.pad_token_id, torch.linspace(args.longest / 2, args.longest, args.posts).long()[:, None]
    queries = torch.randint(1, pad, (args.posts, args.longest))
    queries[torch.arange(args.longest) < args.longest - lengths] = pad  # (B, Q), on the left
    queries = queries.to(args.device)
    options = {"max_new_tokens": args.response_length, "min_new_tokens": args.response_length, "do_sample": True}
    options |= {"top_k": 20, "temperature": 0.7, "pad_token_id": pad, "eos_token_id": tokenizer.eos_token_id}

    def plain(queries):
        mask = (queries != pad).long()
        policy.generate(input_ids=queries * mask, attention_mask=mask, **options)

    def ours(betas):
        return lambda: ilql.generate_ilql(model, queries, tokenizer, args.response_length, betas, 20, 0.7)

    sides = {"transformers' generate": lambda: plain(queries), "generate_ilql, one beta": ours([1.0])}
    sides |= {"transformers' generate, four times the rows": lambda: plain(queries.repeat(4, 1))}
    sides |= {"generate_ilql, four betas": ours([0.0, 1.0, 2.0, 4.0])}
    sides |= {"one beta without a cache": lambda: uncached(model, queries, args.response_length, pad)}
    seconds = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            if args.device == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    print("| | seconds |\n| --- | --- |")
    for name, times in seconds.items():
        print(f"| {name} | {min(times):.2f} |")


if __name__ == "__main__":
    main(tyro.cli(Args))
