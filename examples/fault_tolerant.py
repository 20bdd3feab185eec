"""Train a small GPT at sites that must not stop when one of them is away: local steps under a quorum of torchft.

torchft_lighthouse --min_replicas 1                            # one process, at an address that all sites reach
export TORCHFT_LIGHTHOUSE=http://HOST:29510                    # on every site, HOST being the lighthouse's machine
python examples/fault_tolerant.py --group 0                    # on site 0; on the others --group 1, 2, ...

Any group may be killed or stopped, and started again, at any time. The others go on; it joins them at the next round.
"""

import argparse
import json
import os
import time
from datetime import timedelta

import corpus
import torch
from torchft import ProcessGroupGloo
from train_gpt import GPT

import compopt
from compopt.integrations.torchft import FaultTolerant, make_manager


def parse():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--checkpoint", help="a file to begin from if it is there: for the case that all groups are gone")
    cli.add_argument("--data", help="a file to train on (default: the Python standard library's source)")
    cli.add_argument("--losses", help="a file to which this group adds a line of JSON for each step")
    cli.add_argument("--pace", type=float, default=0.0, help="seconds to sleep in each step")
    numbers = dict(group=0, steps=1000, every=30, growth=200, batch=8, layers=2, heads=4, width=64, context=64, lr=2e-3)
    for name, default in numbers.items():
        cli.add_argument("--" + name, type=type(default), default=default)
    return cli.parse_args()


def main():
    args = parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text, _ = corpus.load(args.data, 2_000_000)
    model = GPT(args.layers, args.width, args.heads, args.context)
    alone = compopt.Ranks(None, rank=0, size=1)  # until the first quorum
    adamw = torch.optim.AdamW(model.parameters(), lr=args.lr)
    optimizer = compopt.LocalSteps(adamw, every=args.every, growth_steps=args.growth, process_group=alone)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps, eta_min=args.lr / 10)

    group = ProcessGroupGloo(timeout=timedelta(seconds=60))
    manager = make_manager(group, replica_id=f"group_{args.group}")
    ft = FaultTolerant(manager, group, optimizer, model, decay=decay)
    if args.checkpoint and os.path.exists(args.checkpoint):
        ft.load_state_dict(torch.load(args.checkpoint))
    for step in ft.steps(args.steps):
        x, y = next(corpus.batches(text, args.batch, args.context, seed=1000 * step + args.group))
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        decay.step()
        time.sleep(args.pace)
        if args.losses:
            with open(args.losses, "a") as log:
                groups = manager.num_participants()
                log.write(json.dumps({"step": step, "loss": loss.item(), "groups": groups, "time": time.time()}) + "\n")
        if args.checkpoint and not optimizer.round_is_open and manager.participating_rank() == 0:
            torch.save(ft.state_dict(), f"{args.checkpoint}.new")
            os.replace(f"{args.checkpoint}.new", args.checkpoint)
    print(f"group {args.group} finished {ft.step} steps, loss {loss.item():.3f}", flush=True)
    ft.shutdown()


if __name__ == "__main__":
    main()
