"""The table of the family: every row runs, and says what the package's function does.

A formula is held against the code beside it by a small reader of LaTeX, which computes what is
printed; the cost against numbers that count their own multiplications.
"""

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import lesson_code.numpy as ln
from lesson_code import costs
from lesson_code.numpy import family
from lesson_code.numpy.family import MODELS, Model, Part, run, table

ROOT = Path(__file__).resolve().parents[2]
CACHES = ["Softmax attention", "Sliding window", "Forgetting attention", "AFT-full"]
# Formulas that stand for a procedure: that the row is the package's function says that it is right.
IN_WORDS = ["Log-linear attention", "Gated DeltaProduct", "TTT-Linear"]
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
with_a_function = pytest.mark.parametrize(
    "model", [m for m in MODELS.values() if m.function], ids=lambda m: m.name
)

# Sizes that all differ, so that a wrong axis cannot pass.
SIZES = {"C": 4, "D": 5, "M": 3, "E": 6, "K": 2, "P": 7, "J": 3, "w": 2, "N": 16}


def draw(model, N=9, seed=0):
    """Inputs of a model by name: the shapes that its function asks for, values in its range."""
    rng = np.random.default_rng(seed)
    C, D, M, E, K, P, J, w, longest = SIZES.values()
    per_channel = "AFT" in model.name or model.function in ("wkv", "ttt_linear")
    key, value = D if per_channel or model.name in CACHES else C, D if per_channel else M
    each = (N, J) if model.function == "gated_delta_product" else (N,)
    shapes = {"q": (N, key), "r": (N, key), "k": (*each, key), "v": (*each, value)}
    shapes |= {"bonus": (key,), "a": (N, key), "b": (N, key), "angle": (N, K // 2)}
    shapes |= {"norm_weight": (key,), "norm_bias": (key,)}
    shapes["level_weights"] = (N, 1 + int(np.log2(longest)))
    inputs = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    inputs |= {name: rng.uniform(size=N) for name in ("eta", "share", "momentum", "trapezoid")}
    inputs |= {"window": w, "batch_size": 4, "ridge": rng.uniform(0.5, 2, size=key)}
    unit = rng.normal(size=(N, key))
    inputs["removal_key"] = unit / np.linalg.norm(unit, axis=-1, keepdims=True)
    inputs["learning_rate"] = rng.uniform(size=(N, key))
    inputs["beta"] = rng.uniform(size=each) / (inputs["k"] ** 2).sum(axis=-1)
    by_channel = "gated_linear_attention", "rwkv6", "rwkv7", "kimi_delta_attention"
    by_channel += ("generalized_delta_rule",)
    wide = model.function in by_channel
    inputs["log_decay"] = -rng.exponential(size=(N, key) if wide else N)
    inputs["position_bias"] = rng.normal(size=(N, N))
    inputs["decay"] = rng.uniform(0.5, 1, size=key) if model.function == "wkv" else 0.7
    width = E if model.function == "selective_scan" else P
    inputs["x"] = rng.normal(size=(N, width))
    inputs["delta"] = rng.exponential(size=(N, width) if model.name == "Mamba" else N)
    inputs["B"], inputs["C"] = rng.normal(size=(2, N, K))
    inputs["A"], inputs["D"] = -rng.exponential(size=(E, K)), rng.normal(size=E)
    wanted = [name for name in (*model.tokens, *model.constants) if name != "feature_map"]
    return {name: inputs[name] for name in wanted}


def assert_close(found, expected, tolerance=1e-12):
    found, expected = np.asarray(found, float), np.asarray(expected, float)
    assert found.shape == expected.shape
    bound = tolerance * np.abs(expected).max(initial=1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


def tokens_of(model, inputs):
    given = {**model.constants, **inputs}
    for t in range(len(inputs[model.tokens[0]])):
        yield SimpleNamespace(**given | {name: inputs[name][t] for name in model.tokens})


# There is a row for every model of the package, and each is the package's function.


def test_the_rows():
    assert list(MODELS) == [
        *("Softmax attention", "Sliding window", "Forgetting attention", "Log-linear attention"),
        *("AFT-full", "Linear attention", "Linear attention, normalized", "AFT-simple", "RWKV-4"),
        *("RetNet", "GLA", "RWKV-5, RWKV-6", "Mamba", "Mamba-2", "Mamba-3"),
        *("DeltaNet", "Gated DeltaNet", "Kimi delta attention", "RWKV-7"),
        *("Generalized delta rule", "Gated DeltaProduct"),
        *("Delta rule with momentum", "TTT-Linear", "Mesa"),
    ]
    assert {model.kind for model in MODELS.values()} == set(family.KINDS)
    # All that is left are other ways to compute softmax attention, its caches that heads share,
    # weights and similarities; and what a layer has beside its memory.
    softmax = {"attention_weights", "similarity_attention", "tiled_softmax_attention"}
    softmax |= {"grouped_query_attention", "latent_attention"}
    layers = {"channel_mix", "time_mix", "token_shift", "retention_decays"}
    maps = {"elu_plus_one", "exponential", "hedgehog", "identity", "polynomial", "relu", "taylor"}
    maps |= {"positive_random_features"}
    functions = {name for name in ln.__all__ if name.islower()} - {"family"}
    assert {m.function for m in MODELS.values()} == functions - softmax - layers - maps
    assert all(name == model.name for name, model in MODELS.items())


@with_a_function
@pytest.mark.parametrize("seed", range(3))
def test_the_loop_is_the_function(model, seed):
    inputs = draw(model, seed=seed)
    out, _ = run(model, **inputs)
    assert_close(out, getattr(ln, model.function)(**inputs, **model.options))


def test_the_loop_is_rwkv_7():
    """Peng et al. (2025) write the state with a row for each value, and vectors as rows."""
    model = MODELS["RWKV-7"]
    inputs = draw(model)
    S, outputs = np.zeros((SIZES["M"], SIZES["C"])), []
    for x in tokens_of(model, inputs):
        removed = np.outer(x.removal_key, x.learning_rate * x.removal_key)
        S = S @ (np.diag(np.exp(x.log_decay)) - removed)
        S = S + np.outer(x.v, x.k)
        outputs.append(S @ x.r)
    out, state = run(model, **inputs)
    assert_close(out, outputs)
    assert_close(state, S.T)


@pytest.mark.parametrize("name", ["Linear attention", "Linear attention, normalized"])
def test_linear_attention_takes_other_maps(name):
    model = MODELS[name]
    phi = ln.polynomial(2, SIZES["C"])
    inputs = draw(model)
    out, S = run(model, feature_map=phi, **inputs)
    assert len(S) == phi.num_features
    assert_close(out, ln.linear_attention(**inputs, feature_map=phi, **model.options))


def test_mamba_may_lack_its_skip():
    inputs = draw(MODELS["Mamba"])
    del inputs["D"]
    assert_close(run(MODELS["Mamba"], **inputs)[0], ln.selective_scan(**inputs))


def test_ttt_begins_with_what_a_layer_has_learned():
    model = MODELS["TTT-Linear"]
    inputs, D = draw(model), SIZES["D"]
    W, b = np.random.default_rng(1).normal(size=(D, D)), np.ones(D)
    start = (W, b, 0 * W, 0 * b, 0)
    out, state = run(model, **inputs, initial_state=start)
    expected, its_own = ln.ttt_linear(
        **inputs, initial_state=ln.TTTState(*start), return_state=True
    )
    assert_close(out, expected)
    assert state[-1] == its_own.position
    for part, other in zip(state[:-1], its_own, strict=False):
        assert_close(part, other)


@every_model
def test_a_sequence_can_be_split(model):
    inputs = draw(model)
    expected, state = run(model, **inputs)
    halves = [
        {name: x[part] if name in model.tokens else x for name, x in inputs.items()}
        for part in (slice(None, 4), slice(4, None))
    ]
    first, between = run(model, **halves[0])
    second, end = run(model, **halves[1], initial_state=between)
    assert_close(np.concatenate([first, second]), expected, 0)
    assert repr(end) == repr(state)


@with_a_function
def test_reads_before_or_after(model):
    """A model that reads before it writes does not look at what the state becomes."""
    x = list(tokens_of(model, draw(model)))[3]
    before, after = two_states(model)
    other = {"before": (before, None), "after": (None, after)}[model.reads]
    assert_close(model.read(*other, x), model.read(before, after, x), 0)
    assert model.reads == ("before" if model.function in ("wkv", "rwkv6") else "after")


def two_states(model):
    """States before and after the fourth token."""
    states = [model.start(SimpleNamespace(**{**model.constants, **draw(model)}))]
    for x in tokens_of(model, draw(model)):
        states.append(family._plus(model.transition(states[-1], x), model.write(x)))
    return states[3], states[4]


# How large the state is: of the loop, and of what the function returns.


def numbers_in(state):
    if isinstance(state, np.ndarray):
        return state.size
    if isinstance(state, int):  # how many tokens were read
        return 0
    return 1 if isinstance(state, float) else sum(numbers_in(x) for x in state)


def asked_by(part, sizes):
    """Those sizes that a cost is a function of."""
    return {name: sizes[name] for name in inspect.signature(part.compute).parameters}


@every_model
def test_the_size_of_the_state(model):
    N = 9
    _, state = run(model, **draw(model, N))
    expected = evaluate(model.state.tex, {**SIZES, "t": N})
    ones = 0
    if model.name in CACHES:  # the loop keeps a one beside each value, or each of its channels
        ones = len(state) * (SIZES["D"] if model.name == "AFT-full" else 1)
    assert numbers_in(state) - ones == expected
    assert model.state(**asked_by(model.state, {**SIZES, "t": N})) == expected


@pytest.mark.parametrize(
    "model",
    [m for m in MODELS.values() if m.function and m.name not in (*CACHES, "AFT-simple")],
    ids=lambda m: m.name,
)
def test_the_size_of_the_functions_own_state(model):
    inputs = draw(model)
    _, state = getattr(ln, model.function)(**inputs, **model.options, return_state=True)
    expected = evaluate(model.state.tex, SIZES)
    more = {
        "wkv": SIZES["D"],  # the running maximum
        "linear_attention": 0 if model.normalizer else SIZES["C"],  # z, which is not used
        "mamba3": SIZES["K"] // 2,  # the angle: its keys turn, and not its memory
    }
    assert numbers_in(state) == expected + more.get(model.function, 0)
    if isinstance(state, np.ndarray):
        row = run(model, **inputs)[1]  # a matrix, of one column where the function has a vector
        assert_close(row.reshape(state.shape), state)


# What a token costs: counted by the numbers themselves.


class Counted:
    """A number that counts: a product is an operation, and a sum is one unless it takes a product.

    Exponentials and divisions are free, as in `lesson_code.costs`.
    """

    operations = 0

    def __init__(self, value, product=False):
        self.value, self.product = float(value), product

    def __mul__(self, other):
        if isinstance(other, np.ndarray):
            return NotImplemented  # one number after the other
        Counted.operations += 1
        return Counted(self.value * float(other), product=True)

    def __add__(self, other):
        fused = self.product or getattr(other, "product", False)
        nothing = not isinstance(other, Counted) and other == 0  # where Python's sum begins
        Counted.operations += not (fused or nothing)
        return Counted(self.value + float(other))

    def __sub__(self, other):
        return self + Counted(-float(other), getattr(other, "product", False))

    def __rsub__(self, other):
        return Counted(-self.value, self.product) + other

    def __truediv__(self, other):
        if isinstance(other, np.ndarray):
            return NotImplemented
        return Counted(self.value / float(other))

    def __neg__(self):
        return Counted(-self.value)

    def exp(self):
        return Counted(np.exp(self.value))

    def sqrt(self):
        return Counted(np.sqrt(self.value))

    def cos(self):
        return Counted(np.cos(self.value))

    def sin(self):
        return Counted(np.sin(self.value))

    def __float__(self):
        return self.value

    __rmul__, __radd__ = __mul__, __add__


def counted(x):
    if isinstance(x, int):  # the size of a window or of a batch
        return x
    return np.vectorize(Counted, otypes=[object])(x) if isinstance(x, np.ndarray) else Counted(x)


def operations_of_one_token(model, N, monkeypatch):
    """Operations of the last of N tokens."""
    monkeypatch.setattr(family, "_sigmoid", lambda x: counted(x.astype(float)))
    inputs = {name: counted(x) for name, x in draw(model, N).items()}
    if "feature_map" in model.constants:
        inputs["feature_map"] = lambda x: x
    before = {name: x[:-1] if name in model.tokens else x for name, x in inputs.items()}
    last = {name: x[-1:] if name in model.tokens else x for name, x in inputs.items()}
    _, state = run(model, **before)
    Counted.operations = 0
    run(model, **last, initial_state=state)
    return Counted.operations


@every_model
def test_operations_are_what_the_numbers_count(model, monkeypatch):
    # The last token has an odd place, counted from 0, so that log-linear attention merges nothing,
    # and TTT-Linear has learned from a batch.
    for N in (6, 10):
        sizes = asked_by(model.operations, {**SIZES, "t": N})
        found = operations_of_one_token(model, N, monkeypatch)
        assert found == model.operations(**sizes)


@every_model
def test_the_formula_of_the_operations_leads(model):
    """For large sizes what the formula leaves out does not count."""
    for sizes in ({"C": 10**7, "M": 10**6}, {"C": 10**6, "M": 10**7}):
        sizes |= {"D": 10**7, "E": 10**6, "K": 10**7, "P": 10**6, "t": 10**9}
        sizes |= {"J": 4, "w": 10**5, "N": 2**20}
        leading = evaluate(model.operations.tex, sizes)
        all_of_them = model.operations(**asked_by(model.operations, sizes))
        assert 1 - 1e-12 < all_of_them / leading < 1 + 1e-5


def test_operations_agree_with_the_costs():
    for C, M in ((4, 3), (64, 32)):
        normalized = MODELS["Linear attention, normalized"]
        assert normalized.operations(C, M) == costs.recurrent_cost(1, C, M).work
        assert normalized.state(C, M) == costs.state_entries(C, M, normalizer=True)
        assert MODELS["Linear attention"].state(C, M) == costs.state_entries(C, M)
        softmax = MODELS["Softmax attention"]
        leading = evaluate(softmax.operations.tex, {"D": C, "M": M, "t": 50})
        assert leading == costs.cached_step_operations(50, C, M)
        assert softmax.state(C, M, 50) == costs.kv_cache_entries(50, C, M)


def test_numbers_that_count():
    a, b = counted(np.arange(3.0)), counted(np.ones((3, 4)))
    Counted.operations = 0
    assert [float(x) for x in a @ b] == [3] * 4
    assert Counted.operations == 12
    assert float((a + a)[2]) == 4 and Counted.operations == 15
    assert float((a - 2 * a)[2]) == -2 and Counted.operations == 18
    assert float((a / 2)[2]) == 1 and Counted.operations == 18


# The formulas compute what the code beside them computes.

TOKEN = re.compile(
    r"\\operatorname\{diag\}|\\sum_\{[^}]*j \\le t\}|\\sqrt\{D\}|\\log_2"
    r"|\\(?:phi|sigma|odot|top|;|,|alpha|beta|gamma|kappa|eta|Delta|lambda|mu)"
    r"|[A-Za-z]|\d+|[-+/()\[\]^_{},]"
)


class Formula:
    """Computes a formula by recursive descent: vectors are columns, a product may be of matrices.

    A name is a letter with its index, such as "q_t"; `values` says what it stands for. What is
    summed over j is computed again for each of the tokens in `values["past"]`.
    """

    def __init__(self, tex, values):
        self.tokens = TOKEN.findall(tex)
        assert re.sub(r"\s", "", "".join(self.tokens)) == re.sub(r"\s", "", tex)  # none missed
        self.values, self.at = values, 0

    def compute(self):
        value = self.sum()
        assert self.at == len(self.tokens), self.tokens[self.at :]
        return value

    def peek(self):
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self, *expected):
        token = self.peek()
        assert not expected or token in expected, (token, expected)
        self.at += 1
        return token

    def sum(self):
        value = self.product()
        while self.peek() in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            value = value + sign * self.product()
        return value

    def product(self):
        if self.peek() == "-":
            self.take()
            return -self.product()
        value = self.factor()
        while self.peek() not in (None, "+", "-", ")", "]", "}", ",", r"\;"):
            if self.peek() == r"\,":
                self.take()
            elif self.peek() == r"\odot":
                self.take()
                value = value * self.factor()
            elif self.peek() == "/":
                self.take()
                value = value / self.factor()
            else:
                other = self.factor()
                plain = np.ndim(value) == 0 or np.ndim(other) == 0
                value = value * other if plain else value @ other
        return value.item() if isinstance(value, np.ndarray) and value.size == 1 else value

    def factor(self):
        value = self.atom()
        while self.peek() == "^":
            self.take()
            if (self.peek() or "").isdigit():
                value = value ** int(self.take())
            elif self.peek() == "{":
                for token in ("{", "-", "1", "}"):
                    self.take(token)
                value = np.linalg.inv(value)
            else:
                self.take(r"\top")
                value = np.transpose(value)
        return value

    def atom(self):
        token = self.take()
        if token == "(":
            value = self.sum()
            self.take(")")
            return value
        if token == "[":
            value = self.sum()
            self.take(r"\;")
            if self.peek() != "1":
                value = np.append(value, self.sum(), axis=1)
                self.take("]")
                return value
            self.take("1")
            self.take("]")
            row = value.shape[0] == 1
            return np.append(value, [[1]] if row else np.ones_like(value), axis=1)
        if token == "e":
            self.take("^")
            self.take("{")
            value = np.exp(self.sum())
            self.take("}")
            return value
        if token == r"\log_2":
            return int(np.log2(self.atom()))
        if token.startswith(r"\sum"):
            start, total = self.at, 0
            for j in self.values["past"]:
                self.at, outer = start, self.values
                self.values = self.values | j
                total = total + self.product()
                self.values = outer
            return total
        if token == r"\sqrt{D}":
            return np.sqrt(self.values["D"])
        if token == r"\operatorname{diag}":
            return np.diag(np.ravel(self.atom()))
        if token in (r"\phi", r"\sigma"):
            return self.values[token](self.atom())
        if token.isdigit():
            return int(token)
        name = token
        if self.peek() == "_":
            self.take()
            if self.peek() == "{":
                while not name.endswith("}"):
                    name += self.take()
                name = name.replace("{", "_").removesuffix("}")
            else:
                name += "_" + self.take()
        return self.values[name]


def evaluate(tex, values):
    return Formula(tex, values).compute()


def column(x):
    return x[:, None] if np.ndim(x) == 1 else x


def letters(model, x, before, S):
    """What the letters of the formulas stand for at one token."""
    values = {r"\phi": ln.elu_plus_one, r"\sigma": lambda q: 1 / (1 + np.exp(-q)), "I": np.eye(4)}
    renamed = {"delta": r"\Delta", "beta": r"\beta"}
    renamed |= {"removal_key": r"\kappa", "learning_rate": r"\eta"}
    renamed |= {"momentum": r"\mu", "trapezoid": r"\lambda"}
    for name in model.tokens:
        values[f"{renamed.get(name, name)}_t"] = column(getattr(x, name))
    if "log_decay" in model.tokens:
        values[r"\alpha_t"] = np.exp(column(x.log_decay))
    for name, letter in (("bonus", "u"), ("A", "A"), ("D", "D"), ("ridge", r"\lambda")):
        if name in model.constants:
            values[letter] = column(getattr(x, name))
    if "decay" in model.constants:
        values["w"] = values[r"\gamma"] = column(x.decay)
    if model.name in CACHES and model.name != "AFT-full":
        values["D"] = len(x.k)
        values["past"] = [
            {"k_j": column(k), "v_j": column(v[:-1]), "c_j": c}
            for k, v, c in (entry if len(entry) == 3 else (*entry, None) for entry in S)
        ]
    elif model.name == "AFT-full":
        values["past"] = [
            {"k_j": column(k), "v_j": v[:, :1], "b_tj": x.position_bias[j]}
            for j, (k, v) in enumerate(S)
        ]
    elif isinstance(S, tuple):
        letters = {"Mamba-3": "SBx", "Delta rule with momentum": ("S", r"\Delta")}[model.name]
        for letter, earlier, state in zip(letters, before, S, strict=True):
            values[f"{letter}_t-1"], values[f"{letter}_t"] = column(earlier), column(state)
        if model.name == "Mamba-3":
            cos, sin = np.cos(x.angle[0]), np.sin(x.angle[0])
            values["R_t"] = np.array([[cos, sin], [-sin, cos]])
    else:
        for when, state in (("t-1", before), ("t", S)):
            values[f"S_{when}"] = state[:, :-1] if model.normalizer else state
            values[f"z_{when}"] = state[:, -1:]
        values["H_t"], values["G_t"] = S[:, : len(S)], S[:, len(S) :]
    return values


@pytest.mark.parametrize(
    "model", [m for m in MODELS.values() if m.name not in IN_WORDS], ids=lambda m: m.name
)
def test_formulas_are_what_runs(model):
    inputs = draw(model)
    S = model.start(SimpleNamespace(**{**model.constants, **inputs}))
    for x in tokens_of(model, inputs):
        before, kept, written = S, model.transition(S, x), model.write(x)
        S = family._plus(kept, written)
        values = letters(model, x, before, S)
        # Transition and write act on z as on S.
        whole = values if isinstance(before, tuple) else values | {"S_t-1": before}
        if model.name in CACHES:
            assert (model.transition.tex == "S_{t-1}") == (kept is before)
            assert model.write.tex.startswith(r"\text{append } (k_t, v_t") and len(written) == 1
        else:
            for part, found in ((model.transition, kept), (model.write, written)):
                several = isinstance(part.tex, tuple)
                pairs = zip(part.tex, found, strict=True) if several else [(part.tex, found)]
                for tex, one in pairs:
                    assert_close(evaluate(tex, whole), column(one))
        found, expected = model.read(before, S, x), evaluate(model.read.tex, values)
        if model.normalizer:
            divisor = np.ravel(evaluate(model.normalizer, values))
            assert_close(np.unique(np.ravel(found[..., -1:])), np.unique(divisor))
            found = found[..., :-1]
        assert_close(np.ravel(found), np.ravel(expected))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("RWKV-4", {"read": r"S_{t-1} + e^{k_t} \odot v_t"}),
        ("RWKV-4", {"transition": r"e^{w} \odot S_{t-1}"}),
        ("RWKV-4", {"normalizer": r"z_{t-1} + e^{k_t}"}),
        ("AFT-simple", {"write": r"k_t \odot [v_t\; 1]"}),
        ("AFT-full", {"read": r"\sigma(q_t) \odot \sum_{j \le t} e^{k_j b_{tj}} \odot v_j"}),
        ("GLA", {"transition": "S_{t-1}"}),
        ("RWKV-5, RWKV-6", {"read": r"(S_{t-1} + k_t v_t^\top)^\top r_t"}),
        ("Mamba", {"write": r"x_t B_t^\top"}),
        ("Mamba", {"read": r"S_t C_t"}),
        ("Softmax attention", {"normalizer": r"\sum_{j \le t} e^{q_t^\top k_j}"}),
        ("Forgetting attention", {"read": r"\sum_{j \le t} e^{q_t^\top k_j / \sqrt{D}} v_j"}),
        ("Mesa", {"read": r"G_t^\top H_t^{-1} q_t"}),
        ("Mamba-3", {"transition": (r"\alpha_t R_t S_{t-1}", "0", "0")}),
        ("Delta rule with momentum", {"write": (r"\beta_t k_t v_t^\top", "0")}),
        ("Gated DeltaNet", {"transition": r"\alpha_t S_{t-1} - \beta_t k_t k_t^\top S_{t-1}"}),
        (
            "RWKV-7",
            {"transition": r"(\operatorname{diag}(\alpha_t) - \eta_t \kappa_t^\top) S_{t-1}"},
        ),
    ],
)
def test_a_wrong_formula_is_seen(name, wrong):
    model = MODELS[name]
    parts = {key: getattr(model, key) for key in Model.__dataclass_fields__}
    for key, tex in wrong.items():
        part = parts[key]
        parts[key] = Part(tex, part.compute) if isinstance(part, Part) else tex
    with pytest.raises(AssertionError):
        test_formulas_are_what_runs(Model(**parts))


