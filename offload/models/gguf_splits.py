"""How byte-level BPE vocabularies split text before merging, by ``tokenizer.ggml.pre``.

The patterns are those of the published ``tokenizer.json`` of the families; which name has which is
llama.cpp's list (``llama-vocab.cpp``). They are data: a wrong split gives other tokens silently,
so a name that is not here is an error.
"""

from __future__ import annotations

from typing import NamedTuple

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _TAIL
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?"
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O = (
    f"{_CASED}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_CASED}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}" + _CASED_TAIL
)
# Kimi K2's letters are not Chinese characters: runs of those are pieces of their own.
_KIMI_UPPER, _KIMI_LOWER = (f"{letters[:-1]}&&[^\\p{{Han}}]]" for letters in (_UPPER, _LOWER))
_KIMI_K2 = (
    f"[\\p{{Han}}]+|{_CASED}{_KIMI_UPPER}*{_KIMI_LOWER}+{_CONTRACTIONS}?"
    f"|{_CASED}{_KIMI_UPPER}+{_KIMI_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}|" + _TAIL
)
_TEKKEN = f"{_CASED}{_UPPER}*{_LOWER}+|{_CASED}{_UPPER}+{_LOWER}*" r"|\p{N}" + _CASED_TAIL

# DeepSeek's "letters": the cased ones of an older Unicode, as its tokenizer.json lists them. By
# number, because some are canonically equivalent to others and editors replace them.
_DEEPSEEK_LETTERS = "".join(
    "-".join(chr(int(end, 16)) for end in span.split("-"))
    for span in """
    41-5A 61-7A B5
    C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A
    38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF
    1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D
    1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4
    1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F
    2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F
    A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3
    104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943
    """.split()
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CJK,
    r"\p{N}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DIGITS_FIRST = (r"\p{N}", _GPT2)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")


class Split(NamedTuple):
    """``patterns`` split one after the other, each isolating its matches.

    ``ignore_merges``: a piece that is a token is taken whole. ``adds_bos``: unless the file says
    otherwise.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False


SPLITS: dict[str, Split] = {
    name: split
    for names, split in (
        (
            "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
            Split((_LLAMA3,), ignore_merges=True, adds_bos=True),
        ),
        ("dbrx smaug-bpe glm4 chatglm-bpe", Split((_LLAMA3,))),
        ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan", Split((_QWEN2,))),
        ("qwen35", Split((_QWEN35,))),
        ("gpt-4o llama4 kanana2 talkie minimax-m2", Split((_GPT4O,))),
        ("kimi-k2", Split((_KIMI_K2,))),
        ("tekken", Split((_TEKKEN,), ignore_merges=True, adds_bos=True)),
        ("deepseek-llm", Split(_DEEPSEEK_LLM)),
        ("deepseek-coder", Split(_DEEPSEEK_CODER)),
        ("deepseek-v3 hunyuan-dense joyai-llm", Split(_DEEPSEEK_V3)),
        ("gpt-2 phi-2 olmo mpt jais exaone4 trillion granite-docling", Split((_GPT2,))),
        (
            "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
            Split(_DIGITS_FIRST),
        ),
        ("default", Split(_DEFAULT)),
    )
    for name in names.split()
}

BY_ARCHITECTURE = {
    "qwen2": "qwen2",
    "qwen3": "qwen2",
    "qwen2moe": "qwen2",
    "qwen3moe": "qwen2",
    "gpt-oss": "gpt-4o",
    "glm4moe": "glm4",
}
"""For files from before ``tokenizer.ggml.pre``: architectures with one kind of vocabulary only."""
