"""Exercises of the chapter on what a state can follow."""

import numpy as np

from lesson_code.exercises import Exercise
from lesson_code.numpy import delta_rule, gated_delta_product

CHAPTER = "What a state can follow"
FLIP = "One number that flips"
CUPS = "Five cups, one reflection"
EIGENVALUES = "Fade, flip, rotate, permute"
SEVERAL = "Several corrections for one token"
LEARNED = "Can it be learned?"

# --- By hand: one reflection -------------------------------------------------------------------

HAND = Exercise("ex-tracking-hand", CHAPTER)
S, K = np.array([5.0, 7.0, 1.0, 3.0]), np.array([0.0, 1.0, 0.0, -1.0])


def corrected(beta, S=S):
    return S - beta * K * (K @ S)


HAND.value("swapped", corrected(1), CUPS, "four numbers, the state for beta = 1").mistakes(
    (S, "The key finds 7 − 3, not 0: something is subtracted."),
    (
        S - K @ S,
        "What is found was subtracted from every entry. It is subtracted along the key: from the "
        "second entry, and with the other sign from the fourth.",
    ),
    (corrected(2), "That is beta = 2, which goes beyond the mirror image: here |k|² is 2 already."),
)
HAND.value("halfway", corrected(0.5), CUPS, "four numbers, the state for beta = 1/2").mistakes(
    (corrected(0.25), "That is beta = 1/4. The key finds 7 − 3 = 4, and half of it is moved."),
    (corrected(1), "That is beta = 1, the whole way to the mirror image."),
)
HAND.value(
    "eigenvalues",
    np.array([-0.8, 1.0, 1.0, 1.0]),
    EIGENVALUES,
    "four numbers, those of the transition for beta = 0.9, the smallest first",
).mistakes(
    (
        np.array([0.1, 1.0, 1.0, 1.0]),
        "That would be right for a key of length 1. Here |k|² is 2.",
    ),
    (
        np.array([-1.8, 0.0, 0.0, 0.0]),
        "These are the eigenvalues of −β k kᵀ. The identity adds 1 to each.",
    ),
    (
        np.array([-0.8, -0.8, 1.0, 1.0]),
        "The key is one direction, though two of its entries are not 0. All directions at a right "
        "angle to it stay as they are.",
    ),
)
HAND.value("least", 1.0, EIGENVALUES, "the β above which a unit key has one below 0").mistakes(
    (0.0, "β itself is never below 0. The eigenvalue is 1 − β."),
    (2.0, "At 2 the eigenvalue is −1. Where does 1 − β pass through 0?"),
)

# --- The monotone argument ---------------------------------------------------------------------

MONOTONE = Exercise("ex-tracking-monotone", CHAPTER)


def states(a, b, start, steps):
    found = [start]
    for _ in range(steps):
        found.append(a * found[-1] + b)
    return np.array(found)


FIRST = states(0.5, 3.0, 0.0, 3)
MONOTONE.value(
    "first", FIRST[1:], FLIP, "three numbers, the states after 1, 2 and 3 ones"
).mistakes(
    (FIRST[:3], "That begins with the state before the first token."),
    (np.array([3.0, 6.0, 9.0]), "The old state is halved before 3 is added."),
)
MONOTONE.value("limit", 6.0, FLIP, "the number that they come close to").mistakes(
    (3.0, "That is what one token adds. Which number is its own half plus 3?"),
    (np.inf, "Each state is less than 6: what is added and what is lost come to the same there."),
)
MONOTONE.value("ones", 5, FLIP, "a number of ones").mistakes(
    (
        6,
        "Each threshold can change the answer once, from right for n to right for n + 1. With the "
        "answer for no ones that makes six answers, the last of them for which n?",
    ),
    (10, "Each threshold is passed only once: the states never come back."),
    (1, "Each of the five thresholds is passed once, and each may turn the answer."),
)

# --- Parity ------------------------------------------------------------------------------------

PARITY = Exercise("ex-tracking-parity", CHAPTER)


def bits(rng, N):
    return rng.integers(2, size=N)


def alone_is_the_same(choose, tokens, chosen, names):
    """Who counts the tokens beforehand needs no memory."""
    for t in range(len(tokens)):
        alone = choose(tokens[t : t + 1])
        for name, x, row in zip(names, chosen, alone, strict=False):
            if not np.array_equal(x[t], row[0]):
                raise ValueError(f"{name}[{t}] is not made from token {t} alone")


def outputs(choose):
    """What delta_rule returns with the reader's choice, for queries of 1."""

    def run(bits):
        chosen = choose(bits)
        if not isinstance(chosen, tuple | list) or len(chosen) != 4:
            raise TypeError("choose must return four arrays: k, v, beta and initial_state")
        k, v, beta, start = chosen
        out = delta_rule(np.ones((len(bits), 1)), k, v, beta, initial_state=start)
        alone_is_the_same(choose, bits, (k, v, beta), ("k", "v", "beta"))
        return out

    return run


def all_alike(token):
    return lambda rng: np.full(9, token)


@PARITY.function(FLIP, inputs=bits, special=(all_alike(1), all_alike(0)), view=outputs, unit="bits")
def choose(bits):
    ones = np.ones((len(bits), 1))
    return ones, 0 * ones, 2.0 * bits, np.ones((1, 1))


