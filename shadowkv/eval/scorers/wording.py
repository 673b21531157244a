"""Texts made comparable: case, articles, punctuation, white space; and words, with overlap counted."""

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from shadowkv.errors import ConfigError

CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣"  # noqa: RUF001
    "､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."  # noqa: RUF001
)
"""The set that LongBench and InfiniteBench remove. Their lists lack the mark 《, and so does this one."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NO_CHINESE_PUNCTUATION = str.maketrans("", "", string.punctuation + CHINESE_PUNCTUATION)


def english(text: str) -> str:
    """Lower case, without punctuation and articles, words apart by one space (SQuAD's rule)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def chinese(text: str) -> str:
    """Lower case, without punctuation and white space."""
    return "".join(text.lower().translate(_NO_CHINESE_PUNCTUATION).split())


def overlap_f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """F1 of two bags of tokens."""
    same = sum((Counter(prediction) & Counter(reference)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(prediction), same / len(reference)
    return 2 * precision * recall / (precision + recall)


def chinese_words(text: str) -> list[str]:
    """A Chinese text cut into words.

    Raises:
        ConfigError: the package jieba is not installed.
    """
    return [str(word) for word in _jieba().cut(text, cut_all=False)]


def _jieba() -> Any:
    try:
        import jieba  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise ConfigError(
            "Chinese answers are scored by words, which the package jieba finds; it is not installed: "
            "pip install 'shadowkv-inference[eval]', or leave out the Chinese tasks"
        ) from None
    import logging

    jieba.setLogLevel(logging.WARNING)
    return jieba


def spaced(text: str, marks: Iterable[str]) -> str:
    """A text with each of these marks made a space."""
    for mark in marks:
        text = text.replace(mark, " ")
    return text
