"""Runs a script on several processes under DeepSpeed without a GPU, where accelerate makes each a run of its own.

    accelerate launch --config_file benchmark/zero2.yaml --num_processes 2 tests/deepspeed_on_cpu.py sft.py ...

Without a GPU accelerate knows no backend for processes that are not told to use the CPU, and leaves DeepSpeed out if
they are. Here it is given gloo; DeepSpeed, its launcher, and what accelerate does with both are the real ones.
"""

import runpy
import sys

from accelerate.state import PartialState
from accelerate.utils import DistributedType

if __name__ == "__main__":
    PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.NO)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
