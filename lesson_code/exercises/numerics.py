"""Exercises of the chapter on floating-point numbers."""

import math

import numpy as np
import torch

from lesson_code.checks import check_causal, check_streaming, random_qkv
from lesson_code.checks._agreement import same, tolerance_of
from lesson_code.checks._calling import to_numpy
from lesson_code.exercises import Exercise
from lesson_code.numpy import elu_plus_one, linear_attention

CHAPTER = "Numbers that misbehave"
SPACING = "Floats have spacing"
STICK = "Sums stick"
REPAIRS = "Two repairs: more digits, or fewer additions"
MILLION = "A million tokens"
ZERO = "A feature that rounds to zero"
EPSILON = "An epsilon changes the function"
RANGE = "Exponentials out of range"
RUNNING = "The running maximum"
MASK = "Mask before the exponential"
SAME = "When are two results the same?"

# --- Floats of four digits ---------------------------------------------------------------------

HAND = Exercise("ex-numerics-hand", CHAPTER)


def rounded(x, p=4, nearest=round):
    """The float of p binary digits that is nearest to x > 0; ``round`` sends ties to even."""
    spacing = 2.0 ** (math.floor(math.log2(x)) - p + 1)
    return spacing * nearest(x / spacing)


def whole_floats(p):
    return sum(rounded(n, p) == n for n in range(1, 41))


def stuck(term, nearest=round):
    """Where a running sum of equal terms stays."""
    total = term
    while (new := rounded(total + term, nearest=nearest)) != total:
        total = new
    return total


HAND.value(
    "floats", whole_floats(4), SPACING, "how many of the whole numbers from 1 to 40 are floats"
).mistakes(
    (
        16 + 24 // 2,
        "The spacing doubles at every power of two, also at the last one before 40.",
    ),
    (whole_floats(5), "Written with p binary digits, the leading 1 is one of them."),
)
HAND.value("ones", stuck(1), STICK, "where the sum of ones sticks").mistakes(
    (
        stuck(1, nearest=lambda x: math.floor(x + 0.5)),
        "Here the tie was rounded up. It goes to the neighbor whose last digit is even.",
        SPACING,
    ),
    (
        stuck(1) - 1,
        "One more can be added: the next whole number needs one digit more, but that digit is a 0.",
        SPACING,
    ),
)
HAND.value("threes", stuck(3), STICK, "where the sum of threes sticks").mistakes(
    (
        stuck(3, nearest=math.floor),
        "There the spacing is larger than 3, but a sum goes to the nearer float. Which one is "
        "nearer to 35?",
        SPACING,
    ),
    (
        3 * stuck(1),
        "Three times as far as ones would go: but between powers of two the spacing does not "
        "change.",
        SPACING,
    ),
)

# --- A count that forgets ------------------------------------------------------------------------

DECAY = Exercise("ex-numerics-decay", CHAPTER)


def settled(gamma, p=8):
    """Where z = gamma z + 1 stays, if each step is rounded once."""
    z = 1.0
    while (new := rounded(gamma * z + 1, p)) != z:
        z = new
    return z


DECAY.value("fast", settled(0.96), MILLION, "where the count with a decay of 0.96 stops").mistakes(
    (25, "That is the limit 1 / (1 - 0.96). The count stops where its gain is rounded away."),
    (
        21.875,
        "With a whole spacing in the formula. A gain is lost only where it is half of the spacing "
        "or less.",
    ),
    (
        24.21875,
        "Between 16 and 32 the spacing is 1/8; the formula was used with half of that.",
        SPACING,
    ),
)
DECAY.value(
    "slow", settled(0.995), MILLION, "where the count with a decay of 0.995 stops"
).mistakes(
    (200, "That is the limit 1 / (1 - 0.995). The count stops where its gain is rounded away."),
    (
        150,
        "With the spacing below 128. At 128 it doubles: what is the gain there?",
        SPACING,
    ),
    (
        100,
        "With the spacing above 128. Below, it is half of that, and the count goes on past 100.",
        SPACING,
    ),
)
DECAY.value(
    "limit", 4, MILLION, "the power of two up to which limits are reached within 1% in bfloat16"
).mistakes(
    (2, "Between 2 and 4 the spacing is 1/64, and half of it is below 1%."),
    (2**18, "That is the answer for float32, with p = 24."),
    (8, "Between 4 and 8 the spacing is 1/32. Half of it is 1.6%."),
)

# --- A running logarithm -----------------------------------------------------------------------

LOGARITHM = Exercise("ex-numerics-logcumsumexp", CHAPTER)


