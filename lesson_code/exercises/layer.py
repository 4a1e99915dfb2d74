"""Exercises of the chapter on the layer."""

from __future__ import annotations

import functools

import torch

import lesson_code.torch as lt
from lesson_code.checks.causal import check_causal
from lesson_code.checks.streaming import check_streaming
from lesson_code.exercises._old import Function, Further, Mistake, Value, chapter

EQUATIONS = "The layer, one equation at a time"
MODULE = "The module has the same four lines"
WIDTHS = "Widths have to fit"
ORDERS = "One set of weights, two orders"
NORM = "Heads, a norm, a projection"
LEAK = "A norm that looks ahead"

# --- By hand -----------------------------------------------------------------------------------

X = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 0.0]], dtype=torch.float64)
W_V = torch.tensor([[10.0, 20.0], [30.0, 40.0]], dtype=torch.float64)
W_1 = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
W_2 = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)


def state_after(n):
    """S and z of the first n tokens, whose features are the tokens themselves."""
    return X[:n].T @ (X[:n] @ W_V), X[:n].sum(dim=0)


def read_after(n):
    S, z = state_after(n)
    return X[3] @ S / (X[3] @ z)


def feed_forward(u):
    return torch.relu(u @ W_1) @ W_2


WRONG_SIDE = "The state was read from the wrong side: the query mixes the rows of S."

HAND = (
    Value(
        name="S_4",
        reference=lambda: state_after(4)[0],
        section=EQUATIONS,
        form="two rows of two numbers",
        mistakes=(
            Mistake(
                lambda: state_after(3)[0] + torch.outer(X[3] @ W_V, X[3]),
                "What token 4 writes is transposed: its key chooses the rows.",
                EQUATIONS,
            ),
            Mistake(
                lambda: torch.outer(X[3], X[3] @ W_V),
                "That is what token 4 alone writes; the three tokens before it are missing.",
                EQUATIONS,
            ),
            Mistake(
                lambda: state_after(3)[0] + torch.outer(X[3], W_V @ X[3]),
                "The value of token 4 is not right: a token is a row, and W_V stands at its right.",
                EQUATIONS,
            ),
            Mistake(
                lambda: state_after(3)[0] + torch.outer(X[3], X[3]),
                "Token 4 writes itself. It has to write its value.",
                EQUATIONS,
            ),
            Mistake(
                lambda: state_after(3)[0] + X[3] @ (X[3] @ W_V),
                "A single number was added to every entry: row times column. Here a column times "
                "a row is needed.",
                EQUATIONS,
            ),
        ),
    ),
    Value(
        name="z_4",
        reference=lambda: state_after(4)[1],
        section=EQUATIONS,
        form="two numbers",
        mistakes=(
            Mistake(lambda: state_after(3)[1], "Token 4 is missing.", EQUATIONS),
            Mistake(
                lambda: X[3],
                "That is what token 4 alone adds; the three tokens before it are missing.",
                EQUATIONS,
            ),
            Mistake(
                lambda: (X @ W_V).sum(dim=0),
                "z sums up the features of the keys, not the values.",
                EQUATIONS,
            ),
        ),
    ),
    Value(
        name="o_4",
        reference=lambda: read_after(4),
        section=EQUATIONS,
        form="two numbers",
        mistakes=(
            Mistake(
                lambda: X[3] @ state_after(4)[0],
                "This is not divided by anything yet.",
                EQUATIONS,
            ),
            Mistake(
                lambda: read_after(3),
                "This is read before token 4 is written.",
                EQUATIONS,
            ),
            Mistake(
                lambda: X[3] @ state_after(4)[0] / 4,
                "Divided by the number of tokens. The divisor is the product of the query and z.",
                EQUATIONS,
            ),
            Mistake(
                lambda: state_after(4)[0] @ X[3] / (X[3] @ state_after(4)[1]),
                WRONG_SIDE,
                EQUATIONS,
            ),
            Mistake(
                lambda: X[3] @ state_after(4)[0] / state_after(4)[1].sum(),
                "Divided by the sum of z. The divisor is the product of the query and z.",
                EQUATIONS,
            ),
            Mistake(
                lambda: X[3] @ state_after(4)[0] / state_after(4)[1],
                "Each entry is divided by one of z. The divisor is a single number, the product of "
                "the query and z.",
                EQUATIONS,
            ),
        ),
    ),
    Value(
        name="y_4",
        reference=lambda: feed_forward(read_after(4) + X[3]),
        section=EQUATIONS,
        form="two numbers",
        mistakes=(
            Mistake(
                lambda: feed_forward(read_after(4)),
                "The residual is missing: the token is added before f.",
                EQUATIONS,
            ),
            Mistake(
                lambda: feed_forward(read_after(4)) + X[3],
                "The token is added after f. It belongs to what f is applied to.",
                EQUATIONS,
            ),
            Mistake(
                lambda: (read_after(4) + X[3]) @ W_1 @ W_2,
                "The hidden layer has a negative number: its maximum with 0 is missing.",
                EQUATIONS,
            ),
            Mistake(
                lambda: torch.relu((read_after(4) + X[3]) @ W_1),
                "That is the hidden layer.",
                EQUATIONS,
            ),
            Mistake(
                lambda: W_2 @ torch.relu((read_after(4) + X[3]) @ W_1),
                "The second matrix stands at the wrong side: u is a row, and W_2 at its right.",
                EQUATIONS,
            ),
            Mistake(
                lambda: read_after(4) + X[3],
                "f is still to be applied to this.",
                EQUATIONS,
            ),
        ),
    ),
)

