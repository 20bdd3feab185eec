"""SpeechBrain's Brain: `train_speech.py OPTIMIZER [arguments of its own]`."""

import sys

import speechbrain as sb
import torch
from frameworks import make_optimizer, report
from speechbrain.utils.checkpoints import Checkpointer
from speechbrain.utils.epoch_loop import EpochCounter

name, *own = sys.argv[1:]
common = [
    "none.yaml",
    "--device",
    "cpu",
    "--distributed_backend",
    "gloo",
    "--grad_accumulation_factor",
    "2",
    "--max_grad_norm",
]
_, run_opts, _ = sb.parse_arguments([*common, "1.0" if name == "adamw" else "1e9", *own])
sb.utils.distributed.ddp_init_group(run_opts)
torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU())
modules = {"network": network.append(torch.nn.Linear(64, 8))}
sounds = torch.randn(256, 40)
words = (sounds @ torch.randn(40, 8)).argmax(1)
data = [{"id": i, "sound": sounds[i], "word": words[i]} for i in range(256)]
losses: list[float] = []


class Brain(sb.Brain):
    def compute_forward(self, batch, stage):
        return self.modules.network(batch["sound"])

    def compute_objectives(self, predictions, batch, stage):
        return torch.nn.functional.cross_entropy(predictions, batch["word"])

    def on_stage_end(self, stage, loss, epoch=None):
        if name in ("separate", "local") and stage == sb.Stage.TRAIN:  # the lines to add
            if name == "local":
                self.optimizer.end_round()
            self.optimizer.consolidate_state()
        if stage == sb.Stage.VALID:
            losses.append(float(loss))
            self.checkpointer.save_and_keep_only(meta={"epoch": epoch}, num_to_keep=10)


counter = EpochCounter(limit=4)
saver = Checkpointer(f"out_{name}", {"network": modules["network"], "counter": counter})
brain = Brain(modules, lambda params: make_optimizer(name, params, lr=3e-3, clip=1.0), {}, run_opts, saver)
loader = dict(batch_size=16, collate_fn=torch.utils.data.default_collate)
brain.fit(counter, data, data[:64], train_loader_kwargs=dict(**loader, shuffle=True), valid_loader_kwargs=loader)
report(brain.modules, losses=losses)
