"""A small byte-level BPE tokenizer: every byte is a token, and every prefix of some hundred words.

Owns the vocabulary, the special tokens and the chat template. Any text round-trips; no training, no
dependency.
"""

from __future__ import annotations

from typing import Any, Final

VOCAB_SIZE: Final = 2048

_WORDS: Final = """
a able about above across act add after again age ago air all almost along also always among an and
animal another answer any appear apple are area arm around arrive art as ask at autumn away baby
back ball bank base be bear beautiful because become bed been before began begin behind believe
below best better between big bird black blue board boat body book both bottom box boy bread bridge
bright bring brother brought brown build but buy by cake call came can car care carry cat catch
cause center certain chair change child children choose circle city class clean clear climb close
cloud coat coffee cold color come common complete continue cook copper corner could count country
course cover cross cut dance dark daughter day deep did different dinner do does dog door down draw
dream drive drop dry during each ear early earth east easy eat edge egg eight end enough even
evening ever every example eye face fact fall family far farm fast father feel feet few field fill
find fine fire first fish five floor flower fly follow food foot for forest form found four free
friend from front fruit full game garden gave girl give glad glass go gold gone good grass great
green grew ground group grow had hair half hand happen happy hard has hat have he head hear heart
heavy help her here high hill him his hold home hope horse hot hour house how however hundred ice
idea if important in inside into iron is island it its job journey jump just keep kept kind king
kitchen knew know lake lamp land language large last late laugh lead leaf learn leave left less let
letter life light like line list listen little live long look lost love low machine made main make
man many map market may me mean meat meet men might mile milk mind minute moment money month moon
more morning most mother mountain mouth move much music must my name near need never new next night
nine no north nose not note nothing notice now number ocean of off often oil old on once one only
open or orange order other our out over own page paint paper part pass past path people perhaps
person picture piece place plain plan plant play point poor possible power problem pull push put
question quick quiet quite rain ran reach read ready real red remember rest rice rich ride right
river road rock room root rose round run said sail salt same sand saw say school sea season second
see seed seem sell send sentence set seven several shape she ship short should show side silver
simple sing sister sit six sky sleep slow small snow so soft some song soon south space speak spring
stand star start state stay step still stone stood stop store story street strong such sugar summer
sun sure surface swim table take talk tall tea teach tell ten than that the their them then there
these they thing think third this those though thought thousand three through time to today together
told tomorrow too took top toward town trade train travel tree true try turn two uncle under until
up upon us use usual valley very village visit voice wait walk wall want warm was watch water wave
way we weather week well went were west what wheel when where which while white who whole why wide
wild will wind window winter wish with without woman wood word work world would write year yellow
yes yet you young your
"""

SPECIAL_TOKENS: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

CHAT_TEMPLATE: Final = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content if part.type == 'text' %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def _byte_symbols() -> list[str]:
    """Return the printable character that stands for each byte in byte-level BPE, as GPT-2 defined
    them.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, spare = [], 0x100
    for byte in range(256):
        symbols.append(chr(byte if byte in printable else spare))
        spare += byte not in printable
    return symbols


def _build() -> tuple[dict[str, int], list[list[str]], tuple[int, ...]]:
    symbols = _byte_symbols()
    vocab = {symbol: i for i, symbol in enumerate(symbols)}
    merges: list[list[str]] = []
    words = [symbols[ord(" ")] + word for word in _WORDS.split()]
    for word in words:
        # these merges extend a prefix that starts with the space: no two compete, so the longest
        # prefix always wins
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append([word[: end - 1], word[end - 1]])
    for word in ("system", "user", "assistant"):  # the chat's roles stand at the start of a line
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append([word[: end - 1], word[end - 1]])
    spoken = [vocab[word] for word in words] + [vocab[","], vocab["."]]
    return vocab, merges, tuple(sorted(spoken))


_VOCAB, _MERGES, SPOKEN_IDS = _build()
SPECIAL_IDS: Final = {token: len(_VOCAB) + i for i, token in enumerate(SPECIAL_TOKENS)}
assert len(_VOCAB) + len(SPECIAL_IDS) <= VOCAB_SIZE


def tokenizer_json() -> dict[str, Any]:
    """Return tokenizer.json for the `tokenizers` library."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": True,
    }
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": token, **flags} for token, i in SPECIAL_IDS.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": _VOCAB,
            "merges": _MERGES,
        },
    }


def tokenizer_config() -> dict[str, Any]:
    """Return tokenizer_config.json, with the chat template."""
    return {
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "errors": "replace",
        "extra_special_tokens": list(SPECIAL_TOKENS[1:]),
        "model_max_length": 32768,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