def large(rng, N, leading=(), M=3):
    return torch.from_numpy(1000 * rng.standard_normal((*leading, N, M)))


def near(center):
    return lambda rng: torch.from_numpy(center + rng.standard_normal((20, 3)))


def zeros(rng):
    return torch.zeros(9, 2)


@LOGARITHM.function(RUNNING, inputs=large, special=(near(0.0), near(1000.0), near(-1000.0), zeros))
def my_logcumsumexp(x, *, initial_state=None, return_state=False):
    before = torch.full_like(x[..., :1, :], -torch.inf) if initial_state is None else initial_state
    out = torch.logcumsumexp(torch.cat([before, x], dim=-2), dim=-2)[..., 1:, :]
    return (out, out[..., -1:, :]) if return_state else out


my_logcumsumexp.passes(check_causal, RUNNING).passes(check_streaming, RUNNING, empty_pieces=False)
my_logcumsumexp.mistakes(
    (
        lambda x: x.exp().cumsum(dim=-2).log(),
        "The exponentials are summed as they are, and leave the range of the format. Subtract a "
        "maximum first.",
        RANGE,
    ),
    (
        lambda x: torch.logcumsumexp(x, dim=-2) - x.cummax(dim=-2).values,
        "The maximum that was subtracted inside has to be added again.",
        RANGE,
    ),
)


@my_logcumsumexp.mistake(
    "The maximum over all positions is subtracted: it is not known at t, and what is far below it "
    "rounds to 0.",
    RUNNING,
)
def with_last_maximum(x):
    mu = x.amax(dim=-2, keepdim=True)
    return mu + (x - mu).exp().cumsum(dim=-2).log()


def by_steps(x, scale=lambda rise: (-rise).exp(), start=-math.inf):
    """The running maximum and the sum, scaled by a function of the maximum's rise."""
    mu, total, out = torch.full_like(x[..., 0, :], start), 0.0, []
    for x_t in x.unbind(dim=-2):
        old, mu = mu, torch.maximum(mu, x_t)
        total = total * scale(mu - old) + (x_t - mu).exp()
        out.append(mu + total.log())
    return torch.stack(out, dim=-2)


my_logcumsumexp.mistakes(
    (
        lambda x: by_steps(x, scale=lambda rise: 1.0),
        "What was summed before keeps its scale when the maximum rises.",
    ),
    (
        lambda x: by_steps(x, start=0.0),
        "The running maximum starts at 0, so that a sequence far below has only zeros to add up. "
        "What is the maximum of no numbers?",
    ),
)

# --- Inputs that find the mistake --------------------------------------------------------------

INPUTS = Exercise("ex-numerics-inputs", CHAPTER)
LIMIT = math.log(2.0**-54)

INPUTS.value("limit", LIMIT, ZERO, "below it a float64 feature is exactly 0").mistakes(
    (math.log(2.0**-25), "That is the limit of float32, with p = 24."),
    (
        math.log(2.0**-53),
        "There the feature is as large as the spacing just above -1. What is lost is below half of "
        "it.",
    ),
)


def as_it_reads(x):
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0))) + 1


def findings(low):
    """What a check finds out with some inputs.

    If it finds the mistake, the rest is true as well: the rest only tells why it does not.
    """

    def of_seed(seed):
        rng, found, below, alive = np.random.default_rng(seed), False, False, False
        for N in (7, 1, 2, 13):
            q, k, v = low(rng, N)
            if any(getattr(x, "dtype", None) != torch.float64 for x in (q, k, v)):
                raise TypeError("q, k and v must be float64 tensors")
            q, k, v = map(to_numpy, (q, k, v))
            right, wrong = (
                linear_attention(q, k, v, feature_map=phi, causal=True)
                for phi in (elu_plus_one, as_it_reads)
            )
            found |= not same(wrong, right, tolerance_of(v))
            below |= bool((q < LIMIT).any() or (k < LIMIT).any())
            alive |= bool(np.any(right))
        return {
            "check_same objects": float(found),
            "below the limit": float(found or below),
            "right output not zero": float(found or alive),
        }

    return of_seed


def seeds(rng, N):
    return (int(rng.integers(1000)),)


def shifted(shift, channels=slice(None)):
    """Inputs of which some channels of the keys are moved."""

    def draw(rng, N):
        q, k, v = map(torch.from_numpy, random_qkv(rng, N))
        k[..., channels] += shift
        return q, k, v

    return draw


@INPUTS.function(ZERO, inputs=seeds, view=findings, unit="")
def low(rng, N):
    return shifted(-50.0)(rng, N)