# The printed table.


def test_the_table_has_every_model_and_every_column():
    lines = table().splitlines()
    assert lines[0] == f"| model | {' | '.join(family.COLUMNS)} |"
    assert len(lines) == 2 + len(MODELS)
    for line, model in zip(lines[2:], MODELS.values(), strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 1 + len(family.COLUMNS)
        tex = model.transition.tex
        tex = tex if isinstance(tex, str) else "$, $".join(tex)
        assert cells[0] == model.name and cells[1] == f"${tex}$"
        assert cells[4] == (f"${model.normalizer}$" if model.normalizer else "none")
        assert cells[7] == (f"`{model.function}`" if model.function else "none")


def test_columns_are_chosen():
    assert table("state", models=[MODELS["GLA"]]).splitlines()[-1] == "| GLA | $C M$ |"
    with pytest.raises(ValueError, match="^a column must be one of transition, .*, got 'speed'"):
        table("speed")


def test_papers_are_in_the_bibliography():
    entries = (ROOT / "book" / "references.bib").read_text(encoding="utf-8")
    for model in MODELS.values():
        entry = re.search(rf"^@\w+\{{{model.paper},$.*?^\}}", entries, re.MULTILINE | re.DOTALL)
        assert entry, model.paper
        author, year = re.match(r"([\w ]+?)(?: et| and| T|).*\((\d{4})\w?\)", model.source).groups()
        assert f"year = {{{year}}}" in entry[0] and author in entry[0]


def test_inputs_are_refused():
    inputs = draw(MODELS["RetNet"])
    del inputs["decay"]
    with pytest.raises(TypeError, match="^model must be a Model, .*, got 'RetNet'"):
        run("RetNet")
    with pytest.raises(TypeError, match="^RetNet takes q, k, v, decay; missing or unknown: decay"):
        run(MODELS["RetNet"], **inputs)
    with pytest.raises(TypeError, match="missing or unknown: decay, gamma"):
        run(MODELS["RetNet"], **inputs, gamma=0.5)
    with pytest.raises(ValueError, match="tokens of one length, got {'q': 9, 'k': 8, 'v': 9}"):
        run(MODELS["RetNet"], **inputs | {"k": inputs["k"][:8]}, decay=0.5)


def test_a_row_of_ones_own():
    """An exponential mean of the values, without keys."""
    mean = Model(
        name="mean",
        paper="",
        source="",
        tokens=("v",),
        constants={"rate": 0.5},
        start=lambda x: np.zeros(x.v.shape[-1]),
        transition=Part(r"(1 - r) S_{t-1}", lambda S, x: (1 - x.rate) * S),
        write=Part("r v_t", lambda x: x.rate * x.v),
        read=Part("S_t", lambda _, S, x: S),
        state=Part("M", lambda M: M),
        operations=Part("2 M", lambda M: 2 * M),
    )
    out, S = run(mean, v=np.array([[8.0], [4.0], [2.0]]))
    assert out.ravel().tolist() == [4, 4, 3] and S.tolist() == [3]
    assert table("write", models=[mean]).splitlines()[-1] == "| mean | $r v_t$ |"


def test_a_row_that_erases_and_writes_by_channels():
    """The stranger of the chapter: a generalized delta rule, with vectors for the rate."""
    inputs = draw(MODELS["Kimi delta attention"])
    rng, C, M = np.random.default_rng(1), SIZES["C"], SIZES["M"]
    erase, write = rng.uniform(size=(9, C)), rng.uniform(size=(9, M))
    alpha, S, outputs = np.exp(inputs["log_decay"]), np.zeros((C, M)), []
    q, k, v = (inputs[name] for name in "qkv")
    for t in range(9):
        T = (np.eye(C) - np.outer(k[t], erase[t] * k[t])) @ np.diag(alpha[t])
        S = T @ S + np.outer(k[t], write[t] * v[t])
        outputs.append(S.T @ q[t])
    found = ln.generalized_delta_rule(q, k, write * v, alpha * erase * k, -k, inputs["log_decay"])
    assert_close(found, outputs)
