"""Exercises of the chapter on the layer."""

import functools

import torch

import lesson_code.torch as lt
from lesson_code.checks import check_causal, check_streaming
from lesson_code.exercises import Exercise

CHAPTER = "Transformers are RNNs"
EQUATIONS = "The layer, one equation at a time"
CELL = "The layer is a cell"
ORDERS = "One set of weights, two orders"
NORM = "Heads, a norm, a projection"
LEAK = "A norm that looks ahead"
INSIDE = "Where linear attention loses"

# --- By hand -----------------------------------------------------------------------------------

HAND = Exercise("ex-layer-hand", CHAPTER)
X = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 0.0]], dtype=torch.float64)
W_V = torch.tensor([[10.0, 0.0], [0.0, 20.0]], dtype=torch.float64)
W_1 = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
W_2 = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
x_4 = X[3]
S_3, z_3 = X[:3].T @ (X[:3] @ W_V), X[:3].sum(dim=0)
S_4, z_4 = S_3 + torch.outer(x_4, x_4 @ W_V), z_3 + x_4
o_4 = x_4 @ S_4 / (x_4 @ z_4)


def feed_forward(u):
    return torch.relu(u @ W_1) @ W_2


HAND.value("S_4", S_4, EQUATIONS, "two rows of two numbers").mistakes(
    (
        S_4 - S_3,
        "That is what token 4 alone writes; the three tokens before it are missing.",
    ),
    (
        S_3 + torch.outer(x_4 / 2, x_4 @ W_V),
        "The value is right, but the key is [2, 0]: it counts twice as much as [1, 0].",
    ),
    (S_3 + torch.outer(x_4, x_4), "Token 4 writes itself. It has to write its value."),
)
HAND.value("z_4", z_4, EQUATIONS, "two numbers").mistakes(
    (z_3, "Token 4 is missing."),
    ((X @ W_V).sum(dim=0), "z sums up the features of the keys, not the values."),
)
HAND.value("o_4", o_4, EQUATIONS, "two numbers").mistakes(
    (x_4 @ S_4, "This is not divided by anything yet."),
    (x_4 @ S_3 / (x_4 @ z_3), "This is read before token 4 is written."),
    (
        x_4 @ S_4 / z_4,
        "Each entry is divided by one of z. The divisor is a single number, the product of the "
        "query and z.",
    ),
)
HAND.value("y_4", feed_forward(o_4 + x_4), EQUATIONS, "two numbers").mistakes(
    (feed_forward(o_4), "The residual is missing: the token is added before f."),
    (
        feed_forward(o_4) + x_4,
        "The token is added after f. It belongs to what f is applied to.",
    ),
    (
        (o_4 + x_4) @ W_1 @ W_2,
        "The hidden layer has a negative number: its maximum with 0 is missing.",
    ),
)

# --- The layer in parallel ---------------------------------------------------------------------

CODE = Exercise("ex-layer-code", CHAPTER)


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


def of_some_layer(fn):
    return lambda x, **options: fn(some_layer(), x, **options)


def tokens(rng, N):
    return torch.from_numpy(rng.normal(size=(2, N, 8)))


def projected(layer, x):
    return layer.query(x), layer.key(x), layer.value(x)


def heads_of(y):
    return y.unflatten(-1, (2, 4)).transpose(1, 2)


def sublayers(layer, o, x):
    u = layer.norm_1(o + x)
    return layer.norm_2(u + layer.feed_forward(u))


@CODE.function(CELL, inputs=tokens, view=of_some_layer)
def my_layer(layer, x, *, initial_state=None, return_state=False):
    q, k, v = map(heads_of, projected(layer, x))
    attend = functools.partial(lt.linear_attention, causal=True, return_state=True)
    o, S = attend(q, k, v, initial_state=initial_state)
    y = sublayers(layer, o.transpose(1, 2).flatten(-2), x)
    return (y, S) if return_state else y


my_layer.passes(check_causal, ORDERS).passes(check_streaming, ORDERS, empty_pieces=False)


def attend(q, k, v, phi=lt.elu_plus_one, causal=True):
    return lt.linear_attention(q, k, v, feature_map=phi, causal=causal)


def layer_with(project=projected, split=heads_of, end=sublayers, **options):
    """The layer with one of its parts replaced; the state is left out."""

    def wrong(layer, x):
        o = attend(*map(split, project(layer, x)), **options)
        return end(layer, o.transpose(1, 2).flatten(-2), x)

    return wrong


my_layer.mistakes(
    (
        layer_with(lambda layer, x: (x @ m.weight for m in (layer.query, layer.key, layer.value))),
        "The projections use the transposes: torch stores the matrix of a linear map as (out, in).",
    ),
    (
        layer_with(causal=False),
        "The mask is missing: every token reads all tokens, the later ones too.",
        ORDERS,
    ),
    (
        layer_with(phi=lt.identity),
        "The feature map is missing: the default of the layer is elu + 1.",
    ),
    (
        layer_with(split=lambda y: y.reshape(len(y), 2, -1, 4)),
        "Positions and heads are mixed up: reshape to (B, N, H, D) first, then exchange the axes.",
        NORM,
    ),
    (
        layer_with(end=lambda layer, o, x: sublayers(layer, o, 0.0)),
        "The residual is missing: the token is added to what was read.",
        EQUATIONS,
    ),
    (
        layer_with(end=lambda layer, o, x: layer.norm_2(o + x + layer.feed_forward(o + x))),
        "The first norm is missing: u' is the norm of the sum.",
    ),
)

