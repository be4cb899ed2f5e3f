"""The six tasks of Mechanistic Architecture Design (Poli et al. 2024, arXiv:2403.17844), as its public code draws them.

What is different here, for all six: training rows are always fresh, where MAD repeats 12,800 (memorization: 256); an
accuracy is the share of scored tokens, where MAD averages over classes; the last value of a row of recall is read too
(nothing behind it is scored), so rows have `length` tokens, where MAD's have one fewer. MAD's protocol: width 128, two
blocks of a mixer and a SwiGLU, batch 128, learning rates 1e-4, 5e-4, 1e-3 and weight decays 0, 0.1, the best of six.
"""
