"""The simulator: times of traces made by hand, worked out by hand."""

import itertools
import sys
from dataclasses import replace

import pytest
from unit_hardware import DEVICE, INSIDE, READ, SHARED, UNIT, compute, move, spans, trace

from zeroshard.errors import ConfigError
from zeroshard.planner.simulator.simulate import simulate
from zeroshard.planner.simulator.trace import Resource, Task, Trace

GATHERS = trace(
    move("gather 1", 2), move("gather 2", 3), compute("forward 1", 4, [0]), move("gather 3", 3, [2]),
    compute("forward 2", 4, [1, 2]), compute("forward 3", 1, [3, 4]), model_flops=20e12, tokens=50, axes={"dp": 4},
)  # fmt: skip


def test_gathers_overlap_with_computation():
    result = simulate(GATHERS, UNIT)
    assert spans(result) == [(0, 2), (2, 5), (2, 6), (6, 9), (6, 10), (10, 11)]
    assert result.step_s == 11
    assert result.busy == {DEVICE: 9, INSIDE: 8}
    assert result.exposed_s == 2  # of gather 1
    assert result.tflops == pytest.approx(20 / 11)
    assert result.tokens_per_s == pytest.approx(50 * 4 / 11)


def test_the_critical_path_adds_up_and_names_what_bounds():
    result = simulate(GATHERS, UNIT)
    assert result.critical == {DEVICE: 9, INSIDE: 2}
    assert "bound by computation: 82% of the step, 82% by 'forward'; 2,000 ms (18%)" in result.bound
    slow = simulate(GATHERS, UNIT, utilisation=0.25)
    assert sum(slow.critical.values()) == slow.step_s
    assert "bound by links inside nodes" in slow.bound
    assert "by 'gather'" in slow.bound


def test_utilisation_halves_bandwidth():
    assert simulate(trace(move("gather", 3)), UNIT, utilisation=0.5).step_s == 6


def test_latency_from_outside_counts_hops_of_a_tree_and_no_disks():
    given = trace(move("gather", 1, peers=1024), move("read", 1, [0], resource=READ))
    assert simulate(given, UNIT, latency_s=0.5).step_s == 1 + 10 * 0.5 + 1


def test_a_resource_serves_tasks_in_the_order_in_which_they_can_begin():
    """A gather that waits for its shard from disk holds up nobody; the reduction that can begin with another is behind it."""
    result = simulate(
        trace(move("read", 5, resource=READ), move("gather", 1, [0]), move("reduce 2", 6), move("reduce 1", 1)), UNIT
    )
    assert spans(result) == [(0, 5), (7, 8), (0, 6), (6, 7)]


def test_a_sum_that_waits_for_its_bytes_does_not_keep_computation_from_going_on():
    result = simulate(
        trace(compute("backward 2", 2), move("reduce 2", 3, [0]), compute("sum 2", 1, [1]), compute("backward 1", 4, [0])), UNIT
    )
    assert spans(result) == [(0, 2), (2, 5), (6, 7), (2, 6)]


def test_a_task_of_two_resources_waits_in_both_lines_and_nobody_overtakes_it():
    both = Task("gather", "forward", {INSIDE: 2.0, READ: 2.0})
    result = simulate(trace(move("read", 5, resource=READ), both, move("reduce", 1)), UNIT)
    assert spans(result) == [(0, 5), (5, 7), (7, 8)]


def test_a_task_takes_its_resources_together_and_as_long_as_the_slowest():
    both = Task("gather", "forward", {INSIDE: 2.0, READ: 3.0})
    result = simulate(trace(both, move("reduce", 1), compute("forward", 1)), UNIT)
    assert spans(result) == [(0, 3), (3, 4), (0, 1)]


def test_a_task_begins_once_where_both_of_its_resources_are_left_at_the_same_moment():
    both = Task("gather", "forward", {INSIDE: 2.0, READ: 2.0})
    result = simulate(trace(move("read", 3, resource=READ), move("reduce", 3), both, move("read", 1, resource=READ)), UNIT)
    assert spans(result) == [(0, 3), (0, 3), (3, 5), (5, 6)]
    assert result.step_s == sum(result.critical.values()) == 6


def test_cores_that_do_everything_overlap_nothing_but_disks():
    result = simulate(GATHERS, SHARED)
    assert result.step_s == 8 + 9
    assert result.busy == {Resource.HOST: 17}
    assert simulate(trace(move("read", 5, resource=READ), compute("forward", 4)), SHARED).step_s == 5


# A step ends when its optimizer is done (`end`), with a write and the next step's read under way. -1: of the step before, that read.
READS_AHEAD = (compute("forward", 3), compute("step", 2, [0, -1]), move("write", 2, [1], READ), move("read", 4, [1], READ))


def test_what_a_step_leaves_goes_on_beside_the_next_one():
    result = simulate(trace(*READS_AHEAD, end=(1,)), UNIT)
    # what the step before has left takes 6 s from where the ranks go on, of which 3 are beside the forward
    assert result.step_s == 8
    assert spans(result) == [(0, 2), (2, 6), (0, 3), (6, 8)]
    assert result.busy == {DEVICE: 5, READ: 6}
    assert result.exposed_s == 3
    assert result.critical == {DEVICE: 2, READ: 6}
    assert sum(result.waits.values()) == result.step_s


