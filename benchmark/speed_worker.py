"""One side of benchmark/speed.py, in a process and an environment of its own: speed_worker.py SPEC.json.

It sets up once, then takes commands from its standard input, and answers each with a line of JSON. Between commands it
waits in a read, and uses no processor. `step` runs one update of the real thing: for ours the loop in `main` of sft.py,
reward.py, dpo.py or ppo.py, for TRL the loop of its trainer; both are held at their progress bar or step callback.
"""

import importlib
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path


class Gate:
    """Holds a training loop between its updates, and measures one update at a time."""

    def __init__(self, device: str):
        self.commands, self.device = sys.stdin, device
        self.answers = os.fdopen(os.dup(1), "w")  # what libraries print must not mix with the answers
        os.dup2(2, 1)
        self.running, self.phases, self.cpu, self.lengths = False, Counter(), Counter(), []

    def now(self) -> float:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()

    def answer(self, **message) -> None:
        print(json.dumps(message), file=self.answers, flush=True)

    def wait(self) -> None:
        """Report the update that has just ended, if any; return when the next one shall begin."""
        if self.running:
            seconds, cpu_seconds = self.now() - self.start, time.process_time() - self.cpu_start
            lengths = sum(self.lengths) / max(1, len(self.lengths))
            report = {"seconds": seconds + self.before[0], "cpu_seconds": cpu_seconds + self.before[1]}
            report["response_length"] = lengths
            self.answer(**report, phases=dict(self.phases), peak_gib=peak_gib(self.device))
        else:  # what was done before the loop, and is a part of each update's work
            self.before = (self.phases["reference"], self.cpu["reference"])
            self.answer(ready=True)
        while (command := self.commands.readline().strip()) == "matmul":
            self.answer(flops_per_second=matmul_rate(self.device))
        if command != "step":
            os._exit(0)  # no evaluation, no saving
        self.running, self.phases, self.lengths = True, Counter(), []
        self.start, self.cpu_start = self.now(), time.process_time()

    def timed(self, phase: str, function, look=None):
        """The function, with its seconds added to a phase; look(result) gives the lengths of sampled responses."""

        def call(*args, **kwargs):
            start, cpu_start = self.now(), time.process_time()
            result = function(*args, **kwargs)
            self.phases[phase] += self.now() - start
            self.cpu[phase] += time.process_time() - cpu_start
            self.lengths += look(result) if look else []
            return result

        return call


def peak_gib(device: str) -> float:
    """Peak memory of this process so far: resident (VmHWM), or allocated on the GPU."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 2**30
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 2**20


def matmul_rate(device: str, size: int = 0) -> float:
    """Floating-point operations a second of a square matrix product, in the run's precision: the machine's limit."""
    import torch

    size = size or (8192 if device == "cuda" else 1024)
    bf16 = os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16"
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if bf16 else torch.float32)
    rates, out = [], torch.empty_like(a)
    for _ in range(8):
        if device == "cuda":
            torch.cuda.synchronize()
        start, repeats = time.perf_counter(), 20 if device == "cuda" else 4
        for _ in range(repeats):
            torch.mm(a, a, out=out)
        if device == "cuda":
            torch.cuda.synchronize()
        rates.append(repeats * 2 * size**3 / (time.perf_counter() - start))
    return sorted(rates)[len(rates) // 2]


def lengths_until_eos(responses, eos: int) -> list[int]:
    """Number of tokens of each response (B, T), with its EOS."""
    is_eos = responses == eos
    position = is_eos.int().argmax(1).where(is_eos.any(1), responses.new_tensor(responses.shape[1] - 1))
    return (position + 1).tolist()


def run_ours(spec: dict, gate: Gate) -> None:
    """The main function of one of our scripts, held before each update."""
    sys.path.insert(0, spec["root"])
    script = importlib.import_module(spec["stage"])

    class Progress:
        """In place of tqdm, at which every script's loop turns."""

        def __init__(self, updates, **_):
            self.updates = updates

        def __iter__(self):
            for update in self.updates:
                gate.wait()
                yield update

        def __getattr__(self, name):
            return lambda *_, **__: None

    script.tqdm = Progress
    if spec["stage"] == "ppo":
        script.generate = gate.timed("generation", script.generate, lambda x: lengths_until_eos(x[0], spec["eos"]))
        script.collect_rollout = gate.timed("rollout", script.collect_rollout)
        script.update_model = gate.timed("update", lambda *inputs, real=script.update_model: list(real(*inputs)))
    if spec["stage"] == "dpo":  # the reference's log-probabilities of the batch, which TRL takes in every update
        script.map_rows = gate.timed("reference", script.map_rows)
    fields = script.Args.__dataclass_fields__
    script.main(script.Args(**{name: value for name, value in spec["args"].items() if name in fields}))


