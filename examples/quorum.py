"""Show three replica groups of examples/fault_tolerant.py on this machine: one is killed, one is stopped, both return.

python examples/quorum.py                       # make quorum: two minutes, a picture in runs/quorum/quorum.png
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
FOLDER = Path("runs/quorum")
LIMIT = 150.0  # seconds for all of it
STEPS, PACE = 700, 0.05


def start_lighthouse():
    """Return the process and the address of a lighthouse."""
    command = [Path(sys.executable).with_name("torchft_lighthouse"), "--bind", "[::]:0", "--min_replicas", "1"]
    command += ["--heartbeat_timeout_ms", "1500", "--quorum_tick_ms", "50"]
    with open(FOLDER / "lighthouse.log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    while not (found := re.search(r"listening on:? *\S*?:(\d+)", (FOLDER / "lighthouse.log").read_text())):
        if process.poll() is not None:
            sys.exit(f"the lighthouse ended: {(FOLDER / 'lighthouse.log').read_text()}")
        time.sleep(0.05)
    return process, f"http://localhost:{found[1]}"


def start_group(number, address):
    options = dict(group=number, steps=STEPS, pace=PACE, every=10, growth=50, losses=FOLDER / f"losses_{number}")
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    environment = os.environ | {"TORCHFT_LIGHTHOUSE": address, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, HERE / "fault_tolerant.py", *words]
    with open(FOLDER / f"group_{number}.log", "a") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def read(number):
    path = FOLDER / f"losses_{number}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(condition, until):
    while time.time() < until and not condition():
        time.sleep(0.1)
    return condition()


def newest(number):
    return max([line["step"] for line in read(number)], default=-1)


def draw(events, began):
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        return None
    figure, (steps, losses) = plt.subplots(2, 1, figsize=(9, 7), sharex=True)
    for number in range(3):
        lines = read(number)
        for axis, name in ((steps, "step"), (losses, "loss")):
            axis.plot([x["time"] - began for x in lines], [x[name] for x in lines], ".", ms=2, label=f"group {number}")
    for name, when in events:
        for axis in (steps, losses):
            axis.axvline(when - began, color="grey", lw=0.6)
        steps.text(when - began, 0, name, rotation=90, fontsize=7, va="bottom")
    steps.set(ylabel="step"), losses.set(ylabel="training loss", xlabel="seconds"), steps.legend()
    figure.tight_layout()
    figure.savefig(FOLDER / "quorum.png", dpi=120)
    return FOLDER / "quorum.png"


def report(events):
    for number in range(3):
        times = [line["time"] for line in read(number)]
        gaps = sorted(b - a for a, b in pairwise(times))
        print(f"group {number}: {len(times)} steps, typically {median(gaps):.2f} s, the longest stop {gaps[-1]:.1f} s")
    killed, stopped = (next(when for name, when in events if name == what) for what in ("kill 1", "stop 2"))
    for what, when in (("the kill", killed), ("the stop", stopped)):
        times = [line["time"] for line in read(0) if when - 1 < line["time"] < when + 15]
        longest = max(b - a for a, b in pairwise(times))
        print(f"around {what} of another group, group 0 stood still for {longest:.1f} s at most (time-out 1.5 s)")


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob("*"):
        old.unlink()
    print(
        "Three replica groups train one small GPT. Group 1 is killed, group 2 is stopped for 8 seconds, both come back."
    )
    lighthouse, address = start_lighthouse()
    groups, events, began = {}, [], time.time()
    until = began + LIMIT

    def note(name):
        events.append((name, time.time()))
        print(f"{time.time() - began:5.1f} s  {name}, at step {newest(0)}", flush=True)

    try:
        groups = {number: start_group(number, address) for number in range(3)}
        wait_for(lambda: min(map(newest, range(3))) > 100, until)
        note("kill 1"), groups[1].kill(), groups[1].wait()
        time.sleep(4)
        note("start 1")
        groups[1] = start_group(1, address)
        before = newest(1)
        wait_for(lambda: newest(1) > before + 60, until)
        note("stop 2"), groups[2].send_signal(signal.SIGSTOP)
        time.sleep(8)
        note("continue 2"), groups[2].send_signal(signal.SIGCONT)
        wait_for(lambda: all(one.poll() is not None for one in groups.values()), until)
        codes = [one.poll() for one in groups.values()]
    finally:
        for one in [*groups.values(), lighthouse]:
            if one.poll() is None:
                one.kill()
    report(events)
    last = {number: read(number)[-1] for number in range(3)}
    print("at the end:", ", ".join(f"group {n} step {x['step'] + 1}, loss {x['loss']:.2f}" for n, x in last.items()))
    if picture := draw(events, began):
        print(f"The picture: {picture}")
    sys.exit(codes != [0, 0, 0])


if __name__ == "__main__":
    main()
