"""Mistakes in the exercises of the chapter on the one recurrence and its many models."""

from __future__ import annotations

import numpy as np
import pytest

from lesson_code.checks import check_exercise

QUESTIONS = "Three questions"
TABLE = "The table"
CONVENTIONS = "Conventions"


@pytest.mark.parametrize(
    ("answer", "words", "section"),
    [
        ([[10, 20], [30, 40], [135, 170]], "without its bonus", TABLE),
        ([[0, 0], [0, 0], [35, 50]], "own token is missing", TABLE),
        ([[10, 20], [30, 40], [117.5, 145]], "This is RetNet", CONVENTIONS),
        ([[30, 60], [90, 120], [317.5, 385]], "counted twice", CONVENTIONS),
        ([[20, 40], [60, 80], [217.5, 265]], "decayed before it was read", TABLE),
        ([[20, 40], [60, 80], [270, 340]], "multiplies the memory, too", TABLE),
        ([[20, 40], [60, 80], [240, 300]], "Nothing has decayed", QUESTIONS),
        ([[20, 40], [60, 80], [135, 170]], "only for keys that are unit vectors", TABLE),
    ],
)
def test_by_hand(refused, answer, words, section) -> None:
    refused("ex-family-hand", words, section, out=answer)


# --- Rows within a row -------------------------------------------------------------------------


def chosen(r, k, v, log_decay, kappa, a):
    return dict(r=r, k=k, v=v, log_decay=log_decay, kappa=kappa, a=a)


def columns(x, k):
    return np.stack([x] * k.shape[1], axis=1)


@pytest.mark.parametrize(
    ("choose", "words", "section"),
    [
        (lambda q, k, v, g: chosen(q, k, v, g, k, k * 0 + 1), "it only fades", TABLE),
        (lambda q, k, v, g: chosen(q, k, v, np.exp(g), k, 0 * k), "takes its log", CONVENTIONS),
        (lambda q, k, v, g: chosen(q, k, v, np.zeros_like(g), k, 0 * k), "Nothing fades", TABLE),
        (lambda q, k, v, g: chosen(k, q, v, g, q, 0 * k), "changed places", TABLE),
    ],
)
def test_as_gla(refused, choose, words, section) -> None:
    refused("ex-family-special", words, section, as_gla=choose)


def gated(k_share=True, a=lambda alpha, beta: alpha * beta, kappa=lambda k, beta: k, gate=1):
    def choose(q, k, v, beta, log_decay):
        b, g = columns(beta, k), gate * columns(log_decay, k)
        key = b * k if k_share else k
        return chosen(q, key, v, g, kappa(k, b), a(np.exp(g), b))

    return choose


@pytest.mark.parametrize(
    ("choose", "words", "section"),
    [
        (gated(a=lambda alpha, beta: beta), "The state before its decay", CONVENTIONS),
        (gated(k_share=False), "Too much is written", TABLE),
        (gated(a=lambda alpha, beta: alpha), "has to be the share beta", TABLE),
        (gated(kappa=lambda k, b: b * k), "enters the removal twice", TABLE),
        (gated(gate=0), "this is DeltaNet", TABLE),
        (gated(a=lambda alpha, beta: -alpha * beta), "added at the key", TABLE),
        (
            lambda q, k, v, beta, log_decay: gated()(q, k, columns(beta, v) * v, beta, log_decay),
            "enters the write twice",
            TABLE,
        ),
        (gated(a=lambda alpha, beta: 0 * alpha), "Nothing is removed", TABLE),
        (
            gated(kappa=lambda k, b: k / np.sqrt(np.sum(k * k, axis=1))[:, None]),
            "Here kappa has length 1",
            TABLE,
        ),
    ],
)
def test_as_gated_delta(refused, choose, words, section) -> None:
    refused("ex-family-special", words, section, as_gated_delta=choose)


def delta(**changes):
    choose = gated(**changes)
    return lambda q, k, v, beta: choose(q, k, v, beta, np.zeros(len(k)))


def test_as_delta(refused) -> None:
    label = "ex-family-special"
    refused(label, "Too much is written", TABLE, as_delta=delta(k_share=False))
    refused(label, "the share beta", TABLE, as_delta=delta(a=lambda alpha, b: alpha))
    refused(label, "enters the removal twice", TABLE, as_delta=delta(kappa=lambda k, b: b * k))
    refused(label, "plain linear attention", TABLE, as_delta=delta(a=lambda alpha, b: 0 * b))


def test_right_rows() -> None:
    """The value may carry the share, and kappa a half of it each."""

    def value_carries(q, k, v, beta):
        root = np.sqrt(beta)[:, None]
        return chosen(q, k, beta[:, None] * v, 0 * k, root * k, 1 + 0 * k)

    check_exercise("ex-family-special", as_gated_delta=gated(), as_delta=value_carries)


