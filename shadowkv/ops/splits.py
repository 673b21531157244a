"""Into how many programs kernels divide a row: plain arithmetic, so that a plan needs no Triton."""

SM_COUNT = 132
"""Streaming multiprocessors of the GPU that the divisions are made for (an H200); others only balance less well."""
PROGRAMS_PER_SM = 3
"""Programs of attention that run on each at a time: as many as its shared memory holds."""
BLOCK_TOKENS = 64
"""Tokens of a step of attention's loop, at 128 dimensions in 16 bits; runs are whole steps."""
MIN_SPLIT_TOKENS = 128
"""Shorter runs of attention do not pay for filling their load pipeline and for merging."""
MAX_SPLIT_TOKENS = 4096
"""Longer ones leave SMs idle at the end, the more so where rows are unequal."""
RUN_START = 60
"""What begins and ends a run, in tokens of a full wave (47 ns each): reading tables, filling the pipeline, parts."""
MERGE_COST = 120
"""What the merge kernel adds, in the same unit."""
LEAST_WAVE = 0.6
"""A wave of few programs takes this share of a full one's time: a program alone is bound by the steps of its loop."""
SCORE_SPLIT_CHUNKS = 512
"""Chunks that one program of the landmark kernel scores."""


def attention_splits(batch: int, kv_heads: int, max_tokens: int) -> int:
    """Runs into which the tokens of a (row, KV head) are divided, for rows that see at most ``max_tokens``.

    The division with the least estimated time. Waves decide it: of 14 rows of 2,492 tokens with 8 KV heads, 3 runs
    each are 336 programs that run all at once; 4 runs are a full wave and a second one of 52 programs. Estimated
    and measured on an H200, rows/runs, us: 14/4 59, 58; 14/5 50, 53; 14/8 53, 52; 28/2 107, 103; 28/3 78, 84;
    28/4 92, 89; 48/1 118, 120.
    """
    pairs, places = batch * kv_heads, SM_COUNT * PROGRAMS_PER_SM
    fewest = max(-(-max_tokens // MAX_SPLIT_TOKENS), 1)
    most = min(max(4 * places // pairs, fewest + places // pairs), -(-max_tokens // MIN_SPLIT_TOKENS))
    return min(range(fewest, max(most, fewest) + 1), key=lambda splits: _attention_time(pairs, splits, max_tokens))


def _attention_time(pairs: int, splits: int, tokens: int) -> float:
    """What attention takes, in tokens of a full wave, when each (row, KV head) is so many runs."""
    steps = -(-tokens // (splits * BLOCK_TOKENS))
    full, rest = divmod(pairs * splits, SM_COUNT * PROGRAMS_PER_SM)
    last = max(rest / (SM_COUNT * PROGRAMS_PER_SM), LEAST_WAVE) if rest else 0.0
    starts = (full + bool(rest)) * RUN_START
    return steps * BLOCK_TOKENS * (full + last) + starts + (MERGE_COST if splits > 1 else 0)


def most_attention_runs(max_batch: int, kv_heads: int, max_tokens: int) -> int:
    """The most that batch times splits comes to, for batches of up to ``max_batch`` rows."""
    return max(batch * attention_splits(batch, kv_heads, max_tokens) for batch in range(1, max_batch + 1))


def score_splits(chunks: int) -> int:
    """Runs into which the chunks of a (row, KV head) are divided when they are scored."""
    return -(-chunks // SCORE_SPLIT_CHUNKS)


RUN_CHUNKS = (16, 8, 4)
"""Lengths that runs of chunks may have where choosing looks at the largest key of each first; longest first."""


def run_chunks(most: int, chunks: int) -> int:
    """Chunks in a run of which choosing looks at the largest key first, when it chooses at most ``most`` of ``chunks``.

    The longest runs that leave least to search at a time: all runs' largest keys, or all keys of as many runs as
    chunks are chosen.
    """
    return min(RUN_CHUNKS, key=lambda span: max(_power_of_2(-(-chunks // span)), _power_of_2(most) * span))


def _power_of_2(count: int) -> int:
    """The next one, as blocks of kernels have it."""
    return 1 << (count - 1).bit_length()


def choose_width(chunks: int) -> int:
    """Scratch integers of a (row, KV head) for choosing among so many chunks: their keys, and the largest of runs."""
    return chunks + -(-chunks // RUN_CHUNKS[-1])
