"""What a converted attention is, and how it runs.

Letters, used everywhere in this project: B batch, T query tokens, S cached tokens, E model width, H query heads,
G KV heads (groups), D head dim. Activations are `[B, heads, T, D]` as in transformers; weights of one layer are
`q [H, D, E]`, `k, v [G, D, E]`, `o [E, H, D]`.
"""
