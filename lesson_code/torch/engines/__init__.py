"""The engines on which the models with decay, gates and the delta rule run.

`additive`
    A memory that decays and adds: S_t = diag(a_t) S_{t-1} + k_t v_tᵀ.
`delta`
    A memory that decays and corrects: S_t = a_t (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ.
`scan`
    A memory that decays entry by entry, as Mamba's: h_t = exp(Δ_t A) ∘ h_{t-1} + (Δ_t ∘ x_t) B_tᵀ.

The first two have a recurrent and a chunkwise form. A model says what it feeds its engine, and
nothing else.
"""
