"""This package's operators inside the models of the ``transformers`` library."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from lesson_code.torch.delta import gated_delta_rule, kimi_delta_attention
from lesson_code.torch.mamba import state_space_dual

# Whose layers call the functions below: all models of transformers 5.23 that have them.
MODELS = (
    "bailing_hybrid bamba falcon_h1 glm5_next granitemoehybrid kimi_linear mamba2 nemotron_h "
    "olmo_hybrid qwen3_5 qwen3_5_moe qwen3_next qwen4_exp zamba2"
).split()


@contextmanager
def in_transformers() -> Iterator[list[str]]:
    """Let models of ``transformers`` run on this package's operators.

    Inside the context the layers with a gated delta rule (Qwen3-Next and 3.5, OLMo-Hybrid, ...),
    with Kimi delta attention (Kimi Linear, ...) and with Mamba-2 (Nemotron-H, Bamba, ...) compute
    their recurrences here, wherever they would fall back to plain PyTorch: in training, in reading
    a prompt and in the steps of decoding. Weights, layers and results are the same; a model may be
    built before or inside. Where the package that the library prefers is installed (``fla``,
    ``mamba_ssm``) nothing is replaced. Leaving the context restores the library, after an exception
    too.

    Yields
    ------
    list of str
        The functions that are replaced, by their full names.

    Raises
    ------
    ImportError
        If ``transformers`` is not installed, or has none of these models.

    Notes
    -----
    The recurrences are computed in float32, as the library does. A call with packed sequences
    (``cu_seqlens``, ``seq_idx``) goes to the library, which refuses it.

    Examples
    --------
    A model's three kinds of call, each as without the context::

        with in_transformers():
            logits = model(tokens).logits
            loss.backward()
            text = model.generate(prompt)
    """
    if find_spec("transformers") is None:
        raise ImportError("in_transformers needs the transformers library: install transformers.")
    modules = _modules()
    if not modules:
        raise ImportError("in_transformers finds no model with a recurrence: update transformers.")
    adapters = {
        name: adapter for name, (package, adapter) in ADAPTERS.items() if find_spec(package) is None
    }
    originals = [
        (module, name, getattr(module, name))
        for module in modules
        for name in adapters
        if hasattr(module, name)
    ]
    try:
        for module, name, original in originals:
            setattr(module, name, _unless_packed(adapters[name], original))
        yield [f"{module.__name__}.{name}" for module, name, _ in originals]
    finally:
        for module, name, original in originals:
            setattr(module, name, original)


def _modules():
    """The modules of the models that this version of the library has."""
    paths = (f"transformers.models.{name}.modeling_{name}" for name in MODELS)
    return [importlib.import_module(path) for path in paths if _exists(path)]


def _exists(path):
    try:
        return find_spec(path) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def _unless_packed(adapter, original):
    def run(*args, **kwargs):
        packed = kwargs.get("cu_seqlens") is not None or kwargs.get("seq_idx") is not None
        return (original if packed else adapter)(*args, **kwargs)

    return run


def _delta(rule):
    """A delta rule with the library's arguments: (B, N, H, D), queries scaled by 1 / sqrt(D)."""

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v, g, beta = (x.float().transpose(1, 2) for x in (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            q, k = (x * (x.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        each = v.shape[1] // k.shape[1]  # heads of values that share one of keys
        q, k = (x.repeat_interleave(each, dim=1) for x in (q * q.shape[-1] ** -0.5, k))
        state = None if initial_state is None else initial_state.float()
        out, S = rule(
            q, k, v, beta, g, chunk_size=chunk_size, initial_state=state, return_state=True
        )
        out = out.transpose(1, 2).to(query.dtype, memory_format=torch.contiguous_format)
        return out, S if output_final_state else None

    return run


def _chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba-2's scan: hidden_states (B, N, H, P), B and C (B, N, groups, K), state (B, H, P, K)."""
    delta = _step(dt, dt_bias, dt_softplus).clamp(*dt_limit).float()  # (B, N, H)
    x = hidden_states.float()
    each = x.shape[2] // B.shape[2]
    B, C = (y.float().repeat_interleave(each, dim=2).transpose(1, 2) for y in (B, C))
    state = None if initial_states is None else initial_states.float().mT
    y, S = state_space_dual(
        (x * delta[..., None]).transpose(1, 2),
        (A.float() * delta).mT,
        B,
        C,
        chunk_size=chunk_size,
        initial_state=state,
        return_state=True,
    )
    y = y.transpose(1, 2).contiguous()
    if D is not None:
        y = y + D[..., None] * x
    return (y, S.mT.contiguous()) if return_final_states else y


def _state_update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """A step of it, which writes to the state: hidden_states (B, H, P), B and C (B, groups, K).

    The library expands dt, A and D to (B, H, P), (H, P, K) and (H, P).
    """
    delta = _step(dt, dt_bias, dt_softplus)[..., :1].float()  # (B, H, 1)
    x = hidden_states.float()
    each = x.shape[1] // B.shape[1]
    B, C = (y.float().repeat_interleave(each, dim=1)[:, :, None] for y in (B, C))  # (B, H, 1, K)
    y, S = state_space_dual(
        (delta * x)[:, :, None],
        A[:, 0, :1].float() * delta,
        B,
        C,
        form="recurrent",
        initial_state=state.float().mT,
        return_state=True,
    )
    state.copy_(S.mT)
    y = y[:, :, 0]
    if D is not None:
        y = y + x * D
    if z is not None:
        y = y * silu(z)
    return y.to(hidden_states.dtype)


def _step(dt, bias, with_softplus):
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return softplus(dt) if with_softplus else dt


# Functions of the library, the package that it prefers to its own, and what stands in for them.
ADAPTERS: dict[str, tuple[str, Callable]] = {
    "torch_chunk_gated_delta_rule": ("fla", _delta(gated_delta_rule)),
    "torch_recurrent_gated_delta_rule": ("fla", _delta(gated_delta_rule)),
    "chunk_kimi_delta_attention": ("fla", _delta(kimi_delta_attention)),
    "recurrent_kimi_delta_attention": ("fla", _delta(kimi_delta_attention)),
    "mamba2_chunk_scan": ("mamba_ssm", _chunk_scan),
    "mamba2_selective_state_update": ("mamba_ssm", _state_update),
}
