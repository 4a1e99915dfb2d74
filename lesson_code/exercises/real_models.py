"""Exercises of the chapter on models that people download."""

import numpy as np

from lesson_code.exercises import Exercise
from lesson_code.numpy import state_space_dual

CHAPTER = "Inside models that people download"
MAP = "A map before the files"
BYTES = "What fills the memory"
QWEN = "Qwen3-Next: a gated delta rule"
MAMBA = "Nemotron-H: Mamba-2 with groups"
LIGHTNING = "MiniMax: lightning attention"

# --- The memory of Kimi Linear -----------------------------------------------------------------

MEMORY = Exercise("ex-real-memory", CHAPTER)
HEADS, WIDTH, LATENT, SHARED = 32, 128, 512, 64
LAYERS, STATES = 27, 20
CACHES = LAYERS - STATES
OF_A_LAYER = HEADS * WIDTH * WIDTH
STATE, PER_TOKEN = STATES * OF_A_LAYER, CACHES * (LATENT + SHARED)

MEMORY.value("state", STATE, BYTES, "a number of numbers").mistakes(
    (OF_A_LAYER, "This is one layer. How many layers have a state?", MAP),
    (LAYERS * OF_A_LAYER, "Not every layer has a state: count the letters of the layout.", MAP),
    (STATES * WIDTH * WIDTH, "Every head has a matrix of its own."),
    (STATES * HEADS * 2 * WIDTH, "A state is a matrix: for each channel of a key a whole value."),
)
MEMORY.value("per_token", PER_TOKEN, BYTES, "a number of numbers").mistakes(
    (LATENT + SHARED, "This is one layer with a cache. How many are there?", MAP),
    (LAYERS * (LATENT + SHARED), "Layers with a state add nothing for a token.", MAP),
    (CACHES * LATENT, "The part of the keys that all heads share is stored as well."),
    (
        CACHES * HEADS * (LATENT + SHARED),
        "What is stored is shared by the heads, and stored once.",
    ),
    (
        CACHES * HEADS * 2 * WIDTH,
        "These are the keys and values of all heads. They are made from the latent when they are "
        "needed.",
    ),
)
MEMORY.value("tokens", STATE // PER_TOKEN + 1, BYTES, "a number of tokens").mistakes(
    (STATE // PER_TOKEN, "With so many tokens the states still have a few numbers more."),
    (
        2 * STATE // PER_TOKEN + 1,
        "That is where they have as many bytes, with states in 32 bits and caches in 16. Numbers "
        "were asked for.",
    ),
)

# --- Which comes first -------------------------------------------------------------------------

ORDER = Exercise("ex-real-order", CHAPTER)
S, V, ALPHA, BETA = 8.0, 10.0, 0.5, 0.75


def forgotten_first():
    faded = ALPHA * S
    return faded + BETA * (V - faded)


def error_first():
    return ALPHA * S + BETA * (V - S)


def faded_last():
    return ALPHA * (S + BETA * (V - S))


ADDED = S * ALPHA + BETA * V
NO_ERROR = (
    "The value is added as it is. A delta rule writes what is missing from what the key finds."
)

ORDER.value("forget_first", forgotten_first(), QWEN).mistakes(
    (error_first(), "The error was taken from the memory before it faded."),
    (faded_last(), "Here everything fades, the new write too."),
    (ADDED, NO_ERROR),
)
ORDER.value("error_first", error_first(), QWEN).mistakes(
    (forgotten_first(), "The error is that of the memory as it was, which held 8."),
    (faded_last(), "The correction was decayed, too. It is added after the memory has faded."),
    (ADDED, NO_ERROR),
)
ORDER.value("fade_last", faded_last(), QWEN).mistakes(
    (error_first(), "The correction is already in the memory when that fades."),
    (S + BETA * (V - S), "Nothing has faded yet."),
)
ORDER.value("library", forgotten_first(), QWEN).mistakes(
    (
        error_first(),
        "This is another rule's answer. Does the function get the logarithm of the decay?",
    ),
    (
        S * np.exp(ALPHA) + BETA * (V - S * np.exp(ALPHA)),
        "The function takes the logarithm of the decay, and has got the decay itself.",
    ),
)

# --- Lightning rates ---------------------------------------------------------------------------

SLOPES = Exercise("ex-real-slopes", CHAPTER)


def settings(rng, N):
    num_layers = int(rng.integers(4, 40))
    return int(rng.integers(2, 9)), int(rng.integers(1, num_layers - 1)), num_layers


@SLOPES.function(LIGHTNING, inputs=settings, unit="")
def lightning_decays(num_heads, layer, num_layers):
    return decays(num_heads, 1 - layer / (num_layers - 1) + 1e-5)


def decays(num_heads, factor, first=1):
    h = np.arange(first, num_heads + first)
    return np.exp(-(2.0 ** (-8 * h / num_heads)) * factor)


lightning_decays.mistakes(
    (
        lambda num_heads, layer, num_layers: decays(
            num_heads, 1 - layer / (num_layers - 1) + 1e-5, first=0
        ),
        "The heads are counted from 0, so that each forgets as fast as the one before it should.",
    ),
    (
        lambda num_heads, layer, num_layers: decays(num_heads, 1.0),
        "All layers forget alike: the factor of the layer is missing.",
    ),
    (
        lambda num_heads, layer, num_layers: decays(num_heads, 1 - layer / num_layers + 1e-5),
        "The layer is divided by the number of layers. The last layer has the number one less.",
    ),
    (
        lambda num_heads, layer, num_layers: (
            -np.log(decays(num_heads, 1 - layer / (num_layers - 1) + 1e-5))
        ),
        "These are the rates s. The memory is multiplied by exp(-s).",
    ),
)

LAST, LAYERS_OF_MINIMAX = 78, 80


def remembered(share):
    """Tokens that head 64 of 64 remembers in a layer with this factor."""
    return 2.0**8 / share


RIGHT = remembered(1 - LAST / (LAYERS_OF_MINIMAX - 1) + 1e-5)
WRONG = remembered(1 - LAST / LAYERS_OF_MINIMAX + 1e-5)

SLOPES.value("tokens_right", RIGHT, LIGHTNING, "a number of tokens").mistakes(
    (WRONG, "Here the layer is divided by the number of layers."),
    (1 / RIGHT, "This is the rate. After one over the rate the fraction 1/e is left."),
    (np.exp(-1 / RIGHT), "This is the factor, not the number of tokens."),
    (remembered(1.0), "The factor of the layer is missing."),
)
SLOPES.value("tokens_wrong", WRONG, LIGHTNING, "a number of tokens").mistakes(
    (RIGHT, "Here the layer is divided by one less than the number of layers."),
    (1 / WRONG, "This is the rate. After one over the rate the fraction 1/e is left."),
)

# --- A floor under forgetting ------------------------------------------------------------------

FLOOR = Exercise("ex-real-floor", CHAPTER)
RATE, LEARNED, LEAST, PROMPT, STEPS = 2, 0.0002, 0.001, 600, 400


def left(in_prompt, in_steps, rate=RATE):
    return np.exp(-rate * (in_prompt * PROMPT + in_steps * STEPS))


NO_RATE = "The rate of 2 is missing in the exponent."

FLOOR.value("left", left(LEARNED, LEARNED), MAMBA).mistakes(
    (left(LEARNED, LEARNED, rate=1), NO_RATE),
    (1 - left(LEARNED, LEARNED), "This is what is forgotten."),
    (left(LEAST, LEAST), "This is with the floor."),
)
FLOOR.value("floored", left(LEAST, LEAST), MAMBA).mistakes(
    (left(LEAST, LEAST, rate=1), NO_RATE),
    (1 - left(LEAST, LEAST), "This is what is forgotten."),
    (left(LEARNED, LEARNED), "A step of 0.0002 is below the floor, and is raised."),
)
FLOOR.value("mixed", left(LEAST, LEARNED), MAMBA).mistakes(
    (left(LEARNED, LEAST), "The floor is in the prompt, not in the steps."),
    (left(LEAST, LEARNED, rate=1), NO_RATE),
    (left(LEAST, 0), "The 400 steps forget as well."),
    (left(LEAST, 0) + left(0, LEARNED), "What is left is multiplied, not added."),
)
FLOOR.value("heavier", LEAST / LEARNED, MAMBA).mistakes(
    (LEARNED / LEAST, "This is the inverse: the floor makes the write heavier."),
    (RATE * LEAST / LEARNED, "The rate is in the forgetting, not in the write."),
    (left(LEAST, LEARNED) / left(LEARNED, LEARNED), "The last token of the prompt forgets alike."),
)

# --- Going on from the library's state ---------------------------------------------------------

RESUME = Exercise("ex-real-resume", CHAPTER)


def square(rng, N, D=4):
    """With as many channels as the state has numbers for each, so that every layout fits."""
    u, B, C = (rng.normal(size=(N, D)) for _ in range(3))
    return rng.normal(size=(D, D)), u, -rng.exponential(size=N), B, C


@RESUME.function(MAMBA, inputs=square)
def resume(state, u, log_decay, B, C):
    return state_space_dual(u, log_decay, B, C, initial_state=state.T)


resume.mistakes(
    (
        lambda state, u, log_decay, B, C: state_space_dual(u, log_decay, B, C, initial_state=state),
        "The state was used as it came. It has values in its rows, and this book has keys there.",
    ),
    (
        lambda state, u, log_decay, B, C: state_space_dual(u, log_decay, B, C),
        "The memory begins empty. The conversation before these tokens is lost.",
    ),
    (
        lambda state, u, log_decay, B, C: state_space_dual(
            u, log_decay, C, B, initial_state=state.T
        ),
        "B and C have changed places: B is the key that writes, C the query that reads.",
    ),
    (
        lambda state, u, log_decay, B, C: C @ state.T + state_space_dual(u, log_decay, B, C),
        "What was there before does not fade while new tokens come.",
    ),
)