low.mistakes(
    (
        shifted(0.0),
        "With these inputs the function under test passes: no entry comes near the limit.",
    ),
    (
        shifted(-50.0, slice(0, 1)),
        "With these inputs the function under test passes. Some features vanish, but others of "
        "the same token are there and carry the sum.",
    ),
    (
        shifted(-2000.0),
        "So far below, e^x itself rounds to 0, in the right function, too: both return 0, and the "
        "check has nothing to object to.",
    ),
)

# --- A quotient with a gradient ----------------------------------------------------------------

QUOTIENT = Exercise("ex-numerics-quotient", CHAPTER)


def sums_some_zero(rng, N):
    """Sums of which every third row, the first among them, has met no feature at all."""
    z = torch.from_numpy(rng.uniform(1e-6, 2, (N, 1)))
    S = z * torch.from_numpy(rng.standard_normal((N, 3)))
    z[::3], S[::3] = 0, 0
    return S, z


def with_gradients(fn):
    def run(S, z):
        S, z = S.clone().requires_grad_(), z.clone().requires_grad_()
        out = fn(S, z)
        of_S, of_z = torch.autograd.grad(out.sum(), (S, z), allow_unused=True)
        missing = torch.zeros(())
        return {
            "output": out.detach(),
            "gradient for y": missing if of_S is None else of_S,
            "gradient for z": missing if of_z is None else of_z,
        }

    return run


@QUOTIENT.function(MASK, inputs=sums_some_zero, view=with_gradients)
def my_quotient(S, z):
    return torch.where(z > 0, S / torch.where(z > 0, z, 1.0), 0.0)


my_quotient.mistakes(
    (
        lambda S, z: torch.where(z > 0, S / z, 0.0),
        "The outputs are right, but 0 / 0 was computed before it was replaced, and its derivative "
        "times 0 is nan.",
    ),
    (
        lambda S, z: S / (z + 1e-6),
        "An epsilon changes the outputs where z is small, and at 0 the gradient for y is a million "
        "instead of 0.",
        EPSILON,
    ),
    (
        lambda S, z: torch.where(z > 0, S / torch.where(z > 0, z, 1.0).detach(), 0.0),
        "The gradient for z is missing: only the zeros are to be replaced, not the whole of z.",
    ),
)

# --- Where float32 sticks ----------------------------------------------------------------------

STICKS = Exercise("ex-numerics-stick", CHAPTER)


def first_power_that_stays(term):
    """The smallest power of two that a float32 sum cannot leave by adding ``term``."""
    return next(2.0**n for n in range(64) if np.float32(2.0**n) + np.float32(term) == 2.0**n)


STICKS.value(
    "recurrent", first_power_that_stays(1), STICK, "the z at which the recurrent form sticks"
).mistakes(
    (
        2**23,
        "There the spacing is 1, and adding 1 still counts. Float32 has p = 24 digits, the leading "
        "one included.",
    ),
    (2**25, "It sticks before: think of the tie, and of where it goes.", SPACING),
)
STICKS.value(
    "chunkwise",
    first_power_that_stays(64),
    REPAIRS,
    "the z at which the chunkwise form sticks, given 64 tokens at a time",
).mistakes(
    (
        2**24,
        "There single ones are lost. The chunkwise form adds the sum of its 64 tokens at once.",
    ),
    (2**18, "Divided by 64 where larger terms let the sum go further."),
)

# --- Signs that a library picks ----------------------------------------------------------------

SIGNS = Exercise("ex-numerics-signs", CHAPTER)


def gaussian(rng, N, leading=()):
    D = 2 + N % 5
    return rng.standard_normal((*leading, D, D))


def diagonal_signs(R):
    return np.sign(np.diagonal(R, axis1=-2, axis2=-1))


@SIGNS.function(SAME, inputs=gaussian, unit="")
def my_directions(G):
    Q, R = np.linalg.qr(G)
    return Q * diagonal_signs(R)[..., None, :]


def signs_by_row(G):
    Q, R = np.linalg.qr(G)
    return Q * diagonal_signs(R)[..., :, None]


def first_entries_positive(G):
    Q = np.linalg.qr(G)[0]
    return Q * np.sign(Q[..., :1, :])


my_directions.mistakes(
    (lambda G: np.linalg.qr(G)[0], "These are the signs that LAPACK picked."),
    (signs_by_row, "The signs multiply the rows of Q. Each belongs to a column."),
    (
        first_entries_positive,
        "The first entry of each column is positive now, which is no more uniform than never "
        "positive. Look at R.",
    ),
    (
        lambda G: -np.linalg.qr(G)[0],
        "All signs are turned over, whatever R says.",
    ),
)
