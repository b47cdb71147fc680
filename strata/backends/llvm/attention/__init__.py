"""Attention kernels: blocks of queries, decode, paged KV cache, backward."""
