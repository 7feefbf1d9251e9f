"""Tokens in, tokens out: batched speculative decoding that equals the target model alone.

Nothing is imported here: `engine.stats` and `engine.request` must load without torch.
"""
