"""A load from a mapped file never holds a second copy of the state: parameter by parameter, conversions too."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

# 50 parameters of 1 MiB: 105 MB of fp32 state, 27 MB of int8. Memory of the process's own (mapped files are the
# system's cache, which it takes back when it needs to) is read every half millisecond, as the load runs.
CODE = """
import json, os, threading, time, torch
from lightning_fuse import FusedAdamW, LoadOptions

def own():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024

def build(state):
    params = [(f"p{i}", torch.nn.Parameter(torch.zeros(256, 1024))) for i in range(50)]
    return params, FusedAdamW(params, state=state)

def save(state):
    params, optimizer = build(state)
    for number, (_, p) in enumerate(params):
        p.grad = torch.sin(torch.arange(256 * 1024.0) + number).view(256, 1024)
    optimizer.step()
    torch.save(optimizer.state_dict(), state)

def load(saved, here, mapped):
    params, optimizer = build(here)
    before, peak, done = own(), [0.0], threading.Event()
    def watch():
        while not done.is_set():
            peak[0] = max(peak[0], own())
            time.sleep(0.0005)
    watcher = threading.Thread(target=watch)
    watcher.start()
    optimizer.load_state_dict(torch.load(saved, weights_only=True, mmap=mapped), LoadOptions(formats="convert"))
    done.set()
    watcher.join()
    state = sum(optimizer.state_bytes().values()) / 2**20
    print(json.dumps([saved, here, mapped, state, peak[0] - before]), flush=True)

def alone(job, *words):
    child = os.fork()  # torch is imported once, and each measurement starts from the same memory
    if not child:
        job(*words)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

for state in ("fp32", "int8"):
    alone(save, state)
for saved, here in (("fp32", "fp32"), ("fp32", "int8"), ("int8", "fp32")):
    for mapped in (True, False):
        alone(load, saved, here, mapped)
"""

# MiB: one parameter takes 2 in each of a dozen temporary tensors while it is converted, int64 ones twice that.
ROOM = 40.0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_grows_by_the_state_alone(run_python: Any) -> None:
    done = run_python("-c", CODE)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    grown = {(saved, here, mapped): growth for saved, here, mapped, _, growth in rows}
    assert len(grown) == 6
    for saved, here, mapped, state, growth in rows:
        print(f"{saved} to {here}, mapped {mapped}: {state:.0f} MiB of state, grown by {growth:.0f}")
        if mapped:
            assert growth <= state + ROOM
    # The control: a file that is read as a whole shows.
    assert grown[("fp32", "fp32", False)] > grown[("fp32", "fp32", True)] + 80.0
