"""Secure aggregation: a server learns the sum of its clients' updates, and none of them alone.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (2017), with the sparse graph of
Bell et al., "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead" (2020).
"""
