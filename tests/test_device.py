"""Every tensor of a stage is on the device that it is needed on: each script run with a GPU that is only pretended."""

import json

import pytest
import torch
from accelerate import Accelerator
from conftest import read_events
from pretend_gpu import pretend_gpu

import ppo

FORBIDDEN = {
    "sum": lambda gpu, cpu: gpu + cpu,
    "in place": lambda gpu, cpu: gpu.add_(cpu),
    "cat": lambda gpu, cpu: torch.cat([gpu, cpu]),
    "mask": lambda gpu, cpu: gpu.masked_fill(cpu > 0, 0.0),
    "range": lambda gpu, cpu: gpu + torch.arange(3),
    "embedding": lambda gpu, cpu: torch.nn.functional.embedding(torch.tensor([1]), gpu[:, None]),
    "index of the GPU": lambda gpu, cpu: cpu[gpu > 0],
    "number of the GPU": lambda gpu, cpu: gpu.sum() * cpu,
    "values of the CPU": lambda gpu, cpu: gpu.__setitem__(gpu > 0, cpu),
    "layer": lambda gpu, cpu: torch.nn.Linear(3, 1).to("cuda")(cpu),
    "layer of the CPU": lambda gpu, cpu: torch.nn.Linear(3, 1)(gpu),
    "numpy": lambda gpu, cpu: gpu.numpy(),
}
ALLOWED = {
    "number of the CPU": lambda gpu, cpu: gpu * torch.tensor(2.0),
    "index of the CPU": lambda gpu, cpu: gpu[torch.tensor([0])] + gpu[cpu > 0],
    "moved": lambda gpu, cpu: gpu + cpu.to(gpu.device) + cpu.cuda() + cpu.to(gpu),
    "moved back": lambda gpu, cpu: (gpu.cpu() + cpu).numpy(),
    "copied": lambda gpu, cpu: cpu.copy_(gpu),
    "like": lambda gpu, cpu: gpu + torch.zeros_like(gpu) + gpu.new_zeros(3) + gpu.new_tensor([1.0, 2.0, 3.0]),
    "layer": lambda gpu, cpu: torch.nn.Linear(3, 1).to("cuda")(gpu),
    "list": lambda gpu, cpu: (gpu.tolist(), gpu.sum().item()),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_the_pretended_gpu_raises_where_cuda_does(name):
    with pretend_gpu(), pytest.raises((RuntimeError, TypeError), match="both sides|numpy"):
        FORBIDDEN[name](torch.ones(3, device="cuda"), torch.ones(3))


@pytest.mark.parametrize("name", ALLOWED)
def test_the_pretended_gpu_allows_what_cuda_does(name):
    with pretend_gpu():
        ALLOWED[name](torch.ones(3, device="cuda"), torch.ones(3))


SHORT = {"max_updates": 2, "eval_rows": 4}
STAGES = {
    "sft": ("sft", SHORT),
    "sft, checkpointing": ("sft", SHORT | {"gradient_checkpointing": True, "loss_on": "response"}),
    "reward": ("reward", SHORT),
    "ppo": ("ppo", {"total_episodes": 16, "eval_rows": 4}),
    "ppo, offload": ("ppo", {"total_episodes": 16, "offload": True, "num_minibatches": 2, "whiten_rewards": True}),
    "dpo": ("dpo", SHORT),
    "dpo, on the fly": ("dpo", SHORT | {"ref_on_the_fly": True, "loss": "ipo"}),
    "ilql": ("ilql", SHORT),
}


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_keeps_its_tensors_together(name, tmp_path, chain, request):
    """And what it logs is what it logs without a GPU."""
    stage, fields = STAGES[name]
    run = request.getfixturevalue(f"run_{stage}")
    models = {"reward": [chain.sft], "ppo": [chain.sft, chain.reward], "dpo": [chain.sft]}.get(stage, [])
    run(*models, tmp_path / "cpu", **fields)
    with pretend_gpu():
        run(*models, tmp_path / "gpu", **fields)
    assert json.loads((tmp_path / "gpu/run.json").read_text())["finished"]
    logged = [read_events(tmp_path / device) for device in ("cpu", "gpu")]
    cpu, gpu = ({key: values for key, values in run.items() if key[:5] != "perf/"} for run in logged)
    assert cpu == gpu and cpu


def test_offloaded_models_are_on_the_cpu_while_ppo_samples(tmp_path, chain, run_ppo, monkeypatch):
    """Also after an evaluation in the middle of the run, which needs the reward model. They are never copied back."""
    homes, collect_rollout = [], ppo.collect_rollout

    def watch(model, ref_policy, reward_model, queries, *others):
        weights = [next(frozen.parameters()) for frozen in (ref_policy, reward_model)]
        homes.append([(weight.device.type, weight.data_ptr()) for weight in weights])
        assert queries.device.type == "cuda"
        return collect_rollout(model, ref_policy, reward_model, queries, *others)

    monkeypatch.setattr(ppo, "collect_rollout", watch)
    with pretend_gpu():
        run_ppo(chain.sft, chain.reward, tmp_path / "ppo", offload=True, sample_every=1, eval_rows=4)
    assert homes == homes[:1] * 3 and [device for device, _ in homes[0]] == ["cpu", "cpu"]


def test_fp16_is_refused(tmp_path, run_sft, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pretend_gpu(), pytest.raises(ValueError, match="fp16.*launch in bf16 or fp32"):  # without one accelerate does
        run_sft(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_fsdp_is_refused(tmp_path, run_sft, monkeypatch):
    monkeypatch.setattr(Accelerator, "distributed_type", "FSDP")
    with pytest.raises(ValueError, match="ZeRO-3 and FSDP shard the weights"):
        run_sft(tmp_path / "run")
    assert not (tmp_path / "run").exists()