# --- The layer in parallel ---------------------------------------------------------------------


@functools.cache
def some_layer():
    """A layer in which every parameter matters: fresh norms, for one, have gains of 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layer = lt.LinearTransformerLayer(width=8, num_heads=2).double()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def tokens(rng, N):
    return torch.from_numpy(rng.normal(size=(2, N, 8)))


def heads_of(y):
    return y.unflatten(-1, (2, 4)).transpose(1, 2)


def joined(o):
    return o.transpose(1, 2).flatten(-2)


def sublayers(layer, o, x):
    u = layer.norm_1(o + x)
    return layer.norm_2(u + layer.feed_forward(u))


def attend(q, k, v, phi=lt.elu_plus_one, causal=True, normalize=True):
    return lt.linear_attention(q, k, v, feature_map=phi, causal=causal, normalize=normalize)


def projected(layer, x):
    return layer.query(x), layer.key(x), layer.value(x)


def my_layer(layer, x, *, initial_state=None, return_state=False):
    q, k, v = map(heads_of, projected(layer, x))
    o, state = lt.linear_attention(
        q, k, v, causal=True, initial_state=initial_state, return_state=True
    )
    y = sublayers(layer, joined(o), x)
    return (y, state) if return_state else y


def layer_with(split=heads_of, join=joined, end=sublayers, project=projected, **options):
    """The layer with one of its parts replaced; the state is left out."""

    def wrong(layer, x):
        q, k, v = map(split, project(layer, x))
        return end(layer, join(attend(q, k, v, **options)), x)

    return wrong


def normed_first(layer, o, x):
    u = o + x
    return u + layer.feed_forward(layer.norm_2(u))


CODE = (
    Function(
        signature="my_layer(layer, x, *, initial_state=None, return_state=False)",
        reference=my_layer,
        section=MODULE,
        inputs=tokens,
        view=lambda f: lambda x, **options: f(some_layer(), x, **options),
        further=(
            Further(check_causal, ORDERS),
            Further(check_streaming, ORDERS, options={"empty_pieces": False}),
        ),
        mistakes=(
            Mistake(
                layer_with(causal=False),
                "The mask is missing: every token reads all tokens, the later ones too.",
                ORDERS,
            ),
            Mistake(
                layer_with(normalize=False),
                "The read is not divided by the product of the query and z.",
                EQUATIONS,
            ),
            Mistake(
                layer_with(phi=lt.identity),
                "The feature map is missing: the default of the layer is elu + 1.",
                MODULE,
            ),
            Mistake(
                layer_with(
                    project=lambda layer, x: (
                        x @ m.weight for m in (layer.query, layer.key, layer.value)
                    )
                ),
                "The projections use the transposes: torch stores the matrix of a linear map as "
                "(out, in).",
                MODULE,
            ),
            Mistake(
                layer_with(split=lambda y: y[:, None]),
                "There is a single head of width 8. The layer has two of width 4.",
                WIDTHS,
            ),
            Mistake(
                layer_with(split=lambda y: y.reshape(len(y), 2, -1, 4)),
                "Positions and heads are mixed up: reshape to (B, N, H, D) first, then exchange "
                "the axes.",
                WIDTHS,
            ),
            Mistake(
                layer_with(split=lambda y: y.unflatten(-1, (4, 2)).movedim(-1, 1)),
                "The channels are dealt out to the heads in turn. Each head takes a block of "
                "neighbors.",
                WIDTHS,
            ),
            Mistake(
                layer_with(join=lambda o: o.reshape(len(o), -1, 8)),
                "The heads are not put side by side: exchange the axes back before you flatten "
                "them.",
                WIDTHS,
            ),
            Mistake(
                layer_with(end=lambda layer, o, x: sublayers(layer, o, 0.0)),
                "The residual is missing: the token is added to what was read.",
                EQUATIONS,
            ),
            Mistake(
                layer_with(
                    end=lambda layer, o, x: layer.norm_2(layer.feed_forward(layer.norm_1(o + x)))
                ),
                "The second residual is missing: u' is added to FFN(u').",
                MODULE,
            ),
            Mistake(
                layer_with(end=lambda layer, o, x: layer.norm_1(o + x)),
                "The feed-forward sublayer is missing.",
                MODULE,
            ),
            Mistake(
                layer_with(end=lambda layer, o, x: o + x + layer.feed_forward(o + x)),
                "Both norms are missing.",
                MODULE,
            ),
            Mistake(
                layer_with(end=lambda layer, o, x: layer.norm_2(o + x + layer.feed_forward(o + x))),
                "The first norm is missing: u' is the norm of the sum.",
                MODULE,
            ),
            Mistake(
                layer_with(
                    end=lambda layer, o, x: layer.norm_2(
                        o + x + layer.feed_forward(layer.norm_1(o + x))
                    )
                ),
                "The second residual is u where it should be u', the norm of u.",
                MODULE,
            ),
            Mistake(
                layer_with(
                    end=lambda layer, o, x: (
                        layer.norm_1(o + x) + layer.feed_forward(layer.norm_1(o + x))
                    )
                ),
                "The second norm is missing. It comes last.",
                MODULE,
            ),
            Mistake(
                layer_with(end=normed_first),
                "The norm is put in front of the sublayer. This layer has its norms after the "
                "sums.",
                MODULE,
            ),
        ),
    ),
)

# --- Two broken decoders -----------------------------------------------------------------------

UNCUT = "A sequence that is not cut hands no state on. How many of the checks cut?"

DECODERS = (
    Value(
        name="late_refused",
        reference=lambda: 2,
        section=ORDERS,
        form="how many of the three checks object to the late query",
        mistakes=(
            Mistake(
                3,
                "The query of the token before is not in the future. Which check looks for the "
                "future only?",
                LEAK,
            ),
            Mistake(
                1,
                "One check compares with the right function. And another one cuts the sequence: "
                "what does the first token of a piece ask with?",
                ORDERS,
            ),
            Mistake(0, "The outputs are those of other queries: one check compares them.", ORDERS),
        ),
    ),
    Value(
        name="lost_refused",
        reference=lambda: 1,
        section=ORDERS,
        form="the same for the lost z",
        mistakes=(
            Mistake(0, "One check cuts the sequence. What is z after the cut?", ORDERS),
            Mistake(2, UNCUT, ORDERS),
            Mistake(3, UNCUT, ORDERS),
        ),
    ),
)

# --- A norm over the past ----------------------------------------------------------------------

EPSILON = 1e-5


def counts(N):
    return torch.arange(1, N + 1, dtype=torch.float64)


def past_norm(o, *, initial_state=None, return_state=False):
    count, total = initial_state or (0, o.new_zeros(len(o), 1))
    sums = total + (o**2).mean(dim=-1).cumsum(dim=-1)
    out = o / (sums / (count + counts(o.shape[1])) + EPSILON).sqrt()[..., None]
    state = count + o.shape[1], torch.cat([total, sums], dim=-1)[:, -1:]
    return (out, state) if return_state else out


def divided_by(mean_square, epsilon):
    """o over the root of something that is computed from o, (B, N) or what fits it."""
    return lambda o: o / (mean_square(o) + epsilon).sqrt()[..., None]


def squares(o):
    return (o**2).mean(dim=-1)


def running(x):
    return x.cumsum(dim=-1) / counts(x.shape[-1])


def before(o):
    """The mean over the positions before; 0 at the first."""
    sums = squares(o).cumsum(dim=-1) - squares(o)
    return sums / (counts(o.shape[1]) - 1).clamp(min=1)


def centered(o):
    mean = running(o.mean(dim=-1))
    return running(squares(o)) - mean**2


WRONG_MEANS = tuple(
    Mistake(divided_by(mean, epsilon), message, section)
    for mean, message, section in (
        (
            lambda o: squares(o).mean(dim=-1, keepdim=True),
            "The mean is over all positions, the later ones too.",
            LEAK,
        ),
        (
            squares,
            "The mean is over the own position alone. It should run over the past as well.",
            LEAK,
        ),
        (
            lambda o: squares(o).cumsum(dim=-1),
            "The squares are summed over positions, but not divided by their number.",
            LEAK,
        ),
        (
            lambda o: squares(o).cumsum(dim=-1) / (counts(o.shape[1]) - 1),
            "The sum is divided by one too few: up to the first position there is one.",
            LEAK,
        ),
        (
            lambda o: running((o**2).sum(dim=-1)),
            "The squares are summed over the channels, but not divided by their number.",
            NORM,
        ),
        (
            before,
            "The own position is left out. It belongs to o_1 to o_t.",
            LEAK,
        ),
        (
            lambda o: running(squares(o)).mean(dim=0, keepdim=True),
            "The mean is over the sequences of the batch, too. They have nothing to do with "
            "each other.",
            LEAK,
        ),
        (
            centered,
            "The mean is subtracted, as for a variance. A root mean square leaves it in.",
            NORM,
        ),
    )
    for epsilon in (EPSILON, 0.0)
)

PAST = (
    Function(
        signature="past_norm(o, *, initial_state=None, return_state=False)",
        reference=past_norm,
        section=LEAK,
        inputs=tokens,
        further=(
            Further(check_causal, LEAK),
            Further(check_streaming, ORDERS, options={"empty_pieces": False}),
        ),
        mistakes=(
            *WRONG_MEANS,
            Mistake(
                lambda o: o / running((squares(o) + EPSILON).sqrt())[..., None],
                "This is a mean of roots. Take the mean of the squares, then one root.",
                NORM,
            ),
            Mistake(
                lambda o: o / (running(squares(o)) + EPSILON)[..., None],
                "The root is missing.",
                NORM,
            ),
            Mistake(
                lambda o: o / (running(squares(o)).sqrt() + EPSILON)[..., None],
                "ε is added after the root. It belongs under it.",
                NORM,
            ),
            Mistake(
                lambda o: o / running(squares(o)).sqrt()[..., None],
                "ε is missing.",
                NORM,
            ),
            Mistake(
                lambda o: o / (running((o**2).transpose(1, 2)).transpose(1, 2) + EPSILON).sqrt(),
                "Every channel has a mean of its own. Here it is over all channels.",
                NORM,
            ),
        ),
    ),
)

EXERCISES = chapter(
    "Transformers are RNNs",
    ("ex-layer-hand", *HAND),
    ("ex-layer-code", *CODE),
    ("ex-layer-mistakes", *DECODERS),
    ("ex-layer-past", *PAST),
)
