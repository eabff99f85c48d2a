"""Tensor parallelism: the operators of one replica shared by several workers, whose results meet in sums.

Linear layers are split by column and row, attention by heads, embeddings and output layers by vocabulary (Shoeybi et
al., Megatron-LM, 2019). The model's modules and parameters stay the same objects.
"""