# --- Two broken decoders -----------------------------------------------------------------------

DECODERS = Exercise("ex-layer-mistakes", CHAPTER)
q_2, q_3 = X[1], X[2]
READ = q_3 @ S_3 / (q_3 @ z_3)

DECODERS.value("late", q_2 @ S_3 / (q_2 @ z_3), EQUATIONS, "two numbers").mistakes(
    (READ, "That is what the right decoder reads: the query is that of the cherry itself."),
    (q_2 @ S_3, "This is not divided by anything yet."),
    (q_2 @ S_3 / (q_3 @ z_3), "The divisor is made with the query of the cherry itself."),
    (X[1] @ W_V, "That is what is read before the cherry is written."),
)
DECODERS.value("lost", q_3 @ S_3 / (q_3 @ q_3), EQUATIONS, "two numbers").mistakes(
    (READ, "That is what the right decoder reads. What is z after the interruption?"),
    (q_3 @ W_V, "S is lost here as well: only the cherry's own value is left."),
    (q_3 @ S_3, "The z of the cherry itself is there, and it divides."),
)

# --- Two people in one drawer ------------------------------------------------------------------

DRAWER = Exercise("ex-layer-drawer", CHAPTER)
KNITS, SAILS = torch.tensor([1.0, 0.0]).double(), torch.tensor([0.0, 1.0]).double()
TOLD = "two numbers, the weights of knits and sails"
PRIVATE = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0]]).double()
HABITS = torch.stack([KNITS, KNITS, SAILS])


def asked(query):
    """What a query reads after Dan was told twice and Flo once, Flo with a feature of her own."""
    query = torch.tensor(query).double()
    return query @ PRIVATE.T @ HABITS / (query @ PRIVATE.T).sum()


DRAWER.value("shared", (2 * KNITS + SAILS) / 3, INSIDE, TOLD).mistakes(
    (KNITS, "That is what Dan reads if Flo has not come. Her key is the same as his."),
    (2 * KNITS + SAILS, "This is not divided by anything yet."),
    ((KNITS + SAILS) / 2, "Dan's habit was told twice, so it is written twice."),
)
DRAWER.value("flo", asked([0.0, 1.0]), INSIDE, TOLD).mistakes(
    (asked([1.0, 1.0]), "That is what the query [1, 1] reads. Hers is [0, 1]."),
    (asked([1.0, 0.0]), "That is what Dan's query reads."),
)
DRAWER.value("dan", asked([1.0, -1.0]), INSIDE, TOLD).mistakes(
    (2 * KNITS, "This is not divided by anything yet."),
    (asked([1.0, 0.0]), "That is what the query [1, 0] reads. Which one takes Flo's part away?"),
)

# --- A norm over the past ----------------------------------------------------------------------

PAST = Exercise("ex-layer-past", CHAPTER)


def counts(N):
    return torch.arange(1, N + 1, dtype=torch.float64)


@PAST.function(LEAK, inputs=tokens)
def past_norm(o, *, initial_state=None, return_state=False):
    count, total = initial_state or (0, o.new_zeros(len(o), 1))
    sums = total + (o**2).mean(dim=-1).cumsum(dim=-1)
    out = o / (sums / (count + counts(o.shape[1])) + 1e-5).sqrt()[..., None]
    state = count + o.shape[1], torch.cat([total, sums], dim=-1)[:, -1:]
    return (out, state) if return_state else out


past_norm.passes(check_causal, LEAK).passes(check_streaming, ORDERS, empty_pieces=False)


def squares(o):
    return (o**2).mean(dim=-1)


def running(x):
    return x.cumsum(dim=-1) / counts(x.shape[-1])


def over_root(mean_square):
    return lambda o: o / (mean_square(o) + 1e-5).sqrt()[..., None]


past_norm.mistakes(
    (
        over_root(lambda o: squares(o).mean(dim=-1, keepdim=True)),
        "The mean is over all positions, the later ones too.",
    ),
    (
        over_root(squares),
        "The mean is over the own position alone. It should run over the past as well.",
    ),
    (
        over_root(lambda o: squares(o).cumsum(dim=-1)),
        "The squares are summed over positions, but not divided by their number.",
    ),
    (
        over_root(lambda o: running(squares(o)) - running(o.mean(dim=-1)) ** 2),
        "The mean is subtracted, as for a variance. A root mean square leaves it in.",
        NORM,
    ),
    (
        lambda o: o / (running(squares(o)) + 1e-5)[..., None],
        "The root is missing.",
        NORM,
    ),
    (
        lambda o: o / (running(squares(o)).sqrt() + 1e-5)[..., None],
        "ε is added after the root. It belongs under it.",
        NORM,
    ),
)
