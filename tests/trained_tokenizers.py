"""Tokenizers of every kind that encoders come with, each trained on a few sentences in some hundredths of a second."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertTokenizer,
    DistilBertTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    RobertaTokenizer,
    XLMRobertaTokenizer,
)

#: What the vocabularies are made of. Words repeat, so that some become one piece and others several.
TEXTS = [
    "A man plays the guitar on the stairs, and the dog sleeps.",
    "The film isn't good, it is very bad and the man is bad too.",
    "Why is the dog not in the film? A good dog plays in a good film.",
    "How do I learn to swim, and how deep is the lake where I learned to swim?",
    "Somebody makes music on the stairs; a kitten sleeps on a couch.",
]
BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTA = ("<s>", "<pad>", "</s>", "<unk>")
QUIET = {"show_progress": False}


def trained(kind: str) -> PreTrainedTokenizerBase:
    """A tokenizer of one of `KINDS`, that cuts to 64 tokens."""
    made = KINDS[kind]()
    made.model_max_length = 64
    return made


def _wordpiece(cls: Any, cased: bool = False) -> PreTrainedTokenizerBase:
    raw = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    raw.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    letters = ["##" + letter for letter in sorted({*"".join(TEXTS)})]  # else in another order in each process
    trainer = trainers.WordPieceTrainer(vocab_size=160, special_tokens=[*BERT, *letters], **QUIET)
    raw.train_from_iterator(TEXTS, trainer)
    return cls(vocab=raw.get_vocab(), do_lower_case=not cased)


def _byte_level(normalizer: Any = None, special: Sequence[str] = ()) -> Tokenizer:
    raw = Tokenizer(models.BPE())
    raw.normalizer = normalizer
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=[*special], initial_alphabet=alphabet, **QUIET)
    raw.train_from_iterator(TEXTS, trainer)
    return raw


def _roberta() -> PreTrainedTokenizerBase:
    raw = _byte_level(special=ROBERTA)
    return RobertaTokenizer(vocab=raw.get_vocab(), merges=[tuple(pair) for pair in _model(raw)["merges"]])


def _xlm_roberta() -> PreTrainedTokenizerBase:
    raw = Tokenizer(models.Unigram())
    raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=[*ROBERTA], unk_token="<unk>", **QUIET)
    raw.train_from_iterator(TEXTS, trainer)
    # Order and digits are others in each process.
    pieces = {piece: round(score, 2) for piece, score in _model(raw)["vocab"]}
    others = sorted({*pieces} - {*ROBERTA})
    return XLMRobertaTokenizer(vocab=[(piece, pieces[piece]) for piece in (*ROBERTA, *others)])


def _modernbert(normalizer: Any) -> PreTrainedTokenizerBase:
    raw = _byte_level(normalizer)
    raw.add_special_tokens([*BERT[1:4], BERT[0], BERT[4]])  # padding is the last but one
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, raw.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )  # fmt: skip
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), BERT, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=raw, model_input_names=["input_ids", "attention_mask"], **names)


def _model(raw: Tokenizer) -> dict[str, Any]:
    return json.loads(raw.to_str())["model"]


#: WordPiece with and without segment ids among its inputs; byte-level BPE and Unigram, `<s> a </s></s> b </s>` with 1
#: for padding; byte-level BPE, `[CLS] a [SEP] b [SEP]` with special tokens behind all others.
KINDS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "bert": lambda: _wordpiece(BertTokenizer),
    "bert-cased": lambda: _wordpiece(BertTokenizer, cased=True),
    "distilbert": lambda: _wordpiece(DistilBertTokenizer),
    "roberta": _roberta,
    "xlm-roberta": _xlm_roberta,
    "modernbert": lambda: _modernbert(normalizers.NFC()),
    "modernbert-uncased": lambda: _modernbert(normalizers.Lowercase()),
}