def test_what_run_does_not_know_is_said(refused) -> None:
    def without_kappa(q, k, v, log_decay):
        return dict(r=q, k=k, v=v, log_decay=log_decay, a=0 * k)

    refused("ex-family-special", "missing or unknown: kappa", TABLE, as_gla=without_kappa)


def test_what_has_no_rows_is_said(refused) -> None:
    def one_number(q, k, v, log_decay):
        return chosen(q, k, v, log_decay, k, 0)

    def one_decay(q, k, v, beta, log_decay):
        return gated()(q, k, v, beta, log_decay) | {"log_decay": log_decay}

    label = "ex-family-special"
    refused(label, "a must have a row for every token", TABLE, as_gla=one_number)
    refused(label, "its shape is (7,)", TABLE, as_gated_delta=one_decay)
    refused(label, "a dictionary is expected", TABLE, as_gla=lambda q, k, v, log_decay: (q, k, v))


# --- A loop in place ---------------------------------------------------------------------------


def in_place(order, decay=0.5):
    """Letters in the order of the loop: r reads, d decays, w writes."""

    def fn(q, k, v):
        S = np.zeros((k.shape[1], v.shape[1]))
        out = np.zeros((len(q), v.shape[1]))
        for t in range(len(q)):
            for step in order:
                if step == "r":
                    out[t] = S.T.dot(q[t])
                elif step == "d":
                    S *= decay
                else:
                    S += k[t][:, None] * v[t]
        return out

    return fn


def adds_its_own(q, k, v):
    return in_place("rdw")(q, k, v) + np.einsum("nd,nd->n", q, k)[:, None] * v


def test_in_place(refused) -> None:
    label = "ex-family-in-place"
    refused(label, "still sees its own token", CONVENTIONS, mended=in_place("dwr"))
    refused(label, "half as large", CONVENTIONS, mended=in_place("drw"))
    refused(label, "half as large", CONVENTIONS, mended=in_place("rwd"))
    refused(label, "still sees its own token", CONVENTIONS, mended=in_place("wrd"))
    refused(label, "a bonus of 1", CONVENTIONS, mended=adds_its_own)
    refused(label, "Nothing decays", QUESTIONS, mended=in_place("rw"))
    check_exercise(label, mended=in_place("rdw"))


def test_what_goes_wrong_in_place(refused) -> None:
    label = "ex-family-in-place"
    refused(label, "look at `before`", CONVENTIONS, after_right=False)
    refused(label, "second name", CONVENTIONS, before_right=True)
    refused(label, "Is it a later one", CONVENTIONS, causal_objects=True)


# --- A new row ---------------------------------------------------------------------------------


def by_matrices(order, decays=lambda x: np.exp(x.log_decay), beta=lambda x: x.beta):
    """The transition as a product of matrices, the last letter acts first."""

    def transition(S, x):
        D = len(x.k)
        matrices = {
            "d": np.diag(decays(x) * np.ones(D)),
            "c": np.identity(D) - beta(x) * x.k[:, None] * x.k[None],
        }
        for letter in reversed(order):
            S = np.dot(matrices[letter], S)
        return S

    return transition


def seventh(S, x):
    return (np.diag(np.exp(x.log_decay)) - x.beta * np.outer(x.k, x.k)) @ S


def one_number(S, x):
    return (np.identity(len(S)) - x.beta * x.k @ x.k.T) @ np.diag(np.exp(x.log_decay)) @ S


def written_too(S, x):
    return by_matrices("cd")(S, x) + x.beta * np.outer(x.k, x.v)


@pytest.mark.parametrize(
    ("fn", "words", "section"),
    [
        (by_matrices("dc"), "The correction comes first", CONVENTIONS),
        (seventh, "the convention of RWKV-7", CONVENTIONS),
        (by_matrices("dc", decays=lambda x: np.exp(x.log_decay[0])), "All channels", TABLE),
        (by_matrices("cd", beta=lambda x: 1), "share beta is missing", TABLE),
        (by_matrices("cd", beta=lambda x: -x.beta), "The correction is added", TABLE),
        (one_number, "`k @ k.T` is one number", TABLE),
        (by_matrices("d"), "nothing is removed", TABLE),
        (by_matrices("c"), "The decay is missing", TABLE),
        (by_matrices("cd", decays=lambda x: x.log_decay), "logarithm multiplies", CONVENTIONS),
        (written_too, "The write is in it", QUESTIONS),
    ],
)
def test_a_new_row(refused, fn, words, section) -> None:
    refused("ex-family-row", words, section, decay_then_correct=fn)


def test_right_row(refused) -> None:
    check_exercise("ex-family-row", decay_then_correct=by_matrices("cd"), order_matters=True)
    refused("ex-family-row", "Does a diagonal matrix", TABLE, order_matters=False)
