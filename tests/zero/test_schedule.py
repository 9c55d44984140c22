"""Schedule: records an order, follows it, names the first deviation of a step, records anew. Pure data, no tensors."""

from hypothesis import given
from hypothesis import strategies as st

from zeroshard.engine.schedule import Schedule, Visit

NAMES = ["(root)", "blocks.0", "blocks.1", "blocks.2"]
visits = st.lists(st.builds(Visit, st.integers(0, 3), st.booleans()), min_size=1, max_size=12)


def play(schedule: Schedule, order: list[Visit], training: bool = True) -> list[str]:
    """One step; the messages of its deviations."""
    before = len(schedule.notes)
    for visit in order:
        schedule.visit(visit, training)
    schedule.end(training)
    return list(schedule.notes)[before:]


@given(visits)
def test_the_first_step_records_and_foresees_nothing(order):
    schedule = Schedule(NAMES)
    for visit in order:
        schedule.visit(visit, True)
        assert schedule.upcoming(True) == []
    schedule.end(True)
    assert schedule.tracks[True].order == order and not schedule.notes


@given(visits, st.integers(1, 3))
def test_a_repeated_step_is_foreseen_from_every_visit(order, steps):
    schedule = Schedule(NAMES)
    play(schedule, order)
    for _ in range(steps):
        assert schedule.upcoming(True) == order
        for position, visit in enumerate(order):
            schedule.visit(visit, True)
            assert schedule.upcoming(True) == order[position + 1 :]
        schedule.end(True)
    assert not schedule.notes


@given(visits, visits)
def test_a_deviation_is_named_once_where_it_happens_and_the_new_order_is_kept(order, changed):
    schedule = Schedule(NAMES)
    play(schedule, order)
    common = next((i for i, (a, b) in enumerate(zip(order, changed, strict=False)) if a != b), min(len(order), len(changed)))
    messages = play(schedule, changed)
    if common == len(changed):  # the step only ended early: nothing wrong was foreseen
        assert messages == []
    else:
        assert len(messages) == 1 == len(schedule.notes)
        assert f"(visit {common})" in messages[0]
        assert f"got {NAMES[changed[common].unit]}" in messages[0]
        wanted = NAMES[order[common].unit] if common < len(order) else "the end of the step"
        assert f"expected {wanted}" in messages[0]
    assert schedule.tracks[True].order == changed
    assert play(schedule, changed) == []


@given(visits, visits)
def test_after_a_deviation_nothing_is_foreseen_until_the_step_ends(order, changed):
    schedule = Schedule(NAMES)
    play(schedule, order)
    for visit in changed:
        schedule.visit(visit, True)
        if schedule.notes:
            assert schedule.upcoming(True) == []
    schedule.end(True)


@given(visits, visits)
def test_evaluation_has_a_record_of_its_own(training, evaluation):
    schedule = Schedule(NAMES)
    play(schedule, training, training=True)
    assert play(schedule, evaluation, training=False) == []
    assert play(schedule, training, training=True) == []
    assert play(schedule, evaluation, training=False) == []
    assert schedule.tracks[True].order == training and schedule.tracks[False].order == evaluation


def test_an_end_without_visits_changes_nothing():
    schedule = Schedule(NAMES)
    play(schedule, [Visit(0, False), Visit(0, True)])
    schedule.end(True)
    assert schedule.upcoming(True) == [Visit(0, False), Visit(0, True)]


def test_each_kind_of_step_that_begins_apart_from_the_models_forward_has_a_record():
    """A loss in chunks: the head alone, forward and backward, for each chunk; then the backward of what comes before."""
    schedule, body = Schedule(NAMES), [Visit(0, False), Visit(1, False)]
    head, back = [Visit(2, False), Visit(2, True)], [Visit(1, True), Visit(0, True)]
    foreseen = []
    for _ in range(3):
        for visit in body:
            schedule.visit(visit, True)
        for _ in range(3):
            for visit in head:
                schedule.visit(visit, True, alone=True)
            schedule.end(True)
            assert schedule.skipped(head[0], alone=True) == []
        for visit in back:
            schedule.visit(visit, True, alone=True)
            foreseen.append(schedule.upcoming(True))
        schedule.end(True)
    assert not schedule.notes and foreseen == [[], [], back[1:], [], back[1:], []]
    assert schedule.upcoming(True) == body + head


def test_a_step_that_begins_with_a_submodule_called_alone_follows_the_same_record():
    """Each step calls model.encoder, then the model: also a rank that skips a unit, or the encoder, has the record of all."""
    encoder = Visit(0, False)
    rest = [Visit(1, False), Visit(2, False), Visit(2, True), Visit(1, True), Visit(0, True)]
    schedule = Schedule(NAMES)
    for skipped in (None, 2, 0):
        taken = []
        for visit in [visit for visit in (encoder, *rest) if visit.unit != skipped]:
            alone = visit == encoder or visit.backward
            for other in schedule.skipped(visit, alone):
                schedule.visit(other, True, alone)
                taken.append(other)
            schedule.visit(visit, True, alone)
        taken += schedule.skipped(None)
        for other in schedule.skipped(None):
            schedule.visit(other, True, alone=True)
        schedule.end(True)
        assert taken == [visit for visit in (encoder, *rest) if visit.unit == skipped]
        assert schedule.tracks[True].orders == {None: [encoder, *rest]} and not schedule.notes
