"""Configurations as a user of torchtitan writes them: functions that return a configuration, one for each optimizer."""

import dataclasses
import os

import torch
from datasets import load_dataset
from frameworks import LOCAL, SEPARATE
from torchtitan.components.optimizer import default_adamw
from torchtitan.hf_datasets import text_datasets
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel_ce_loss

import compopt
from compopt.integrations.torchtitan import OptimizersContainer, shard_only

OPTIONS = dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
text_datasets.DATASETS["tiny"] = dataclasses.replace(
    text_datasets.DATASETS["c4_test"],
    path="texts.jsonl",
    loader=lambda path: load_dataset("json", data_files=path, split="train"),
)


def make_config(make=None):
    config = llama3_debugmodel_ce_loss()
    config.hf_assets_path, config.dataloader.dataset = "assets", "tiny"
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 64, 8
    config.training.global_batch_size = 8  # two backwards in a step
    config.training.disable_cuda_graphs, config.training.mixed_precision_param = True, "float32"
    config.activation_checkpoint, config.lr_scheduler.warmup_steps, config.debug.seed = None, 2, 1
    for layer in config.model_spec.model.layers:  # others have no backward on CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.checkpoint.enable = "SAVE_NOTHING" not in os.environ
    config.checkpoint.interval, config.checkpoint.last_save_model_only = 4, False
    config.dump_folder = os.environ["DUMP"]
    if make is None:
        config.optimizer = default_adamw(lr=OPTIONS["lr"])
        config.optimizer.implementation = "for-loop"
    else:
        config.optimizer = OptimizersContainer.Config(make=make)
    return config


def adamw():
    return make_config()


def average(**options):
    def make(params, group):
        return compopt.Average(torch.optim.AdamW(params, **OPTIONS), process_group=group, **options)

    return make_config(make)


def separate():
    options = dict(**OPTIONS, **SEPARATE, gather_dtype="int8")
    return make_config(lambda params, group: compopt.SeparateAdam(params, **options, process_group=group))


def with_replicas(config):
    """Two whole models, which the optimizer averages."""
    set_replicas(config)
    config.model_spec = shard_only(config.model_spec)
    return config


def set_replicas(config):
    config.parallelism.spmd_backend = "partial_dtensor"
    config.parallelism.data_parallel_replicate_degree, config.parallelism.data_parallel_shard_degree = 2, 1
    return config


def local():
    def make(params, group):
        return compopt.LocalSteps(compopt.MuonAdamW(params, lr=3e-3), **LOCAL, process_group=group)

    return with_replicas(make_config(make))


def adamw_replicas():
    return set_replicas(adamw())


def average_replicas():
    config = with_replicas(average(max_grad_norm=1.0))
    config.training.max_norm = 1e9  # of one replica's gradient
    return config
