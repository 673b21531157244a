"""Into how many programs kernels divide a row: plain arithmetic, so that a plan needs no Triton."""

SM_COUNT = 132
"""Streaming multiprocessors of the GPU that the divisions are made for (an H200); others only balance less well."""
PROGRAMS_PER_SM = 4
"""Programs of attention that each should get, so that the last ones to finish leave few SMs idle."""
MIN_SPLIT_TOKENS = 256
"""Shorter runs of attention do not pay for filling their load pipeline and for merging."""
MAX_SPLIT_TOKENS = 2048
"""Longer ones leave SMs idle at the end."""
SCORE_SPLIT_CHUNKS = 512
"""Chunks that one program of the landmark kernel scores."""


def attention_splits(batch: int, kv_heads: int, max_tokens: int) -> int:
    """Runs into which the tokens of a (row, KV head) are divided, for rows that see at most ``max_tokens``."""
    if batch * kv_heads >= 2 * SM_COUNT and max_tokens <= 2 * MAX_SPLIT_TOKENS:
        return 1  # enough programs, and none of them long: not worth a merge
    wanted = max(-(-SM_COUNT * PROGRAMS_PER_SM // (batch * kv_heads)), -(-max_tokens // MAX_SPLIT_TOKENS))
    return max(min(wanted, -(-max_tokens // MIN_SPLIT_TOKENS)), 1)


def most_attention_runs(max_batch: int, kv_heads: int, max_tokens: int) -> int:
    """The most that batch times splits comes to, for batches of up to ``max_batch`` rows."""
    return max(batch * attention_splits(batch, kv_heads, max_tokens) for batch in range(1, max_batch + 1))


def score_splits(chunks: int) -> int:
    """Runs into which the chunks of a (row, KV head) are divided when they are scored."""
    return -(-chunks // SCORE_SPLIT_CHUNKS)


MOST_KEPT = 1 << 15
"""Keys that choosing searches at a time, at most."""
RUN_CHUNKS = (16, 8, 4)


def run_chunks(most: int) -> int:
    """Chunks in a run of which choosing looks at the largest key first, when it chooses at most ``most``."""
    for chunks in RUN_CHUNKS:
        if most * chunks <= MOST_KEPT:
            return chunks
    return RUN_CHUNKS[-1]


def choose_width(chunks: int) -> int:
    """Scratch integers of a (row, KV head) for choosing among so many chunks: their keys, and the largest of runs."""
    return chunks + -(-chunks // RUN_CHUNKS[-1])