def test_a_step_that_waits_for_all_is_one_step():
    assert simulate(trace(*READS_AHEAD, end=(1, 2, 3)), UNIT).step_s == 3 + 2 + 6
    assert simulate(trace(compute("forward", 3), move("reduce", 1, [0]), end=(0, 1)), UNIT).step_s == 4


def test_a_repeated_trace_begins_where_its_rank_goes_on():
    twice = trace(*READS_AHEAD, end=(1,)).repeated(2)
    assert [task.after for task in twice.tasks] == [(), (0,), (1,), (1,), (1,), (3, 4), (5,), (5,)]
    assert twice.end == (5,)
    assert [task.after for task in trace(compute("a", 1), compute("b", 1)).repeated(2).tasks] == [(), (), (0, 1), (0, 1)]


def test_stages_of_a_pipeline_go_on_one_by_one():
    """The second stage writes for 4 s what it has made, and waits for it a step later: a step takes as long as the disk, not 8 s."""
    first = trace(compute("forward", 2), move("send", 1, [0], channel="x"), end=(1,))
    second = trace(
        Task("receive", "forward", {}, channel="x"), compute("forward", 1, [0]), move("write", 4, [1], READ), Task("wait", "step", {}, (1, -2)),
        end=(3,),
    )  # fmt: skip
    assert simulate([first, second], UNIT).step_s == 4


def test_a_disk_whose_reads_and_writes_take_turns():
    both = trace(move("read", 3, resource=READ), move("write", 2, resource=Resource.WRITE), compute("forward", 4))
    assert simulate(both, UNIT).step_s == 4
    assert spans(simulate(both, replace(UNIT, shared_disk=True))) == [(0, 3), (3, 5), (0, 4)]
    assert simulate(both, replace(SHARED, shared_disk=True)).step_s == 5


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8)])
def test_a_pipeline_waits_for_p_minus_1_over_m_plus_p_minus_1_of_the_step(stages, micro_batches):
    traces = []
    for stage in range(stages):
        made = Trace(axes={"pp": stages})
        for mb in range(micro_batches):
            after = [made.add(Task("receive", "forward", {}, channel=f"{stage - 1} {mb}"))] if stage else []
            done = made.add(compute(f"forward {mb}", 1, after))
            if stage < stages - 1:
                made.add(Task("send", "forward", {INSIDE: 0.0}, (done,), channel=f"{stage} {mb}"))
        traces.append(made)
    result = simulate(traces, UNIT)
    assert result.step_s == micro_batches + stages - 1
    idle = 1 - result.busy[DEVICE] / result.step_s
    assert idle == pytest.approx((stages - 1) / (micro_batches + stages - 1))


def test_the_kth_receive_takes_the_kth_send():
    first = trace(compute("a", 1), move("send", 2, [0], channel="x"), compute("b", 1), move("send", 2, [2], channel="x"))
    second = trace(Task("receive", "forward", {}, channel="x"), compute("c", 1, [0]), Task("receive", "forward", {}, channel="x"))
    assert spans(simulate([first, second], UNIT))[4:] == [(3, 3), (3, 4), (5, 5)]


def test_stages_that_wait_for_each_other_are_named():
    first = trace(Task("receive b", "forward", {}, channel="b"), move("send a", 1, [0], channel="a"))
    second = trace(Task("receive a", "forward", {}, channel="a"), move("send b", 1, [0], channel="b"))
    with pytest.raises(ConfigError, match="never ends: 'receive b' .trace 0. waits for 'send b' .trace 1. waits for 'receive a'"):
        simulate([first, second], UNIT)


def test_a_message_that_nobody_sends_is_named():
    with pytest.raises(ConfigError, match="'receive' of trace 0 waits for a message on channel 'x' that nobody sends"):
        simulate(trace(Task("receive", "forward", {}, channel="x")), UNIT)


@pytest.mark.parametrize("given", [{"utilisation": 0}, {"utilisation": 1.5}, {"latency_s": -1.0}, {"latency_s": float("nan")}])
def test_values_outside_their_range_are_named(given):
    with pytest.raises(ConfigError, match=f"{next(iter(given))}: expected"):
        simulate(GATHERS, UNIT, **given)


def test_no_trace_is_an_error_and_an_empty_one_a_step_of_no_time():
    with pytest.raises(ConfigError, match="at least one trace"):
        simulate([], UNIT)
    assert simulate(Trace(), UNIT).bound == "an empty step"


def test_the_work_grows_with_the_tasks_and_not_with_their_square():
    """20,000 tasks take less than a second; counted are calls, of Python and of C."""
    calls = []
    for pairs in (1_000, 10_000):
        made, count = Trace(), itertools.count()
        for number in range(pairs):
            made.add(move(f"gather {number}", 1, [2 * number - 1] if number else []))
            made.add(compute(f"forward {number}", 1, [2 * number]))
        sys.setprofile(lambda *_, count=count: next(count))
        try:
            step_s = simulate(made, UNIT).step_s
        finally:
            sys.setprofile(None)
        assert step_s == 2 * pairs
        calls.append(next(count))
    assert calls[1] < 11 * calls[0] < 11 * 1_000 * 500, calls
