"""The tasks: what each promises, that who reads is always right, and who guesses is not."""

import itertools
import math
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from lesson_code.data import tasks
from lesson_code.data.tasks import (
    Examples,
    associative_recall,
    copying,
    least_squares,
    majority,
    multi_query_associative_recall,
    running_mean,
)


class Task(NamedTuple):
    """What is known of a task: settings to draw it with, and who answers it."""

    settings: dict  # small, and all different
    too_small: dict  # for each argument the largest value that is refused
    read: Callable  # the right answer at position t of one sequence
    choices: int | None = None  # how many answers are equally likely, where one has to be recalled


def read_copying(row, t):
    return row[t - list(row).index(1)]


def read_pairs(values_from):
    """The value last paired with the key at position t, among the pairs before it."""

    def read(row, t):
        pairs = {}
        for i in range(0, t - 1, 2):
            if row[i] and row[i + 1] >= values_from:
                pairs[row[i]] = row[i + 1]
        return pairs[row[t]]

    return read


def read_notes(row, t):
    """The value of the last note on the key that position t asks for; 5 is the question."""
    return next(token % 6 for token in row[:t][::-1] if token // 6 == row[t] // 6 and token % 6 < 5)


TASKS = {
    "copying": Task(
        {"vocab_size": 7, "tokens": 5, "length": 13},
        {"vocab_size": 3, "tokens": 0, "length": 9},
        read_copying,
        choices=5,  # 7 tokens without the blank and the signal
    ),
    "associative_recall": Task(
        {"vocab_size": 11, "pairs": 6, "length": 16},
        {"vocab_size": 3, "pairs": 0, "length": 12},
        read_pairs(values_from=5),
        choices=6,
    ),
    "multi_query_associative_recall": Task(
        {"vocab_size": 25, "pairs": 5, "length": 31},
        {"vocab_size": 3, "pairs": 0, "length": 19, "power": -0.1},
        read_pairs(values_from=12),
        choices=13,
    ),
    "needle_in_a_haystack": Task(
        {"vocab_size": 9, "length": 12},
        {"vocab_size": 2, "length": 2, "position": -1},
        lambda row, t: row[list(row).index(0) + 1],
        choices=8,
    ),
    "overwriting": Task(
        {"keys": 4, "values": 5, "active": 3, "length": 11},
        {"keys": 0, "values": 0, "active": 0, "length": 0},
        read_notes,
    ),
    "majority": Task(
        {"vocab_size": 4, "length": 15},
        {"vocab_size": 1, "length": 0},
        lambda row, t: np.bincount(row[: t + 1]).argmax(),
    ),
    "running_mean": Task(
        {"length": 9}, {"length": 0}, lambda row, t: sum(row[: t + 1, 0]) / (t + 1)
    ),
    "in_context_regression": Task(
        {"dim": 3, "pairs": 7},
        {"dim": 0, "pairs": 0},
        lambda row, t: row[t + 1, -1],  # which may look ahead
    ),
}
TOKENS = [name for name, task in TASKS.items() if {"vocab_size", "keys"} & set(task.settings)]
every_task = pytest.mark.parametrize("name", TASKS)
every_vocabulary = pytest.mark.parametrize(
    "name", [name for name in TOKENS if "vocab_size" in TASKS[name].settings]
)
every_recall = pytest.mark.parametrize("name", [n for n in TOKENS if TASKS[n].choices])


def draw(name, batch=500, seed=0, **changed):
    return getattr(tasks, name)(**TASKS[name].settings | changed, batch=batch, seed=seed)


def refuses(error, message):
    return pytest.raises(error, match="^" + re.escape(message))


# --- What all of them return -----------------------------------------------------------------


def test_the_tasks_are_all_here():
    assert sorted(tasks.__all__) == sorted([*TASKS, "Examples", "least_squares"])


@every_task
def test_shapes_and_types(name):
    examples = draw(name, batch=3)
    assert type(examples) is Examples
    inputs, targets, mask = examples
    B, N = targets.shape
    assert (B, N) == (3, TASKS[name].settings.get("length", 14))
    assert mask.shape == (B, N) and mask.dtype == bool and mask.any(axis=1).all()
    assert inputs.shape[:2] == (B, N) and inputs.ndim == (2 if name in TOKENS else 3)
    assert inputs.dtype == targets.dtype == (np.int64 if name in TOKENS else np.float64)
    assert (targets[~mask] == 0).all()


@every_vocabulary
def test_all_tokens_are_in_the_vocabulary(name):
    inputs, targets, mask = draw(name)
    V = TASKS[name].settings["vocab_size"]
    assert set(np.unique(inputs)) == set(range(V))  # and none of them never comes
    assert targets.min() >= 0 and targets.max() < V


@every_task
def test_a_seed_gives_the_same_batch_and_a_generator_the_next(name):
    first, second, other = draw(name), draw(name), draw(name, seed=1)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a is not b and a.flags.writeable
    assert (first.inputs != other.inputs).any()
    rng = np.random.default_rng(0)
    once, again = draw(name, seed=rng), draw(name, seed=rng)
    np.testing.assert_array_equal(once.inputs, first.inputs)
    assert (again.inputs != once.inputs).any()


def test_the_same_on_every_machine():
    """What NumPy's generator has given elsewhere: integers to the last, sums to the last digits."""
    assert draw("copying", batch=1).inputs.tolist() == [[6, 5, 4, 3, 3, 0, 0, 0, 1, 6, 5, 4, 3]]
    pairs, queries = [5, 18, 7, 16, 8, 14, 3, 23, 1, 24], [1, 0, 7, 0, 3, 0, 0, 0, 5, 0, 8]
    inputs = draw("multi_query_associative_recall", batch=1).inputs
    assert inputs.tolist() == [pairs + queries + [0] * 10]
    mean = draw("running_mean", batch=1).targets[0, -1]
    np.testing.assert_allclose(mean, 0.2058488752555853, rtol=1e-12)


@every_task
def test_an_empty_batch(name):
    inputs, targets, mask = draw(name, batch=0)
    assert len(inputs) == len(targets) == len(mask) == 0
    assert targets.shape == draw(name, batch=1).targets[:0].shape


# --- Who reads is always right, who guesses is not -------------------------------------------


@every_task
def test_who_reads_is_always_right(name):
    inputs, targets, mask = draw(name, batch=200)
    for b, t in np.argwhere(mask):
        np.testing.assert_allclose(TASKS[name].read(inputs[b], t), targets[b, t], rtol=1e-12)


@every_recall
def test_answers_are_as_likely_as_each_other(name):
    """So that no guess is better than another: a chi-square of each against the uniform."""
    _, targets, mask = draw(name, batch=20_000)
    found = np.unique(targets[mask], return_counts=True)[1]
    n = TASKS[name].choices
    assert len(found) == n
    expected = found.sum() / n
    square = ((found - expected) ** 2 / expected).sum()
    assert square < n - 1 + 5 * math.sqrt(2 * (n - 1))


@every_recall
def test_the_position_and_the_token_there_tell_nothing(name):
    """The best guess from the token that asks and its position, learned on half of the batch."""
    inputs, targets, mask = draw(name, batch=40_000)
    V, n = TASKS[name].settings["vocab_size"], TASKS[name].choices
    rows, at = np.nonzero(mask)
    asked, answers, train = at * V + inputs[mask], targets[mask], rows < 20_000
    counts = np.zeros((asked.max() + 1, V))
    np.add.at(counts, (asked[train], answers[train]), 1)
    right = (counts.argmax(axis=1)[asked] == answers)[~train]
    assert abs(right.mean() - 1 / n) < 5 * math.sqrt(1 / n / len(right))


def test_the_end_of_the_answer_is_not_among_the_inputs():
    """Copying shows each token only after it was asked for."""
    inputs, targets, mask = draw("copying")
    np.testing.assert_array_equal(inputs[:, 9:], targets[:, 8:-1])
    for length in (10, 11, 30):
        inputs, targets, mask = draw("copying", length=length)
        assert (inputs[:, 5 : length - 5] == 0).all() and (inputs[:, length - 5] == 1).all()
        assert (inputs[:, :5] >= 2).all()
        np.testing.assert_array_equal(mask.sum(axis=0), [0] * (length - 5) + [500] * 5)
        np.testing.assert_array_equal(targets[:, -5:], inputs[:, :5])


def test_texts_of_one_token():
    inputs, targets, mask = copying(vocab_size=4, tokens=1, length=2, batch=4)
    assert (inputs[:, 1] == 1).all() and (targets[:, 1] == inputs[:, 0]).all()


# --- Associative recall ----------------------------------------------------------------------


def test_the_last_value_counts():
    inputs, targets, _ = draw("associative_recall", batch=2000)
    keys, values = inputs[:, 0:12:2], inputs[:, 1:12:2]
    matches = keys == inputs[:, -1:]
    assert matches.any(axis=1).all()
    last = [np.flatnonzero(row)[-1] for row in matches]
    np.testing.assert_array_equal(targets[:, -1], values[np.arange(2000), last])
    rewritten = matches.sum(axis=1) > 1
    first = values[np.arange(2000), matches.argmax(axis=1)]
    assert rewritten.mean() > 0.5 and (first != targets[:, -1])[rewritten].mean() > 0.7
    assert (inputs[:, 12:-1] == 0).all()


def test_keys_and_values_are_halves_of_the_vocabulary():
    for V in (4, 5, 10, 11):
        inputs, _, _ = associative_recall(vocab_size=V, pairs=50, length=101, batch=100)
        assert set(np.unique(inputs[:, 0:100:2])) == set(range(1, V // 2))
        assert set(np.unique(inputs[:, 1:100:2])) == set(range(V // 2, V))


def mqar(batch=500, **changed):
    return draw("multi_query_associative_recall", batch=batch, **changed)


def test_each_key_is_asked_for_once():
    inputs, _, mask = mqar()
    keys, values, later = inputs[:, 0:10:2], inputs[:, 1:10:2], inputs[:, 10:]
    assert all(len(set(row)) == 5 for row in [*keys, *values])
    assert keys.min() == 1 and keys.max() == 11 and values.min() == 12 and values.max() == 24
    np.testing.assert_array_equal(mask, np.pad(later != 0, [(0, 0), (10, 0)]))
    np.testing.assert_array_equal(np.sort(later, axis=1)[:, -5:], np.sort(keys, axis=1))
    assert (later[:, 1::2] == 0).all()  # an answer is never shown
    assert (later[:, 20:] == 0).all()  # a slot needs room for the answer


def test_the_defaults_are_those_of_the_paper():
    inputs, targets, mask = multi_query_associative_recall(batch=20)
    assert inputs.shape == (20, 64) and (mask.sum(axis=1) == 8).all()
    assert inputs[:, 0:16:2].max() < 4096 <= inputs[:, 1:16:2].min()
    same = multi_query_associative_recall(vocab_size=8192, pairs=8, length=64, power=0.01, batch=20)
    np.testing.assert_array_equal(same.inputs, inputs)


def test_with_the_shortest_length_every_slot_has_a_query():
    _, _, mask = mqar(length=20)
    np.testing.assert_array_equal(mask, np.tile([False] * 10 + [True, False] * 5, (500, 1)))


def slots(power, pairs, batch=40_000):
    """Slot of each key, of seven slots: (batch, pairs)."""
    length = 2 * pairs + 14
    inputs, _, _ = mqar(power=power, pairs=pairs, length=length, batch=batch)
    keys, later = inputs[:, 0 : 2 * pairs : 2], inputs[:, 2 * pairs :: 2]
    return np.argmax(later[:, None] == keys[..., None], axis=-1)


def test_a_large_power_puts_the_queries_last():
    found = np.sort(slots(1e6, 2, batch=50), axis=1)
    assert (found == found.max() - [1, 0]).all()


@pytest.mark.parametrize("power", [0, 0.01, 0.5, 1, 2.5])
def test_gaps_follow_a_power_law(power):
    weight = np.arange(1, 8) ** (power - 1.0)
    p = weight / weight.sum()
    found = np.bincount(slots(power, 1)[:, 0], minlength=7) / 40_000
    np.testing.assert_allclose(found, p, rtol=0, atol=5 * math.sqrt(0.25 / 40_000))
    # Of two keys the first draws first, the second from what is left.
    both = slots(power, 2)
    for i, j in itertools.permutations(range(7), 2):
        expected = p[i] * p[j] / (1 - p[i])
        share = ((both[:, 0] == i) & (both[:, 1] == j)).mean()
        assert abs(share - expected) < 5 * math.sqrt(expected / 40_000)


def test_pairs_up_to_the_number_of_keys():
    inputs, _, mask = mqar(vocab_size=12, pairs=5, length=20)
    assert (np.sort(inputs[:, 0:10:2], axis=1) == np.arange(1, 6)).all()
    assert (mask.sum(axis=1) == 5).all()


# --- Needle, majority, mean, regression --------------------------------------------------------


def test_the_needle_is_where_it_should_be():
    inputs, targets, mask = draw("needle_in_a_haystack", batch=20_000)
    assert ((inputs == 0).sum(axis=1) == 2).all() and (inputs[:, -1] == 0).all()
    at = np.argmax(inputs == 0, axis=1)
    found = np.bincount(at, minlength=10) / 20_000
    assert len(found) == 10
    np.testing.assert_allclose(found, 0.1, rtol=0, atol=5 * math.sqrt(0.1 / 20_000))
    for position in (0, 4, 9):
        inputs, targets, mask = draw("needle_in_a_haystack", position=position)
        assert (np.argmax(inputs == 0, axis=1) == position).all()
        np.testing.assert_array_equal(targets[:, -1], inputs[:, position + 1])
        assert (mask == [False] * 11 + [True]).all()


def test_notes_are_about_a_few_keys_and_each_is_asked_for_after_its_first_note():
    inputs, targets, mask = draw("overwriting", batch=2_000)
    key, value = inputs // 6, inputs % 6
    assert set(np.unique(inputs)) == set(range(4 * 6))
    assert max(len(set(row)) for row in key) == 3
    assert abs((value == 5).mean() - 1 / 2) < 5 / (2 * math.sqrt(value.size))
    for counts, n in ((np.bincount(key.ravel()), 4), (np.bincount(targets[mask]), 5)):
        assert len(counts) == n
        np.testing.assert_allclose(counts / counts.sum(), 1 / n, rtol=0.1)
    for b, t in itertools.product(range(200), range(11)):
        known = any(key[b, j] == key[b, t] and value[b, j] < 5 for j in range(t))
        assert mask[b, t] == (known and value[b, t] == 5)


def test_ties_are_not_asked_for():
    inputs, _, mask = draw("majority")
    for b, t in np.argwhere(np.ones_like(mask)):
        counts = np.sort(np.bincount(inputs[b, : t + 1], minlength=4))
        assert mask[b, t] == (counts[-1] > counts[-2])
    assert mask[:, 0].all() and not mask[:, 1].all()


def test_sequences_differ_in_what_is_frequent():
    """The share of a token is uniform over the simplex: of two tokens, uniform over [0, 1]."""
    inputs, targets, mask = majority(vocab_size=2, length=1000, batch=4000)
    share = np.sort(inputs.mean(axis=1))
    np.testing.assert_allclose(share, np.linspace(0, 1, 4000), rtol=0, atol=0.05)
    assert abs(targets[:, -1][mask[:, -1]].mean() - 0.5) < 0.05


def test_a_mean_is_that_of_a_level_and_noise():
    inputs, targets, mask = running_mean(length=400, batch=4000)
    assert mask.all()
    level = targets[:, -1]
    assert abs(level.mean()) < 0.1 and abs(level.std() - 1) < 0.1
    assert abs((inputs[..., 0] - level[:, None]).std() - 1) < 0.01
    np.testing.assert_allclose(targets[:, 0], inputs[:, 0, 0])


def test_a_value_follows_its_x():
    inputs, targets, mask = draw("in_context_regression")
    assert (inputs[:, 0::2, 3] == 0).all() and (inputs[:, 1::2, :3] == 0).all()
    assert mask[:, 0::2].all() and not mask[:, 1::2].any()
    x, y = inputs[:, 0::2, :3], inputs[:, 1::2, 3]
    np.testing.assert_array_equal(targets[:, 0::2], y)
    w = np.linalg.solve(x[:, :3], y[:, :3, None])  # three pairs fix three channels
    np.testing.assert_allclose((x @ w)[..., 0], y, rtol=1e-6, atol=1e-6)
    assert abs(w.mean()) < 0.15 and abs(w.std() - 1) < 0.15


def test_least_squares_is_the_yardstick():
    inputs, targets, _ = draw("in_context_regression", batch=20_000)
    answers = least_squares(inputs)
    errors = ((answers - targets) ** 2).mean(axis=0)
    assert (answers[:, 1::2] == 0).all()
    np.testing.assert_allclose(errors[0:6:2], [3, 2, 1], rtol=0.06)
    assert errors[6::2].max() < 1e-12
    for b, i in itertools.product(range(3), range(1, 7)):
        x, y = inputs[b, 0 : 2 * i : 2, :3], inputs[b, 1 : 2 * i : 2, 3]
        w = np.linalg.lstsq(x, y, rcond=None)[0]
        np.testing.assert_allclose(answers[b, 2 * i], inputs[b, 2 * i, :3] @ w, rtol=1e-8)


@pytest.mark.parametrize(("dtype", "tolerance"), [("f2", 2e-2), ("f4", 1e-3), ("f8", 1e-9)])
def test_least_squares_is_the_shortest_where_an_x_comes_again(dtype, tolerance):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(30, 6, 4)), rng.normal(size=(30, 4, 1))
    x[:, 1] = x[:, 2] = x[:, 0]
    inputs = np.zeros((30, 12, 5))
    inputs[:, 0::2, :4], inputs[:, 1::2, 4:] = x, x @ w
    answers = least_squares(inputs.astype(dtype))
    assert answers.dtype == dtype
    for i in (1, 2, 3):  # of which there is one x: w is known along it
        along = np.sum(x[:, i] * x[:, 0], axis=1) / np.sum(x[:, 0] ** 2, axis=1)
        expected = along * (x[:, :1] @ w)[:, 0, 0]
        np.testing.assert_allclose(answers[:, 2 * i], expected, rtol=tolerance, atol=tolerance)


def test_least_squares_does_not_look_ahead():
    inputs, _, _ = draw("in_context_regression", batch=5)
    answers = least_squares(inputs)
    changed = inputs.copy()
    changed[:, 7:] += 1
    np.testing.assert_array_equal(least_squares(changed)[:, :7], answers[:, :7])
    assert (least_squares(changed)[:, 8:] != answers[:, 8:]).any()
    assert least_squares(inputs.astype(np.float32)).dtype == np.float32
    assert least_squares(inputs[:, :0]).shape == (5, 0)


# --- What is refused -----------------------------------------------------------------------------


@every_task
def test_what_is_too_small_is_refused(name):
    for argument, value in {**TASKS[name].too_small, "batch": -1, "seed": -1}.items():
        with pytest.raises(ValueError, match=f"^{argument} must be at least .*, got {value}"):
            draw(name, **{"batch": 1, argument: value})


@every_task
def test_other_types_are_refused(name):
    for argument in [*TASKS[name].settings, "batch", "seed"]:
        with refuses(TypeError, f"{argument} must be an integer, got 5.0."):
            draw(name, **{argument: 5.0})
    with pytest.raises(TypeError, match="positional"):
        getattr(tasks, name)(*TASKS[name].settings.values(), 3)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("copying", {"length": 9}, "length must be at least 2 · tokens = 10, got 9."),
        ("associative_recall", {"length": 12}, "length must be at least 2 · pairs + 1 = 13"),
        ("multi_query_associative_recall", {"length": 19}, "length must be at least 4 · pairs"),
        ("multi_query_associative_recall", {"pairs": 12, "length": 99}, "pairs must be at most"),
        ("multi_query_associative_recall", {"power": math.nan}, "power must be finite, got nan."),
        ("overwriting", {"active": 5}, "active must be at most keys = 4, got 5."),
        ("needle_in_a_haystack", {"position": 10}, "position must be at most length - 3 = 9"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(name, settings, message):
    with refuses(ValueError, message):
        draw(name, **settings)


def test_other_inputs_of_least_squares_are_refused():
    inputs = draw("in_context_regression").inputs
    with refuses(TypeError, "inputs must be a NumPy array, got list."):
        least_squares(inputs.tolist())
    with refuses(TypeError, "inputs must have a floating dtype"):
        least_squares(inputs.astype(int))
    with refuses(ValueError, "inputs must have shape (B, N, D + 1) with an even N and D >= 1, got"):
        least_squares(inputs[0])
    for wrong in (inputs[:, 1:], inputs[..., :1]):
        with refuses(ValueError, "inputs must have shape (B, N, D + 1) with an even N and D >= 1"):
            least_squares(wrong)
