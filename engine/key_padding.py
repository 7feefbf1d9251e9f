"""How many keys attention reads: more than a row has, so that its bits do not depend on company.

A row attends beside longer rows, whose keys beyond its own are masked. Masked keys add exact
zeros; what changes bits is the order in which a kernel adds, and that depends on how many keys
it takes at a time. torch's attention on a CPU takes 512 at a time and what is left over, and its
product adds 256 in another order than 128, 384 or 512 (float32 and bfloat16, AVX-512). So a
number of keys is a multiple of 128 that leaves no 256 over. engine/attention_guarantee.py
measures at start that this holds on the machine at hand.
"""

KEY_MULTIPLE = 128
_KEYS_AT_A_TIME = 512
_ODD_REST = 256


def padded_keys(count: int, multiple: int = KEY_MULTIPLE) -> int:
    """The number of keys to read for `count`; never falls when count grows. With another multiple
    than KEY_MULTIPLE nothing is promised, and it is only rounded up."""
    padded = -(-count // multiple) * multiple
    if multiple == KEY_MULTIPLE and padded % _KEYS_AT_A_TIME == _ODD_REST:
        padded += multiple
    return padded
