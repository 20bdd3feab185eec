"""Replica groups under a lighthouse of torchft on loopback, killed, stopped and started again.

    python tests/support/quorum_runs.py LOGS --kills 10 --optimizer local      # prints a report, exits 1 if it is wrong

Workers are forks of a process that has imported everything: a start takes no time, and kill -9 is a real one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import random
import signal
import sys
import time
import traceback
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torchft
from ranks import free_port
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import compopt
from compopt._state.tensors import to_local
from compopt._wire.collectives import Communicator
from compopt.integrations.torchft import LOCAL, FaultTolerant, make_manager

HEARTBEAT = 1500  # milliseconds without one after which a replica group is taken to be dead
# where a worker ends itself; "time": it is killed from outside
PLACES = ["time", "forward", "exchange", "vote", "connect", "heal, the source", "heal, the joiner"]

OPTIMIZERS = {
    "local": lambda p, ranks: compopt.LocalSteps(torch.optim.AdamW(p, 2e-3), 10, growth_steps=0, process_group=ranks),
    "local-muon": lambda p, ranks: compopt.LocalSteps(
        compopt.MuonAdamW(p, 2e-3, use_muon=lambda name, p: p.dim() == 2), 10, growth_steps=0, process_group=ranks
    ),
    "separate": lambda p, ranks: compopt.SeparateAdam(p, 2e-3, rank=4, dense_steps=5, process_group=ranks),
    "average": lambda p, ranks: compopt.Average(torch.optim.AdamW(p, 2e-3), process_group=ranks),
    "radius": lambda p, ranks: compopt.RadiusAdamW(p, 2e-3, process_group=ranks),
    "scape": lambda p, ranks: compopt.ScapeAdamS(p, 2e-3, process_group=ranks),
}


def say(event: str, **data) -> None:
    os.write(1, (json.dumps({"t": time.time(), "event": event, **data}) + "\n").encode())


def die(place: str) -> None:
    say("dies", place=place)
    os.kill(os.getpid(), signal.SIGKILL)


def checksum(tensors) -> str:
    digest = hashlib.sha1()
    for tensor in tensors:
        digest.update(to_local(tensor.detach()).numpy().tobytes())
    return digest.hexdigest()[:12]


def common_state(optimizer, model) -> str:
    """Return a checksum of what all ranks have in common after an exchange: parameters, anchors, outer momentum,
    or moments that are not a rank's own.
    """
    entries = [entry.get("outer", entry) for entry in optimizer.state_dict()["state"].values()]
    names = ("anchor", "momentum_buffer", "exp_avg", "exp_avg_sq")
    return checksum([*model.parameters(), *(t for entry in entries for t in named(entry, names))])


def named(value, names: tuple[str, ...], name: str = "") -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [t for key, each in value.items() for t in named(each, names, name if key == LOCAL else key)]
    return [value] if isinstance(value, torch.Tensor) and name in names else []


def die_at(place: str, count: int, ft: FaultTolerant) -> None:
    """Let this process end at its ``count``-th visit of a place."""
    left = [count]

    def visit(owner, name: str) -> None:
        inner = getattr(owner, name)

        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                die(place)
            return inner(*args, **kwargs)

        setattr(owner, name, call)

    if place == "exchange":
        visit(Communicator, "start")
    elif place == "vote":
        visit(ft.manager, "should_commit")
    elif place == "late":  # it lives; who serves it has died when it comes to load
        reconfigure = ft.group.reconfigure
        ft.group.reconfigure = lambda options: (reconfigure(options), time.sleep(0.3))[0]
    elif place == "connect":  # in a quorum, before its ranks have connected
        visit(ft.group, "reconfigure")
    elif place.startswith("heal"):
        functions = ft.manager._user_state_dicts if "source" in place else ft.manager._load_state_dict_fns
        inner = functions["compopt"]

        def call(*args):
            left[0] -= 1
            if left[0] == 0:
                die(place)
            return inner(*args)

        functions["compopt"] = call


class Tally:
    """A position in the data, which a joiner takes over."""

    def __init__(self):
        self.batches = 0

    def state_dict(self) -> dict:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict) -> None:
        self.batches = state["batches"]


def work(args: argparse.Namespace, number: int, place: str = "", count: int = 0, rank: int = 0, port: int = 0) -> None:
    """Train as a rank of a replica group, which is cut over its ranks if there are several."""
    torch.set_num_threads(1)
    if args.ranks > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(args.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    torch.manual_seed(number)  # the first quorum makes them equal
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 8))
    if args.ranks > 1 and args.ddp:
        model = DistributedDataParallel(model)
    elif args.ranks > 1:
        for layer in (*model, model):
            fully_shard(layer, mesh=init_device_mesh("cpu", (args.ranks,)))
    optimizer = OPTIMIZERS[args.optimizer](model.parameters(), compopt.Ranks(None, 0, 1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 1000))
    data, group = Tally(), torchft.ProcessGroupGloo(timeout=timedelta(seconds=args.group_timeout))
    manager = make_manager(
        group,
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=20),
        replica_id=f"group_{number}",
        hostname="127.0.0.1",
    )
    waits = dict(timeout=10.0, join_timeout=args.join_timeout)
    ft = FaultTolerant(manager, group, optimizer, model, scheduler=scheduler, data=data, **waits)
    say("up", pid=os.getpid())
    load = manager._load_state_dict_fns["compopt"]

    def loaded(state) -> None:
        load(state)
        if state["optimizer"] is None:  # nobody has taken a step
            return
        saved = [t for e in state["optimizer"]["state"].values() for t in moments(e)]
        mine = [to_local(t) for e in optimizer.state_dict()["state"].values() for t in moments(e)]
        equal = all(map(torch.equal, saved, mine)) and len(saved) == len(mine) > 0
        residual = float(optimizer.stats.residual_norm())
        say("healed", step=ft.step, residual=residual, equal=equal, state=common_state(optimizer, model))

    def saved() -> dict:
        if ft.step:
            say("saved", state=common_state(optimizer, model))
        return save()

    save = manager._user_state_dicts["compopt"]
    manager._load_state_dict_fns["compopt"], manager._user_state_dicts["compopt"] = loaded, saved
    if place:
        die_at(place, count, ft)
    rebind = optimizer.rebind

    def noted(ranks) -> None:
        before = common_state(optimizer, model) if ft.step else ""
        began = time.time()
        rebind(ranks)
        seconds, kept = time.time() - began, not before or before == common_state(optimizer, model)
        say("ranks", size=ranks.size, rank=ranks.rank, step=ft.step, seconds=seconds, kept=kept)

    optimizer.rebind = noted
    local = 0
    for step in ft.steps(args.steps):
        seed = 1000 * data.batches + 10 * number + rank * bool(args.ddp)
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        loss = (model(x) - x[:, :8].sin()).square().mean()
        if place == "forward" and local == count:
            die(place)
        loss.backward()
        time.sleep(args.pace)
        optimizer.step()
        scheduler.step()
        data.batches += 1
        local += 1
        is_even = not getattr(optimizer, "round_is_open", False)
        sums = common_state(optimizer, model) if is_even else ""
        say(
            "step", step=step, now=ft.step, loss=loss.item(), sum=sums, batches=data.batches, lr=scheduler.get_last_lr()
        )
        if is_stopped(args):
            break
    say("end", sum=checksum(model.parameters()), step=ft.step, local=local, bytes=ft.bytes_sent)
    time.sleep(1.5)  # others may be in their last exchange
    os._exit(0)


def is_stopped(args: argparse.Namespace) -> bool:
    """True if the run is over; the same on all ranks of a replica group."""
    is_over = torch.tensor(float(Path(args.until).exists()), dtype=torch.float32, device="cpu")
    if args.ranks > 1:
        dist.all_reduce(is_over)
    return bool(is_over > 0)


def moments(value, name: str = "") -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [t for key, each in value.items() for t in moments(each, name if key == LOCAL else key)]
    return [value] if isinstance(value, torch.Tensor) and "residual" not in name else []


class Run:
    """A lighthouse and its replica groups."""

    def __init__(self, folder: Path, args: argparse.Namespace):
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        self.folder, self.args = folder, args
        self.pids: dict[str, int] = {}
        self.codes: dict[str, int] = {}
        self.lives = [0] * args.groups
        self.faults: list[dict] = []
        self.kills: list[tuple[float, str]] = []  # from outside
        self.lighthouse = self.fork("lighthouse", self.serve)
        address = folder / "port"
        while not address.exists() or not address.read_text():
            time.sleep(0.02)
        os.environ["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{address.read_text()}"

    def serve(self) -> None:
        from torchft.coordination import LighthouseServer

        lighthouse = LighthouseServer(
            bind="[::]:0",
            min_replicas=1,
            join_timeout_ms=int(1000 * self.args.join_timeout),
            quorum_tick_ms=50,
            heartbeat_timeout_ms=HEARTBEAT,
        )
        (self.folder / "port").write_text(lighthouse.address().rsplit(":", 1)[1])
        time.sleep(self.args.limit + 60)

    def fork(self, key: str, function) -> int:
        sys.stdout.flush()
        if pid := os.fork():
            return pid
        try:
            for target, ending in ((1, "jsonl"), (2, "err")):
                flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
                os.dup2(os.open(self.folder / f"{key}.{ending}", flags), target)
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def start(self, number: int, place: str = "", count: int = 0) -> str:
        key = f"{number}.{self.lives[number]}"
        self.lives[number] += 1
        port = free_port()
        for rank in range(self.args.ranks):
            name = key if rank == 0 else f"{key}.rank{rank}"
            at = place if rank == 0 else ""
            self.pids[name] = self.fork(name, lambda rank=rank, at=at: work(self.args, number, at, count, rank, port))
        return key

    def kill(self, key: str, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to all ranks of a replica group."""
        if signal_number == signal.SIGKILL and key in self.pids:
            self.kills.append((time.time(), key))
        for name, pid in self.pids.items():
            if name == key or name.startswith(f"{key}.rank"):
                os.kill(pid, signal_number)

    def reap(self) -> None:
        for key, pid in list(self.pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.codes[key] = os.waitstatus_to_exitcode(status)
                del self.pids[key]
                if status and "rank" not in key:  # as torchrun does
                    self.kill(key)

    def events(self, key: str, kind: str = "") -> list[dict]:
        path = self.folder / f"{key}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [event for event in found if not kind or event["event"] == kind]

    def wait(self, condition, seconds: float) -> bool:
        until = time.time() + seconds
        while time.time() < until:
            self.reap()
            if condition():
                return True
            time.sleep(0.05)
        return False

    def newest(self, number: int) -> str:
        return f"{number}.{self.lives[number] - 1}"

    def all_take_part(self) -> bool:
        """True if the newest lives of all groups have lately taken steps among all."""
        for number in range(self.args.groups):
            ranks, steps = self.events(self.newest(number), "ranks"), self.events(self.newest(number), "step")
            if not ranks or ranks[-1]["size"] != self.args.groups or not steps or steps[-1]["t"] < ranks[-1]["t"]:
                return False
        return True

    def end(self) -> None:
        for pid in [*self.pids.values(), self.lighthouse]:
            os.kill(pid, signal.SIGKILL)
        for key, pid in self.pids.items():
            self.codes[key] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.waitpid(self.lighthouse, 0)
        self.pids = {}


def kill_again_and_again(run: Run, draw: random.Random) -> None:
    """Kill one group at a random place, start it again, wait until all take part; so many times."""
    args = run.args
    for number in range(args.groups):
        run.start(number)
    if not run.wait(run.all_take_part, 60):
        raise AssertionError("the groups have not met")
    for count in range(args.kills):
        victim, place = draw.randrange(args.groups), args.places[count % len(args.places)]
        time.sleep(draw.random())
        fault = {"place": place, "victim": victim, "t": time.time(), "load": os.getloadavg()[0]}
        if place == "time":
            time.sleep(draw.random())
            fault["t"] = time.time()
            key = run.newest(victim)
            run.kill(key)
        elif place == "pause":
            key = run.newest(victim)
            run.kill(key, signal.SIGSTOP)
            time.sleep(args.pause)
            run.kill(key, signal.SIGCONT)
        else:  # one that will end itself takes its place
            key = run.newest(victim)
            run.kill(key)
            run.wait(lambda key=key: key in run.codes, 10)
            key = run.start(victim, place, 1 + draw.randrange(1 if place[:4] in ("heal", "conn") else 8))
            if "source" in place:  # somebody has to load from it
                others = [n for n in range(args.groups) if n != victim]
                run.wait(run.all_take_part, 60)
                for other in others:
                    gone = run.newest(other)
                    if gone in run.pids:
                        run.kill(gone)
                        run.wait(lambda gone=gone: gone in run.codes, 10)
                        run.start(other, draw.choice(["", "late"]))
                        if run.wait(lambda key=key: key in run.codes, 4):
                            break
        fault["ended"] = place == "pause" or run.wait(lambda key=key: key in run.codes, 20)
        if not fault["ended"]:  # it was never where it was to end
            run.kill(key)
            run.wait(lambda key=key: key in run.codes, 10)
        if place != "pause":
            time.sleep(args.away)
            run.start(victim)
        began = time.time()
        fault["seconds"] = time.time() - began if run.wait(run.all_take_part, 90) else None
        run.faults.append(fault)
        print(json.dumps({"fault": count, **fault}), flush=True)
        if fault["seconds"] is None:
            break
    Path(args.until).touch()
    run.wait(lambda: not run.pids, 60)


def stops_at_kills(run: Run, lives: dict[str, list[dict]]) -> dict[str, list[float]]:
    """Return the seconds that survivors stood still at kills; where others died meanwhile, since the last."""
    kills = run.kills + [(e["t"], key) for key in lives for e in run.events(key, "dies")]
    found: dict[str, list[float]] = {"one": [], "several": [], "several, since the last": []}
    for key, steps in lives.items():
        for a, b in pairwise(steps):
            within = [t for t, dead in kills if a["t"] - 0.5 < t < b["t"] and dead != key]
            if within and b["t"] - a["t"] > 0.5:
                seconds = round(b["t"] - a["t"], 2)
                found["one" if len(within) == 1 else "several"].append(seconds)
                if len(within) > 1:
                    found["several, since the last"].append(round(b["t"] - max(a["t"], *within), 2))
    return {name: sorted(seconds) for name, seconds in found.items()}


def report(run: Run) -> dict:
    """Summarize the events: commits that differ, ends that nobody asked for, the longest stops."""
    sums: dict[int, dict[str, str]] = {}
    stops, healed, left_out, saved, ranks, lives = [], [], [], set(), [], {}
    keys = sorted({path.name.removesuffix(".jsonl") for path in run.folder.glob("[0-9]*.jsonl")})
    for key in keys:
        steps = lives[key] = run.events(key, "step")
        for event in steps:
            if event["sum"]:  # ranks of a group hold different shards
                sums.setdefault((event["now"], key.partition(".rank")[2]), {})[key] = event["sum"]
        stops += [b["t"] - a["t"] for a, b in pairwise(steps)]
        left_out += [(key, a["now"], b["now"]) for a, b in pairwise(steps) if b["now"] != a["now"] + 1]
        healed += run.events(key, "healed")
        saved |= {event["state"] for event in run.events(key, "saved")}
        ranks += run.events(key, "ranks")
    shared = {step: of for step, of in sums.items() if len(of) > 1}
    unequal = {step: of for step, of in shared.items() if len({*of.values()}) > 1}
    at_kills = stops_at_kills(run, {key: steps for key, steps in lives.items() if ".rank" not in key})
    stops.sort()
    return {
        "faults": len(run.faults),
        "places": {p: sum(f["place"] == p for f in run.faults) for p in run.args.places},
        "not_ended_there": sum(not f["ended"] for f in run.faults),
        "not_recovered": sum(f["seconds"] is None for f in run.faults),
        "commits": len(sums),
        "shared": len(shared),
        "unequal": [(*at, of) for at, of in unequal.items()][:5],
        "unequal_count": len(unequal),
        "bad_codes": {key: code for key, code in run.codes.items() if code not in (0, -9) and ".rank" not in key},
        "healed": len(healed),
        "residual": max([event["residual"] for event in healed], default=0.0),
        "moments_equal": all(event["equal"] for event in healed),
        "loaded_equal": all(event["state"] in saved for event in healed),  # what a peer has saved
        "sizes": sorted({event["size"] for event in ranks}),
        "changed_by_rebind": sum(not event["kept"] for event in ranks),
        "typical_step": round(median(stops), 4) if stops else None,
        "longest_stops": [round(s, 2) for s in stops[-8:]],
        "stops_at_kills": {name: spread(seconds) for name, seconds in at_kills.items()},
        "left_out": left_out,  # lives that have lost local steps
        "load": spread([fault["load"] for fault in run.faults]),
        "recovery": [round(f["seconds"] or -1, 1) for f in run.faults],
    }


def spread(values: list[float]) -> dict[str, float]:
    """Return the number of values, their median, nine of ten, and the largest."""
    ranked = sorted(values)
    if not ranked:
        return {}
    return {"n": len(ranked), "median": median(ranked), ".9": ranked[int(0.9 * (len(ranked) - 1))], "max": ranked[-1]}


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("folder", type=Path)
    cli.add_argument("--optimizer", default="local", choices=OPTIMIZERS)
    cli.add_argument("--places", nargs="*", default=PLACES)
    numbers = dict(
        groups=3,
        ranks=1,
        ddp=0,
        kills=6,
        steps=10**6,
        pace=0.02,
        limit=1800,
        seed=0,
        pause=14.0,
        group_timeout=6.0,
        join_timeout=3.0,
        away=0.0,
    )
    for name, default in numbers.items():
        cli.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    args = cli.parse_args()
    args.until = str(args.folder / "stop")
    warm = nn.Linear(4, 4)
    torch.optim.AdamW(warm.parameters()).zero_grad()  # imports the compiler's front end, before the forks
    torch.set_num_threads(1)
    signal.alarm(int(args.limit) + 30)
    run = Run(args.folder, args)
    try:
        kill_again_and_again(run, random.Random(args.seed))
    finally:
        run.end()
    told = report(run)
    print(json.dumps(told, indent=1))
    wrong = told["unequal_count"] or told["bad_codes"] or told["not_recovered"] or told["residual"]
    if "pause" not in args.places:
        wrong = wrong or told["left_out"]
    if args.groups == 2:  # nobody has what the other lacks
        wrong = wrong or told["changed_by_rebind"] or told["sizes"] != [1, 2]
    sys.exit(bool(wrong) or not told["moments_equal"] or not told["loaded_equal"])


if __name__ == "__main__":
    main()
