"""The engines: the fast forms of everything with a memory.

`linear`
    A memory that adds, of features: S_t = S_{t-1} + φ(k_t) v_tᵀ, read as a mean.
`additive`
    A memory that decays and adds: S_t = diag(a_t) S_{t-1} + k_t v_tᵀ.
`delta`
    A memory that decays, moves what it finds and writes: S_t = (diag(w_t) + b_t a_tᵀ) S_{t-1} +
    k_t v_tᵀ.
`selective`
    A memory that decays entry by entry, as Mamba's: h_t = exp(Δ_t A) ∘ h_{t-1} + (Δ_t ∘ x_t) B_tᵀ.
`fading`
    A mean that fades, channel by channel, as WKV: a_t = exp(-w) a_{t-1} + exp(k_t) v_t over the
    same sum without v.

What fades inside a chunk is in `decays`, how a sequence is cut in `segments`.

An operator says what it feeds its engine. The forms that only teach (masked, cumsum, ...) stand in
`lesson_code.torch.linear`.
"""
