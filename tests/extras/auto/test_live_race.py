"""Test Race, which gets the seconds of each step and chooses the plan of the next step."""

import random

import pytest

from speedkit_jupyter.extras.auto.race import BASELINE, Race


class Bursts:
    """Other programs that take the cores for 0.3 s of each 0.8 s."""

    def __init__(self) -> None:
        self._delay_s = 0.0

    def begin(self) -> None:
        self._delay_s = 0.0

    def seconds(self, wall_s: float) -> float:
        return min(self._delay_s, wall_s)

    def delayed(self, now_s: float, seconds: float, factor: float) -> float:
        factor = factor if now_s % 0.8 < 0.3 else 1.0
        self._delay_s += seconds * (factor - 1)
        return seconds * factor


class Run:
    """A simulated run. A step takes `step_s` divided by the speed of its plan, with noise."""

    def __init__(
        self,
        speeds: dict[str, float],
        step_s: float = 0.05,
        noise: float = 0.03,
        seed: int = 0,
        remaining_s: float = 0.0,
        bursts: bool = False,
        examination_s: float = 0.0,
    ) -> None:
        self.load = Bursts() if bursts else None
        known = {} if examination_s else dict.fromkeys(speeds, "")
        self.examined_s, told = dict[str, float](), (lambda _: remaining_s, lambda _: examination_s)
        objection = lambda name: None if "bf16" in name and name not in known else ""  # noqa: E731
        self.race, self._known = Race([*speeds], 0.02, objection, *told, self.load, seed), known
        self._speeds, self._step_s, self._noise = {BASELINE: 1.0, **speeds}, step_s, noise
        self._random = random.Random(seed)
        self.disturbed: dict[str, list[float]] = {}  # factors of a plan's next step times
        self.total_s, self.served, self.shares = 0.0, list[str](), list[float]()

    def steps(self, number: int, kinds: dict[str, float] | None = None) -> "Run":
        """Run `number` steps. `kinds` maps each kind of batch to a factor of its step's time."""
        for _ in range(number):
            kind = self._random.choice([*kinds]) if kinds else "all"
            name = self.race.active
            seconds = self._step_s * (kinds or {}).get(kind, 1.0) / self._speeds[name]
            seconds *= self._random.lognormvariate(0, self._noise)
            if factors := self.disturbed.get(name):
                seconds *= factors.pop(0)
            if self.load is not None:
                seconds = self.load.delayed(self.total_s, seconds, self._random.uniform(2.0, 6.0))
            self.total_s += seconds
            self.served.append(name)
            if self.race.step_ended(seconds, kind, self.total_s) != name:
                self.total_s += 1e-4
                self.race.switched(1e-4)
            if to_examine := self.race.to_examine():
                self._known[to_examine], self.examined_s[to_examine] = "", self.total_s
                self.race.charge(0.05, 0.05)
            self.shares.append(self.race.lost_s / self.total_s)
        return self


def test_the_fastest_plan_leads_and_has_its_gain_as_proof():
    run = Run({"good": 1.5, "better": 2.0, "no": 1.0}).steps(1500)
    assert run.race.leader == "better"
    assert run.race.proof.low < 2.0 < run.race.proof.high
    assert run.race.is_settled
    assert set(run.served[-100:]) == {"better"}


def test_equal_plans_leave_all_as_it_was():
    run = Run({"same": 1.0, "slower": 0.9}).steps(2000)
    assert run.race.leader == BASELINE
    assert run.race.proof is None
    assert set(run.served[-100:]) == {BASELINE}


def test_a_plan_that_is_far_slower_leaves_after_two_steps():
    run = Run({"slow": 0.1, "good": 1.5}).steps(2000)
    assert run.served.count("slow") == 2
    assert "times slower" in run.race.reasons["slow"]
    assert run.race.leader == "good"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("speeds", [{"a": 0.8, "b": 0.9, "c": 0.95}, {"a": 1.0}, {"a": 1.3}])
def test_what_it_costs_stays_within_the_overhead(speeds, seed):
    run = Run(speeds, seed=seed).steps(2000)
    assert max(run.shares[200:]) <= 0.02
    seconds = sum(0.05 / {BASELINE: 1.0, **speeds}[name] for name in run.served)
    assert run.total_s <= 1.05 * seconds
    assert seconds <= 1.02 * 0.05 * len(run.served)


@pytest.mark.parametrize("fused", [1.0, 1.4])
def test_a_plan_that_needs_no_examination_races_while_the_loop_pays_for_one(fused):
    speeds = {"bf16": 1.8, "fused": fused}
    run = Run(speeds, step_s=0.002, examination_s=0.05)
    while not run.examined_s:
        run.steps(1)
    assert "fused" in run.served
    assert run.examined_s["bf16"] < 1.35 * 0.05 / 0.02  # soon after 2 % of the run is 0.05 s
    assert run.race.leader == (BASELINE if fused == 1.0 else "fused")
    before = len(run.served)
    while run.race.leader != "bf16":
        run.steps(1)
    rival = "fused" if fused == 1.0 else BASELINE
    assert rival not in set(run.served[before:]) - {run.race.tried["bf16"].leader}
    run.steps(3000)
    assert run.race.is_settled
    assert {*run.race.tried} == {*speeds}