def run_trl(spec: dict, gate: Gate) -> None:
    """The train method of one of TRL's trainers, held before each update."""
    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
    )

    class Hold(TrainerCallback):
        def on_train_begin(self, *_, **__):
            gate.wait()

        on_step_end = on_train_begin

    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left" if spec["stage"] == "ppo" else "right")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    rows = Dataset.from_list(json.loads(Path(spec["rows"]).read_text()))
    options = {"output_dir": spec["output_dir"], "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    options |= {"per_device_train_batch_size": spec["micro_batch_size"], "logging_steps": 10**6, "learning_rate": 3e-6}
    options |= {"gradient_accumulation_steps": spec["batch_size"] // spec["micro_batch_size"]}
    # its defaults, bf16 and gradient checkpointing, are switched off or follow the run
    options |= {"bf16": spec["precision"] == "bf16", "gradient_checkpointing": False, "use_cpu": gate.device == "cpu"}
    causal = [AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32) for _ in range(2)]
    common = {"processing_class": tokenizer, "train_dataset": rows, "callbacks": [Hold()]}

    if spec["stage"] == "ppo":
        import numpy as np
        from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

        def look(result):
            width = max(len(row) for row in rows["input_ids"])
            return lengths_until_eos(result[0][:, width:], spec["eos"])

        ppo_trainer.batch_generation = gate.timed("generation", ppo_trainer.batch_generation, look)
        permutation, begin = np.random.permutation, gate.wait

        def first_permutation(*args):  # with it the update begins
            gate.phases["rollout"] = gate.phases["rollout"] or gate.now() - gate.start
            return permutation(*args)

        def end_update():
            if gate.running:
                gate.phases["update"] = gate.now() - gate.start - gate.phases["rollout"]
            begin()

        np.random.permutation, gate.wait = first_permutation, end_update
        options |= {"total_episodes": 10**7, "num_sample_generations": 0, "stop_token": "eos", "missing_eos_penalty": 1}
        options |= {"local_rollout_forward_batch_size": spec["micro_batch_size"], "response_length": 53}
        heads = [AutoModelForSequenceClassification.from_pretrained(spec["reward_model"]).float() for _ in range(2)]
        models = {"model": causal[0], "ref_model": causal[1], "reward_model": heads[0], "value_model": heads[1]}
        PPOTrainer(args=PPOConfig(**options), eval_dataset=rows, **models, **common).train()
        return
    import trl

    options["max_steps"] = 10**7
    if spec["stage"] == "sft":
        trainer = trl.SFTTrainer(model=causal[0], args=trl.SFTConfig(**options), **common)
    elif spec["stage"] == "reward":
        model = AutoModelForSequenceClassification.from_pretrained(spec["model"], num_labels=1, dtype=torch.float32)
        model.config.pad_token_id = tokenizer.pad_token_id
        trainer = trl.RewardTrainer(model=model, args=trl.RewardConfig(**options), **common)
    else:

        class PreTokenised(trl.DPOTrainer):
            """The tokens of the workload, and not those of a second tokenisation."""

            def _prepare_dataset(self, dataset, *_):
                return dataset

        # on a GPU TRL takes logits of the summaries alone, elsewhere of every position: it is measured with the former
        trl.trainer.utils._use_triton = lambda _: True
        options["beta"] = 0.05
        trainer = PreTokenised(model=causal[0], ref_model=causal[1], args=trl.DPOConfig(**options), **common)
    trainer.train()


def run_datasets(spec: dict, gate: Gate) -> None:
    """Raw posts and comparisons -> padded token columns, by tldr_dataset.py or by a map of one row at a time."""
    sys.path.insert(0, spec["root"])
    from datasets import disable_caching, disable_progress_bars

    import tldr_dataset

    disable_caching()
    disable_progress_bars()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    args = tldr_dataset.Args(**spec["args"])
    tokenizer = tldr_dataset.load_tokenizer(args.tokenizer)
    processes = args.num_proc if args.num_proc > 1 else None  # 1 would start a process, and its start would count
    while True:
        gate.wait()
        for kind in ("sft", "comparisons"):
            source = getattr(args, kind)
            start = gate.now()
            if spec["side"] == "ours":
                tldr_dataset.build(source, kind, tokenizer, args)
            else:
                raw = tldr_dataset.load_raw(source, kind)
                for split in raw:
                    settings = (tldr_dataset.TLDR_TEMPLATE, spec["model"] == "lengths, too")
                    tokenise = tokenise_each_column(tokenizer, kind, *settings)
                    raw[split].map(tokenise, num_proc=processes, remove_columns=raw[split].column_names)
            gate.phases[kind] += gate.now() - start


def tokenise_each_column(tokenizer, kind: str, template: str, lengths_too: bool):
    """The straightforward way: a row at a time, each column of tokens from its own text; with lengths_too, as in the
    paper's code, each column of lengths as well."""
    lengths = (53, 562) if kind == "sft" else (169, 638)

    def pad(tokens: list[int], length: int, left: bool = False) -> list[int]:
        padding = [tokenizer.pad_token_id] * (length - len(tokens))
        return padding + tokens if left else tokens[:length] + padding

    def count(text: str, tokens: list[int]) -> int:
        return len(tokenizer.encode(text) if lengths_too else tokens)

    def tokenise(row: dict) -> dict:
        info = row if kind == "sft" else row["info"]
        post = info["post"]
        while len(query_tokens := tokenizer.encode(query := template.format(**(info | {"post": post})))) > 512:
            post = post.rpartition("\n")[0] if "\n" in post else post[:-1]
        columns = {"query": query, "query_token": pad(query_tokens, 512, left=True)}
        columns["query_token_len"] = count(query, query_tokens)
        if kind == "sft":
            texts = {"reference_response": f" {row['summary']}{tokenizer.eos_token}"}
        else:
            pair = [summary["text"] + tokenizer.eos_token for summary in row["summaries"]]
            texts = {"chosen": pair[row["choice"]], "rejected": pair[1 - row["choice"]]}
        for name, text in texts.items():
            tokens, joint = tokenizer.encode(text), tokenizer.encode(query + text)
            label = [tokenizer.pad_token_id] * len(query_tokens) + joint[len(query_tokens) :]
            columns |= {name: text, f"{name}_token": pad(tokens, lengths[0]), f"{name}_token_len": count(text, tokens)}
            columns |= {
                f"query_{name}_token": pad(joint, lengths[1]),
                f"query_{name}_token_len": count(query + text, joint),
            }
            columns[f"query_{name}_token_response_label"] = pad(label, lengths[1])
        return columns

    return tokenise


if __name__ == "__main__":
    SPEC = json.loads(Path(sys.argv[1]).read_text())
    run = run_datasets if SPEC["stage"] == "dataset" else run_ours if SPEC["side"] == "ours" else run_trl
    run(SPEC, Gate(SPEC["device"]))