def chosen(beta=lambda bits: 2.0 * bits, v=0.0, start=1.0):
    def wrong(bits):
        ones = np.ones((len(bits), 1))
        return ones, v * ones, beta(bits), np.full((1, 1), start)

    return wrong


choose.mistakes(
    (
        chosen(beta=lambda bits: 1.0 * bits),
        "At the first one the memory becomes 0, and 0 has no sign to turn. Which step size "
        "reflects?",
    ),
    (
        chosen(beta=lambda bits: np.full(len(bits), 2.0)),
        "The sign turns at every bit. At a zero the memory has to stay as it is.",
    ),
    (chosen(start=0.0), "The memory begins with 0, and 0 has no sign to turn."),
    (
        chosen(v=1.0),
        "The key finds the value 1 from the beginning, so that the error is 0 and nothing ever "
        "happens. Which value makes the error the memory itself, but for the sign?",
    ),
)
PARITY.value(
    "option",
    "allow_negative_eigenvalues",
    LEARNED,
    'a word, the name of the option in quotes: "..."',
).mistakes(
    ("num_heads", "More heads are more memories, each with the same limit.", FLIP),
    ("width", "A wider memory has more directions. Along each of them the sign stays.", FLIP),
)

# --- Modulo 3 with two reflections -------------------------------------------------------------

THREE = Exercise("ex-tracking-three", CHAPTER)


def thirds(rng, N):
    return rng.integers(3, size=N)


def remainders(keys):
    """The state after each token, (N, 3), that begins as [1, 0, 0]."""

    def run(tokens):
        chosen = keys(tokens)
        if not isinstance(chosen, tuple | list) or len(chosen) != 2:
            raise TypeError("keys must return two arrays: k and beta")
        k, beta = chosen
        alone_is_the_same(keys, tokens, chosen, ("k", "beta"))
        N, out = len(tokens), []
        for c in range(3):
            q = np.tile(np.eye(3)[c], (N, 1))
            v, start = np.zeros((N, 2, 1)), np.eye(3)[:, :1]
            out.append(gated_delta_product(q, k, v, beta, np.zeros(N), initial_state=start))
        return np.concatenate(out, axis=1)

    return run


A, B, NONE = np.array([1.0, -1, 0]), np.array([0.0, 1, -1]), np.zeros(3)
TURNS = np.array([[NONE, NONE], [B, A], [A, B]])


@THREE.function(
    SEVERAL, inputs=thirds, special=(all_alike(1), all_alike(2)), view=remainders, unit="tokens"
)
def keys(tokens):
    return TURNS[tokens], np.ones((len(tokens), 2))


keys.mistakes(
    (
        lambda tokens: (TURNS[:, ::-1][tokens], np.ones((len(tokens), 2))),
        "It turns the other way: a 1 takes the mark from place 0 to place 2. Which of the two keys "
        "comes first?",
    ),
    (
        lambda tokens: (TURNS[tokens], np.full((len(tokens), 2), 2.0)),
        "These keys have |k|² = 2, and β|k|² is 4: the memory grows. Which β reflects?",
        EIGENVALUES,
    ),
    (
        lambda tokens: (TURNS[tokens] * [[1.0], [0.0]], np.ones((len(tokens), 2))),
        "That is one reflection for each token. It takes the mark back when the token comes again.",
        EIGENVALUES,
    ),
)

# --- One reflection in each of two layers ------------------------------------------------------

LAYERS = Exercise("ex-tracking-layers", CHAPTER)


def turned(mirror):
    """The state after each token, (N, 2), that begins as [1, 0]."""

    def run(tokens):
        N = len(tokens)
        odd = np.arange(1, N + 1) % 2
        k = mirror(tokens, odd)
        for t in range(N):
            if not np.array_equal(k[t], mirror(tokens[t : t + 1], odd[t : t + 1])[0]):
                raise ValueError(f"k[{t}] is not made from token {t} and odd[{t}] alone")
        v, beta, start = np.zeros((N, 1)), np.full(N, 2.0), np.eye(2)[:, :1]
        out = [delta_rule(np.tile(q, (N, 1)), k, v, beta, initial_state=start) for q in np.eye(2)]
        return np.concatenate(out, axis=1)

    return run


def keys_at(mu):
    return np.stack([-np.sin(mu), np.cos(mu)], axis=1)


@LAYERS.function(
    EIGENVALUES, inputs=thirds, special=(all_alike(1), all_alike(2)), view=turned, unit="tokens"
)
def mirror(tokens, odd):
    return keys_at(np.pi / 3 * tokens * np.where(odd, -1, 1))


mirror.mistakes(
    (
        lambda tokens, odd: keys_at(np.pi / 3 * tokens * np.where(odd, 1, -1)),
        "It turns the other way. Are the mirrors of odd and even positions exchanged? Or does "
        "each token turn by 240°, because its mirror stands at 120° and not at half of it?",
    ),
    (
        lambda tokens, odd: keys_at(np.pi / 3 * tokens),
        "Odd and even positions have the same mirror, and two reflections at it undo each other.",
    ),
    (
        lambda tokens, odd: keys_at(np.pi / 2 + np.pi / 3 * tokens * np.where(odd, -1, 1)),
        "The keys lie along the mirrors. A key is turned into its negative, so it stands at a "
        "right angle to the mirror.",
    ),
)