def test_a_part_of_a_plan_that_lost_to_the_rest_of_it_does_not_race_alone():
    run = Run({"fused": 1.5, "bf16+fused": 1.2, "bf16": 0.8}).steps(1000)
    assert run.race.leader == "fused"
    assert "times as fast as fused" in run.race.reasons["bf16"]
    assert "bf16" not in run.served


def test_what_remains_pays_in_advance_for_a_step_of_work():
    run, short = Run({"good": 1.5}, remaining_s=100.0), Run({"good": 1.5})
    assert run.steps(10).race.affords(0.04)
    assert not run.race.affords(0.08)
    assert not short.steps(10).race.affords(0.04)


def test_a_plan_that_is_probably_faster_serves_the_steps_that_wait_for_a_round():
    run = Run({"good": 1.8}, step_s=0.002, remaining_s=4.0)
    while not (run.race.duel and run.race.duel.is_likely):
        run.steps(1)
    run.race.charge(10.0)
    run.race.switch_s = 0.1
    run.steps(20)
    assert run.race.proof is None
    assert run.served[-5:] == ["good"] * 5


def test_rounds_do_not_wait_for_kernels_that_were_built_once():
    run = Run({"good": 1.5}, remaining_s=100.0).steps(10)
    run.race.charge(5.0, 0.01)
    assert not run.race.affords(0.01)
    assert run.steps(200).race.leader == "good"


def test_a_plan_whose_one_step_breaks_the_limit_leaves_at_once():
    run = Run({"slow": 0.01}, step_s=0.05).steps(200)
    assert run.served.count("slow") == 1
    assert run.race.is_settled


def test_a_step_that_is_disturbed_costs_nothing_and_drops_no_plan():
    run = Run({"good": 1.5})
    run.disturbed["good"] = [1.0, 1.0, 1.0, 1.0, 20.0]
    run.steps(300)
    assert run.race.leader == "good"
    assert run.race.lost_s < 0.1


def test_a_burst_of_disturbed_steps_calls_no_plan_slower():
    run = Run({"good": 1.5})
    run.disturbed["good"] = [1.0, 3.0, 3.0]
    run.steps(600)
    assert run.race.leader == "good"
    assert not run.race.reasons


def test_bursts_of_other_programs_hide_no_gain_and_drop_no_plan():
    races = [
        Run({"good": 1.5, "slow": 0.7}, seed=seed, bursts=True).steps(1500).race
        for seed in range(10)
    ]
    assert {race.leader for race in races} == {"good"}
    assert all("good" not in race.reasons for race in races)


def test_a_plan_that_left_in_a_burst_races_once_more_after_the_others():
    run = Run({"hit": 1.5, "other": 0.9}, bursts=True)
    run.steps(1)
    run.disturbed["hit"] = [1.0] * 2
    while "hit" in run.race.tried or not run.race.tried:
        run.steps(1)
        if run.race.active == "hit":
            run.race.load._delay_s = 10.0
            run.disturbed["hit"] = [30.0]
    assert run.race.waiting[-1] == "hit"
    assert not run.race.reasons
    run.disturbed.clear()
    assert run.steps(2000).race.leader == "hit"


def test_a_plan_that_leaves_twice_on_a_busy_machine_is_dropped():
    run = Run({"slow": 0.1}, bursts=True)
    run.race.overhead = 1.0
    for _ in range(300):
        run.steps(1)
        run.race.load._delay_s = 10.0
    assert "times slower" in run.race.reasons["slow"]


@pytest.mark.parametrize("plans", [1, 8])
def test_equal_plans_seldom_gain(plans):
    races = [Run({f"{n}": 1.0 for n in range(plans)}, 0.01, 0.05, seed) for seed in range(40)]
    assert sum(run.steps(800).race.proof is not None for run in races) <= 2


def test_batches_of_other_shapes_are_compared_with_their_like():
    mixed = {"short": 0.2, "long": 5.0}
    races = [Run({"same": 1.0}, seed=seed).steps(700, mixed).race for seed in range(8)]
    assert sum(race.proof is not None for race in races) <= 1
    assert Run({"good": 1.5}).steps(2000, mixed).race.leader == "good"


def test_a_gain_that_noise_hides_is_not_claimed_and_said():
    races = [Run({"good": 1.3}, noise=1.0, seed=seed).steps(1200).race for seed in range(8)]
    assert {race.leader for race in races} == {BASELINE}
    assert any(race.reasons["good"].endswith("too noisy to prove") for race in races)


def test_a_plan_that_is_dropped_is_never_in_force_again():
    run = Run({"good": 1.5}).steps(500)
    run.race.drop("good", "its loss was 9")
    run.steps(500)
    assert set(run.served[-500:]) == {BASELINE}
    assert run.race.proof is None


def test_a_pause_leaves_the_leader_in_force():
    run = Run({"good": 1.5}).steps(90)
    assert run.race.pause() == run.race.leader == run.race.active


def test_a_learned_plan_needs_no_race():
    run = Run({"good": 1.5, "other": 1.2})
    run.steps(3)
    run.race.begin_with("good", Run({"good": 1.5}).steps(1000).race.proof)
    assert set(run.steps(100).served[3:]) == {"good"}
    assert run.race.is_settled


def test_a_short_run_hardly_races():
    assert Run({"good": 1.5}).steps(10).served == [BASELINE] * 10
