"""Observers of a ledger: they hear of each change when it is counted, and add up to what the ledger holds."""

from collections import Counter

import pytest
import torch

import zeroshard as zs
from zeroshard.config import Tier
from zeroshard.engine.ledger import GATHERED, Ledger
from zeroshard.engine.runtime import runtime_of
from zeroshard.seam import Observer, engine_of
from zeroshard.testing import run_threads


class Heard(Observer):
    def __init__(self):
        self.held, self.sums, self.links = Counter(), Counter(), Counter()

    def allocated(self, category, nbytes, tier):
        self.held[category, tier] += nbytes

    def freed(self, category, nbytes, tier):
        self.held[category, tier] -= nbytes

    def sent(self, kind, label, inside, between):
        self.sums[kind] += inside + between

    def moved(self, source, target, nbytes):
        self.links[source, target] += nbytes


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("offload", [None, "disk"])
def test_what_an_observer_hears_adds_up_to_the_ledger(stage, offload, tmp_path):
    def train(rank):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 4))
        options = {"offload_optimizer": {"device": "nvme", "path": str(tmp_path)}} if offload else {}
        model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=stage, **options)
        ledger, heard = runtime_of(model).tiers.ledger, Heard()
        before, sent = Counter({(name, Tier.DEVICE): n for name, n in ledger.now.items()}), Counter()
        before.update({(name, tier): n for tier, held in ledger.elsewhere.items() for name, n in held.items()})
        sent.update({kind: traffic.nbytes for kind, traffic in ledger.traffic.items()})
        moved = Counter(ledger.moved)
        handle = engine_of(model).observe(heard)
        for _ in range(2):
            model(torch.ones(3, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        handle.remove()
        after = Counter({(name, Tier.DEVICE): n for name, n in ledger.now.items()})
        after.update({(name, tier): n for tier, held in ledger.elsewhere.items() for name, n in held.items()})
        assert {k: n for k, n in heard.held.items() if n} == {k: after[k] - before[k] for k in after if after[k] != before[k]}
        assert heard.sums == {kind: t.nbytes - sent[kind] for kind, t in ledger.traffic.items() if t.nbytes > sent[kind]}
        assert heard.links == {link: n - moved[link] for link, n in ledger.moved.items() if n > moved[link]}
        assert heard.sums["gather"] > 0 and bool(heard.links) == bool(offload)
        told = heard.sums.copy()
        model(torch.ones(3, 16)).sum().backward()
        assert heard.sums == told  # removed
        zs.close(model)

    run_threads(2, train)


def test_an_observer_may_remove_itself():
    ledger = Ledger()

    class Once(Observer):
        def allocated(self, category, nbytes, tier):
            handle.remove()
            told.append(nbytes)

    told = []
    handle = ledger.observe(Once())
    ledger.enter(GATHERED, 5)
    ledger.enter(GATHERED, 7)
    assert told == [5] and ledger.now[GATHERED] == 12


def test_a_finalizer_that_strikes_inside_of_an_entry_does_not_wait_for_it(monkeypatch):
    """The garbage collector may release a detached buffer at any allocation, so also inside of `enter`."""
    ledger = Ledger()
    ledger.enter(GATHERED, 4)

    class Total(dict):
        def values(self):  # `enter` adds them up inside of its lock
            if self.pop("collects", None):
                ledger.strike(GATHERED, 4)
            return super().values()

    ledger.now = Total(ledger.now, collects=1)
    ledger.enter(GATHERED, 8)
    assert ledger.now[GATHERED] == 8
