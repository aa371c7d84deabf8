"""Fair shares of API keys, over the real scheduler and a device that answers at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.core import Accepted, Finished, SamplingParams, StepResult, Token
from minisgl.message import KeyShare, TextReply, TokenPrompt, UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig
from minisgl_gateway.keys.ring import Job, Key, KeyRing
from minisgl_gateway.keys.shares import Share, Shares


def ring(tmp_path: Path, **weights: float) -> dict[str, Key]:
    path = tmp_path / "keys.toml"
    path.write_text("".join(f'[{n}]\nkey = "k-{n}"\nweight = {w}\n' for n, w in weights.items()))
    path.chmod(0o600)
    return {key.name: key for key in KeyRing(None, str(path))}


class Simulation:
    """A server without processes. served: tokens of each key. first: steps to the first token."""

    def __init__(self, *, is_fair: bool = True) -> None:
        config = SchedulerConfig(
            num_pages=4096,
            page_size=4,
            max_seq_len=512,
            vocab_size=100,
            eos_ids=frozenset([99]),
            max_prefill_tokens=128,
            max_running=16,
            cache="naive",
        )
        self.scheduler = Scheduler(config)
        self.is_fair = is_fair
        self.open: dict[int, tuple[Key, Job, int]] = {}
        self.served: dict[str, int] = {}
        self.first: dict[int, int] = {}
        self.num_steps = self.num_requests = 0

    def ask(self, key: Key, num_prompt: int, num_output: int) -> int:
        uid = self.num_requests
        self.num_requests += 1
        params = SamplingParams(max_tokens=num_output, ignore_eos=True)
        ids = ids_to_bytes([1] * num_prompt)
        job = key.begin(TokenPrompt(ids=ids), params)
        share = job.share if self.is_fair else (0, 0)
        accepted = self.scheduler.add(
            UserMsg(uid=uid, ids=ids, sampling=params, share=KeyShare(*share))
        )
        assert isinstance(accepted, Accepted)
        job.count(accepted)
        self.open[uid] = key, job, self.num_steps
        return uid

    def step(self) -> None:
        plan = self.scheduler.plan()
        self.num_steps += 1
        if plan is None:
            return
        for event in self.scheduler.commit(plan, StepResult(next_ids=[5] * len(plan.sample_rows))):
            key, job, began = self.open[event.uid]
            if isinstance(event, Token):
                self.first.setdefault(event.uid, self.num_steps - began)
                self.served[key.name] = self.served.get(key.name, 0) + 1
                job.count(TextReply(uid=event.uid, text="", token_ids=[event.id]))
            elif isinstance(event, Finished):
                self.open.pop(event.uid)
                job.end()

    def waits(self, key: Key, times: int) -> list[int]:
        """Steps to the first token of requests that come one after the other."""
        uids = []
        for _ in range(times):
            uid = self.ask(key, 16, 4)
            while uid in self.open:
                self.step()
            uids.append(uid)
        return [self.first[uid] for uid in uids]


@pytest.mark.parametrize("is_fair", [True, False])
def test_a_flood_does_not_hold_up_a_light_key(is_fair: bool, tmp_path: Path) -> None:
    keys = ring(tmp_path, heavy=1, light=1)
    simulation = Simulation(is_fair=is_fair)
    for _ in range(1000):
        simulation.ask(keys["heavy"], 64, 64)
    for _ in range(100):
        simulation.step()
    if not is_fair:  # all the others come first
        assert max(simulation.waits(keys["light"], 1)) > 1000
        return
    waits = simulation.waits(keys["light"], 50)
    assert max(waits) == 1, "a running request of the heavy key gives its place at once"
    assert simulation.scheduler.stats.num_retractions <= 50


def test_shares_follow_the_weights_and_no_key_starves(tmp_path: Path) -> None:
    keys = ring(tmp_path, a=1, b=2, c=1)
    simulation = Simulation()
    for name, num_requests in (("a", 300), ("b", 600), ("c", 1)):
        for _ in range(num_requests):
            simulation.ask(keys[name], 16, 32)
    for _ in range(500):
        simulation.step()
    assert simulation.served["c"] == 32
    assert 1.8 < simulation.served["b"] / simulation.served["a"] < 2.2
    assert keys["a"]._share.owed > 0
    while simulation.open:
        simulation.step()
    for key in keys.values():
        assert key._share.owed == 0
        assert not key._share._shares.active


def test_an_idle_key_saves_nothing_up(tmp_path: Path) -> None:
    keys = ring(tmp_path, a=1, b=1)
    simulation = Simulation()
    for _ in range(200):
        simulation.ask(keys["a"], 16, 32)
    for _ in range(300):
        simulation.step()
    for _ in range(200):
        simulation.ask(keys["b"], 16, 32)
    before = dict(simulation.served)
    for _ in range(100):
        simulation.step()
    got = {name: simulation.served[name] - before.get(name, 0) for name in ("a", "b")}
    assert 0.5 < got["b"] / got["a"] < 2, got


def test_without_keys_requests_run_in_order_of_arrival() -> None:
    scheduler = Simulation().scheduler
    params = SamplingParams(max_tokens=1)
    for uid in range(3):
        scheduler.add(UserMsg(uid=uid, ids=ids_to_bytes([1]), sampling=params))
    assert [req.order for req in scheduler.requests.waiting] == [
        (0, 0, 1, 0),
        (0, 0, 2, 0),
        (0, 0, 3, 0),
    ]


def test_tokens_that_a_request_did_not_take_lower_the_next_tag() -> None:
    share = Share(Shares())
    assert [share.begin(100), share.begin(50)] == [0, 100]
    share.end(0, left=100)
    assert share.begin(1) == 50


def test_an_idle_key_begins_at_the_lowest_open_tag() -> None:
    shares = Shares()
    a, b, idle = (Share(shares) for _ in range(3))
    first, second = a.begin(100), a.begin(100)
    assert (first, second) == (0, 100)
    a.serve(80, expected=80)
    assert idle.begin(5) == 0
    idle.end(0, left=5)
    a.end(first, left=20)
    assert b.begin(1) == 100


def test_a_key_that_pauses_keeps_what_it_was_served() -> None:
    shares = Shares()
    a, b = Share(shares), Share(shares)
    tag = a.begin(1000)
    assert b.begin(10) == 0  # it stays open
    a.serve(1000, expected=1000)
    a.end(tag, left=0)
    assert a.begin(1) == 1000


def test_without_open_requests_all_keys_are_equal() -> None:
    shares = Shares()
    a, b = Share(shares), Share(shares)
    tag = a.begin(1000)
    a.serve(1000, expected=1000)
    a.end(tag, left=0)
    assert b.begin(1) == 1000, "that the other key used an idle server is not held against it"
    assert a.begin(1) == 1000


def test_what_an_answer_did_not_take_is_not_owed(tmp_path: Path) -> None:
    key = ring(tmp_path, a=1)["a"]
    prompt, params = TokenPrompt(ids=b""), SamplingParams(max_tokens=100)
    first, second = (key.begin(prompt, params, counts_prompt=False) for _ in range(2))
    assert (first.share.tag, second.share.tag) == (0, 100)
    first.count(TextReply(uid=0, text="", token_ids=[1] * 10))
    first.end()
    assert key.begin(prompt, params, counts_prompt=False).share.tag == 110


def test_what_is_owed_is_divided_by_the_weight() -> None:
    """The tag of a request is the tokens served and still expected, by the key's weight."""
    heavy = Share(Shares())
    heavy.weight = 2.0
    first = heavy.begin(100)
    heavy.serve(40, expected=40)
    assert (first, heavy.begin(100)) == (0, (40 + 60) // 2)
    heavy.end(first, left=60)
    assert heavy.begin(1) == (40 + 100) // 2
